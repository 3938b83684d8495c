"""Keras' learning rate schedules in numpy, so that a parameter server needs no Keras for SGD.

Each class has the name, the arguments and the arithmetic of a class of keras.optimizers.schedules:
the same float32 operations in the same order as Keras does them on its TensorFlow backend. The
cosine, the logarithm and the power come from the C library, as in TensorFlow. numpy's versions of
these functions depend on the processor and differ in the last bit. Near the end of a cosine decay,
where 1 + cos is almost 0, one bit of the cosine would be a large part of the rate.

Differences: Keras computes in int32 if the initial rate or the first value is a whole number, so
that for example a decay rate of 0.5 becomes 0. The classes of this module always compute in float32
and return the rate that the script means. Keras on TensorFlow replaces numbers below 1.2e-38 by 0;
this module does not.

Source: `keras.src.optimizers.schedules.learning_rate_schedule` of Keras 3.15.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from thinwire.ops.offer import Described
from thinwire.ops.optimizers import allow_list
from thinwire.ops.types import ConfigurationError

_F = np.float32
_PI = _F(math.pi)


class KerasSchedule(Protocol):
    """A learning rate schedule of Keras: a function of the step."""

    def __call__(self, step: int) -> Any:
        """Return the learning rate at a step, as a float32 number.

        Raises:
            IndexError: A PiecewiseConstantDecay has no boundaries.
        """


def build_schedule(described: Described) -> KerasSchedule:
    """Build a learning rate schedule of Keras, which is a function of the step.

    Raises:
        ConfigurationError: The learning rate schedule is not on the allow-list, or an argument is
            missing.
    """
    allow_list.check_schedule(described)
    try:
        schedule: KerasSchedule = SCHEDULES[described.name](**described.config)
    except TypeError as error:
        raise ConfigurationError(
            f"the schedule {described.name} cannot be built from its arguments: {error!s:.300}; "
            "expected all arguments that have no default in Keras."
        ) from error
    return schedule


def _c_function(name: str, num_arguments: int, fallback: Any) -> Callable[..., np.float32]:
    """Return a float32 function of the C library, or `fallback` computed in float64 and rounded."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):  # not on every operating system
        return lambda *values: _F(fallback(*map(np.float64, values)))
    function.argtypes, function.restype = [ctypes.c_float] * num_arguments, ctypes.c_float
    return lambda *values: _F(function(*map(float, values)))


_cosine = _c_function("cosf", 1, np.cos)
_logarithm = _c_function("logf", 1, np.log)
_power = _c_function("powf", 2, np.power)


