"""Evaluates a script's schedule before the PS accepts it: constants in range can still make NaN.

`CosineDecayRestarts(first_decay_steps=1e-9, t_mul=-1)` passes every bound of the allow-list, and
takes the logarithm of a negative number. So a PS computes the rate at steps of the run's possible
life. The steps are samples: a schedule may still lack a rate between two of them, and then the run
ends as diverged (see `PsCore`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thinwire.ops.offer import Described
from thinwire.ops.optimizers.schedule import MOST_UPDATES
from thinwire.ops.types import ConfigurationError

#: Steps that a run of unknown length is taken to have. A search for a rate multiplies it at each
#: step, and ends long before it overflows. Where the run does come so far, it ends as diverged.
_SURE_STEPS = 1000
#: Samples from the beginning and from the end of a list of numbers, such as boundaries.
_OF_LIST = 4
#: Numbers of all lists that all evaluations together may read, in about two seconds: Keras compares
#: a step with each boundary. Rates between boundaries are constants, which the allow-list checks.
_MOST_READ = 4000


def rate_at(schedule: Callable[[int], Any], step: int) -> float:
    """Return a schedule's rate at a step; NaN where it has none, be it by an exception.

    A rate is a real number. Keras raises anything for arguments that are odd: an overflow of an
    integer, a negative base of a power.
    """
    try:
        return float(schedule(step))
    except Exception:  # noqa: BLE001
        return math.nan


def check_rates(
    schedule: Callable[[int], Any], described: Described, first: int, most_steps: int | None
) -> None:
    """Refuse a schedule that has no finite rate at one of the sampled steps.

    A rate of 0 or below is legal, as it is for Keras. So is one that overflows late in a run of
    unknown length; NaN never is.

    Args:
        schedule: The schedule, built.
        described: Its class and arguments.
        first: The step at which the run begins.
        most_steps: The most steps of the run; None: not known.

    Raises:
        ConfigurationError: It names the schedule, its arguments, the step and the rate.
    """
    last = first + (MOST_UPDATES if most_steps is None else most_steps)
    sure = first + _SURE_STEPS if most_steps is None else last
    for step in sample_steps(described, first, last):
        rate = rate_at(schedule, step)
        if math.isfinite(rate) or (math.isinf(rate) and step > sure):
            continue
        arguments = ", ".join(f"{name}={value!r:.50}" for name, value in described.config.items())
        raise ConfigurationError(
            f"schedule {described.name}({arguments:.500}) gives a learning rate of {rate} at step "
            f"{step:,}; expected a finite rate at every step of the run. Correct its arguments; "
            "where the run ends before that step, set --iter_max."
        )


def sample_steps(described: Described, first: int, last: int) -> list[int]:
    """Return the steps at which a schedule is evaluated, ascending.

    They are the first and last ones, first steps and powers of ten and of two after the beginning,
    and the neighbours of all steps that the arguments suggest: a number itself, a product or a
    quotient of two. `InverseTimeDecay` with a negative rate divides by zero at such a quotient.

    Args:
        described: The schedule's class and arguments.
        first: The step at which the run begins.
        last: The last step of the run.
    """
    steps = {first, last, first + 3, first + 7}
    steps |= {first + base**power for base in (2, 10) for power in range(64)}
    for special in _special_steps(described.config.values()):
        steps |= {math.floor(special) + offset for offset in (-1, 0, 1, 2)}
    found = sorted(step for step in steps if first <= step <= last)
    lengths = [len(value) for value in described.config.values() if isinstance(value, list)]
    stride = max(1, len(found) * sum(lengths) // _MOST_READ)
    return sorted({*found[::stride], found[-1]})


def _special_steps(arguments: Iterable[Any]) -> Iterator[float]:
    """Yield the sizes of numbers, products and quotients at which a schedule may change."""
    numbers: list[float] = []
    for value in arguments:
        values = value if isinstance(value, list) else [value]
        for each in (*values[:_OF_LIST], *values[-_OF_LIST:]):
            if isinstance(each, int | float) and not isinstance(each, bool):
                numbers.append(abs(float(each)))
    yield from numbers
    for one, other in itertools.permutations(set(numbers), 2):
        product, sum_ = one * other, one + other
        yield from (value for value in (product, sum_) if math.isfinite(value))
        if other and math.isfinite(one / other):
            yield one / other
