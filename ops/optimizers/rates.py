"""Check of a script's learning rate schedule by evaluating the schedule at sampled steps.

Arguments of a learning rate schedule can be legal and still produce NaN as learning rate. For
example, `CosineDecayRestarts(first_decay_steps=1e-9, t_mul=-1)` takes the logarithm of a negative
number. Before a parameter server accepts a learning rate schedule, it computes the learning rate at
sampled steps of the run. If a learning rate schedule has no finite rate at a step that was not
sampled, the run ends as diverged at this step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thinwire.ops.offer import Described
from thinwire.ops.optimizers.schedule import MOST_UPDATES
from thinwire.ops.types import ConfigurationError

#: Number of first steps at which a schedule must have a finite rate if the run's length is unknown.
#: A learning rate finder multiplies the rate at each step and stops long before the rate overflows,
#: so an infinite rate at a later step is accepted. A run that reaches the step with the infinite
#: rate ends as diverged.
_SURE_STEPS = 1000
#: Number of elements to sample at each end of a schedule's list argument, such as its boundaries.
_OF_LIST = 4
#: Largest number of list elements that all evaluations of a schedule together may read, in about
#: two seconds. Keras compares a step with each boundary in a list, so schedules with long lists get
#: fewer samples. Skipped samples do no harm: the rates between boundaries are constants, and the
#: allow-list checks these constants.
_MOST_READ = 4000


def rate_at(schedule: Callable[[int], Any], step: int) -> float:
    """Return a schedule's learning rate at a step; NaN if the schedule raises an exception.

    Keras schedules raise exceptions of many types for unusual arguments, for example for an integer
    overflow or for a power with a negative base.
    """
    try:
        return float(schedule(step))
    except Exception:  # noqa: BLE001
        return math.nan


def check_rates(
    schedule: Callable[[int], Any], described: Described, first: int, most_steps: int | None
) -> None:
    """Raise an error if a learning rate schedule has no finite rate at one of the sampled steps.

    `check_rates` accepts zero and negative learning rates, as Keras does. If the length of the run
    is unknown, a schedule may have an infinite learning rate at a late step. `check_rates` rejects
    every schedule with a learning rate of NaN at a sampled step.

    Args:
        schedule: The learning rate schedule, a function of the step.
        described: Class and arguments of the learning rate schedule.
        first: First step of the run at which the schedule is evaluated.
        most_steps: Largest number of optimizer steps of the run; None if the number is unknown.

    Raises:
        ConfigurationError: A learning rate is not finite. The message contains the schedule, its
            arguments, the step and the rate.
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
            f"{step:,}; expected a finite rate at every step of the run. Correct the schedule's "
            "arguments. If the run ends before that step, set --iter_max."
        )


def sample_steps(described: Described, first: int, last: int) -> list[int]:
    """Return the steps at which a learning rate schedule is checked, ascending.

    The sampled steps are the run's first and last step, some early steps, the powers of two and of
    ten after the first step, and steps near special steps of the schedule. A special step of a
    learning rate schedule is an argument of the schedule, or the product, sum or quotient of two
    arguments. For example, the schedule `InverseTimeDecay` with a negative decay rate divides by
    zero at the step decay_steps / -decay_rate.

    Args:
        described: Class and arguments of the learning rate schedule.
        first: First step of the run at which the schedule is evaluated.
        last: Last step of the run at which the schedule is evaluated.
    """
    steps = {first, last, first + 3, first + 7}
    steps |= {first + base**power for base in (2, 10) for power in range(64)}
    for special in _special_steps(described.config.values()):
        steps |= {math.floor(special) + offset for offset in (-1, 0, 1, 2)}
    samples = sorted(step for step in steps if first <= step <= last)
    lengths = [len(value) for value in described.config.values() if isinstance(value, list)]
    stride = max(1, len(samples) * sum(lengths) // _MOST_READ)
    return sorted({*samples[::stride], samples[-1]})


def _special_steps(arguments: Iterable[Any]) -> Iterator[float]:
    """Yield absolute values of numeric arguments, and products, sums and quotients of two such."""
    numbers: list[float] = []
    for value in arguments:
        values = value if isinstance(value, list) else [value]
        for number in (*values[:_OF_LIST], *values[-_OF_LIST:]):
            if isinstance(number, int | float) and not isinstance(number, bool):
                numbers.append(abs(float(number)))
    yield from numbers
    for first, second in itertools.permutations(set(numbers), 2):
        product, sum_ = first * second, first + second
        yield from (value for value in (product, sum_) if math.isfinite(value))
        if second and math.isfinite(first / second):
            yield first / second