class _Quiet:
    """Base class of the schedules, without numpy's warnings: `check_rates` finds overflows."""

    def __call__(self, step: int) -> np.float32:
        """Return the learning rate at a step."""
        with np.errstate(all="ignore"):
            return self._rate(_F(step))

    def _rate(self, step: np.float32) -> np.float32:
        """Return the learning rate at a step that float32 represents."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _DecayByPeriods(_Quiet):
    """Base class of the schedules whose rate depends on the number of decay periods."""

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def _periods(self, step: np.float32) -> np.float32:
        """Return the number of decay periods until a step; whole periods only for a staircase."""
        periods = step / _F(self.decay_steps)
        return np.floor(periods) if self.staircase else periods


class ExponentialDecay(_DecayByPeriods):
    """Initial rate times ``decay_rate ** (step / decay_steps)``."""

    def _rate(self, step: np.float32) -> np.float32:
        periods = self._periods(step)
        return _F(self.initial_learning_rate) * _power(_F(self.decay_rate), periods)


class InverseTimeDecay(_DecayByPeriods):
    """Initial rate divided by ``1 + decay_rate * step / decay_steps``."""

    def _rate(self, step: np.float32) -> np.float32:
        periods = self._periods(step)
        return _F(self.initial_learning_rate) / (_F(1) + _F(self.decay_rate) * periods)


@dataclasses.dataclass(frozen=True)
class PiecewiseConstantDecay:
    """A constant rate between each two boundaries; a boundary belongs to the steps before it.

    Attributes:
        boundaries: Steps at which the rate changes, ascending; Keras cuts their fractions.
        values: Rates, one more than boundaries.
    """

    boundaries: Sequence[float]
    values: Sequence[float]

    def __call__(self, step: int) -> np.float32:
        """Return the learning rate at a step; 0 between equal boundaries, as in Keras."""
        whole = [int(boundary) for boundary in self.boundaries]
        if step <= whole[0]:
            return _F(self.values[0])
        if step > whole[-1]:
            return _F(self.values[-1])
        number = next(n for n, boundary in enumerate(whole) if step <= boundary)
        return _F(self.values[number])


@dataclasses.dataclass(frozen=True)
class PolynomialDecay(_Quiet):
    """A power of the remaining share of `decay_steps`, scaled between the first and last rate."""

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def _rate(self, step: np.float32) -> np.float32:
        end, decay_steps = _F(self.end_learning_rate), _F(self.decay_steps)
        if self.cycle:
            decay_steps = decay_steps * (np.ceil(step / decay_steps) if step else _F(1))
        else:
            step = min(step, decay_steps)
        remaining = _power(_F(1) - step / decay_steps, _F(self.power))
        return (_F(self.initial_learning_rate) - end) * remaining + end


@dataclasses.dataclass(frozen=True)
class CosineDecay(_Quiet):
    """A linear warm-up, if there is a `warmup_target`, then half a cosine down to `alpha`."""

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: float = 0

    def _rate(self, step: np.float32) -> np.float32:
        first, decay_steps = _F(self.initial_learning_rate), _F(self.decay_steps)
        if self.warmup_target is None:
            return self._decayed(min(step, decay_steps), first)
        target, warmup_steps = _F(self.warmup_target), _F(self.warmup_steps)
        step = min(step, decay_steps + warmup_steps)
        if step < warmup_steps:
            return (target - first) * (step / warmup_steps) + first
        return self._decayed(step - warmup_steps, target)

    def _decayed(self, step: np.float32, first: np.float32) -> np.float32:
        cosine = _F(0.5) * (_F(1) + _cosine(_PI * (step / _F(self.decay_steps))))
        # Keras subtracts alpha in float64, before the product in float32.
        return first * (_F(1 - self.alpha) * cosine + _F(self.alpha))


@dataclasses.dataclass(frozen=True)
class CosineDecayRestarts(_Quiet):
    """Half a cosine in each period; each period is `t_mul` times as long, `m_mul` times as high."""

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0

    def _rate(self, step: np.float32) -> np.float32:
        alpha = _F(self.alpha)
        restarts, share = self._period(step / _F(self.first_decay_steps))
        height = _F(0.5) * _power(_F(self.m_mul), restarts)
        cosine = height * (_F(1) + _cosine(_PI * share))
        return _F(self.initial_learning_rate) * ((_F(1) - alpha) * cosine + alpha)

    def _period(self, periods: np.float32) -> tuple[np.float32, np.float32]:
        """Return the number of restarts, and the consumed share of the period after the last one.

        Args:
            periods: The step in units of the first period's length.
        """
        growth = _F(self.t_mul)
        if growth == 1:
            restarts = np.floor(periods)
            return restarts, periods - restarts
        ends = _logarithm(_F(1) - periods * (_F(1) - growth))
        restarts = np.floor(ends / _logarithm(growth))
        length = _power(growth, restarts)
        return restarts, (periods - (_F(1) - length) / (_F(1) - growth)) / length


#: Name of a class of keras.optimizers.schedules -> its numpy version, for the allow-list's classes.
SCHEDULES: dict[str, Any] = {
    schedule.__name__: schedule
    for schedule in (
        ExponentialDecay,
        InverseTimeDecay,
        PiecewiseConstantDecay,
        PolynomialDecay,
        CosineDecay,
        CosineDecayRestarts,
    )
}
