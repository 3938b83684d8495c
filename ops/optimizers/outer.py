"""Server optimizers for changes of weights: DiLoCo's Nesterov step and FedOpt's three optimizers.

For an outer optimizer, a worker pushes the change of weights w - b, with w its weights after a
round of local steps and b the weights at the start of the round. Papers call the negative change of
weights, D = b - w, the pseudo-gradient; the server subtracts D. Only `OuterUpdate.step` changes the
sign of the workers' update. If workers push gradients instead of changes of weights, the
pseudo-gradient D is the learning rate times the gradient: one local SGD step.

The arithmetic of an outer optimizer is numpy on chunks that fit the processor's cache, and the
optimizer's state is plain arrays. In an outer optimizer the new value of a weight depends only on
the weight's own value, update and optimizer slots, and on the number of steps. Because an outer
optimizer steps each weight separately, a shard server may have any part of a variable.

Source: Douillard et al., "DiLoCo", arXiv 2311.08105; Reddi et al., "Adaptive federated
optimization", arXiv 2003.00295, algorithm 2.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.optimizers.base import OptimizerTraits, ServerUpdate
from thinwire.ops.optimizers.server import (
    GLOBAL_LR,
    GLOBAL_LR_SCHEDULE,
    MOMENTUM,
    OPTIMIZERS,
    FollowsOuterSchedule,
)
from thinwire.ops.options import above_zero, choice, decay_factor, number, switch
from thinwire.ops.policy import setting
from thinwire.ops.types import Float32, Int64, Kind, ModelSpec, State, Update

#: Number of entries per chunk of an array. The chunks of all arrays in use fit into a second-level
#: cache together.
_PIECE = 1 << 16
_BETA_1 = decay_factor(
    "server_beta_1",
    "Decay of the running mean of --server_optimizer=adam, adagrad and yogi, in runs whose workers "
    "push changes of weights.",
    unset="0.9, or 0 with adagrad",
)
_BETA_2 = number(
    "server_beta_2",
    0.99,
    "Decay of the running mean square of --server_optimizer=adam and yogi, in runs whose workers "
    "push changes of weights.",
    "factor",
    low=0.0,
    high=0.999999,
)


@dataclasses.dataclass(frozen=True)
class OuterUpdate(FollowsOuterSchedule, abc.ABC):
    """Base class of server optimizers that step by pseudo-gradients (changes of weights).

    Each slot array of an outer optimizer has the size of the weights.

    Attributes:
        slot_names: Names of the outer optimizer's slot arrays (state); empty for an optimizer
            without slots.
        global_lr: g, the outer rate (factor on workers' changes of weights).
        global_lr_schedule: Schedule of the outer rate (factor on workers' changes of weights), as
            text for `parse_schedule`. Empty means that the outer rate is constant.
    """

    slot_names: ClassVar[Sequence[str]]

    global_lr: float = setting(GLOBAL_LR, 1.0)
    global_lr_schedule: str = setting(GLOBAL_LR_SCHEDULE, "")

    def __post_init__(self) -> None:
        """Raise an error if the outer rate (--global_lr) is negative, or its schedule malformed."""
        super().__post_init__()
        # `outer_rate` parses `global_lr_schedule`, the schedule of the outer rate, and raises an
        # error if the text is malformed
        self.outer_rate(0.0)

    @property
    def traits(self) -> OptimizerTraits:
        """Properties of the outer optimizer; a sparse update stays sparse if there are no slots."""
        if self.slot_names:
            return OptimizerTraits()
        return OptimizerTraits(keeps_sparse=True, gradient_scale=self.global_lr)

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer state for weights `theta` [n]: slot arrays [n] and step count."""
        import numpy as np

        if not self.slot_names:
            return {}
        slots = {name: np.full_like(theta, self._start_of(name)) for name in self.slot_names}
        return {"steps": np.int64(0), **slots}

    def step(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Apply an update to the weights `theta` in place; with slots, all weights may change."""
        import numpy as np

        # The pseudo-gradient D is the workers' merged update times `sign`.
        sign = np.float32(-1.0 if kind is Kind.DELTA else rate)
        outer = rate if kind is Kind.DELTA else self.global_lr
        factor = self.traits.factor(kind, rate)
        if factor is not None:
            kernels.apply(theta, update.indices, update.values, factor)
            return update.indices, state
        values = update.dense(len(theta))
        outer *= self._correction(int(state["steps"]))
        with np.errstate(over="ignore", under="ignore"):
            for start in range(0, len(theta), _PIECE):
                piece = slice(start, start + _PIECE)
                pseudo_gradient = values[piece] * sign
                slots = {name: state[name][piece] for name in self.slot_names}
                self._step(theta[piece], pseudo_gradient, slots, outer)
        state["steps"] = np.int64(state["steps"] + 1)
        return None, state

    @abc.abstractmethod
    def _step(
        self, theta: Float32, pseudo_gradient: Float32, slots: dict[str, Float32], rate: float
    ) -> None:
        """Do an optimizer step for one chunk of the weights and of the optimizer slots, in place.

        Args:
            theta: [k] float32, one chunk of the shard server's weights.
            pseudo_gradient: [k] float32, the pseudo-gradient D; a copy that the step may overwrite.
            slots: Name of the optimizer slot -> [k] float32, the slot values of the chunk.
            rate: Outer rate g (factor on the step) times the bias correction from `_correction`.
        """

    def _start_of(self, slot: str) -> float:
        """Return the initial value of the optimizer slot array with the given name."""
        return 0.0

    def _correction(self, steps: int) -> float:
        """Return the factor on the outer rate (bias correction) after `steps` steps."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class Nesterov(OuterUpdate):
    """DiLoCo's outer step: m <- beta m + D; b <- b - g (D + beta m).

    m is the velocity, D the pseudo-gradient, b the weights, g the outer rate.

    Attributes:
        global_lr: g, the outer rate (factor on DiLoCo's step).
        momentum: beta, the momentum coefficient. With 0, the merged change of weights is added to
            the weights, times g.

    Source: Douillard et al., arXiv 2311.08105; the form is PyTorch's SGD(nesterov=True).
    """

    global_lr: float = setting(GLOBAL_LR, 0.7)
    momentum: float = setting(MOMENTUM, 0.9, shown=True)

    @property
    def slot_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the optimizer slots: the velocity, or no slot if the momentum is 0."""
        return ("velocity",) if self.momentum else ()

    def _step(
        self, theta: Float32, pseudo_gradient: Float32, slots: dict[str, Float32], rate: float
    ) -> None:
        import numpy as np

        velocity, beta = slots["velocity"], np.float32(self.momentum)
        velocity *= beta
        velocity += pseudo_gradient
        pseudo_gradient += beta * velocity
        pseudo_gradient *= np.float32(rate)
        theta -= pseudo_gradient


@dataclasses.dataclass(frozen=True)
class _Adaptive(OuterUpdate):
    """FedOpt's step: m <- b1 m + (1 - b1) d; b <- b + g m / (sqrt v + tau), with d = -D.

    m is the first moment, v the second moment, b the weights, D the pseudo-gradient. Each of
    FedOpt's three optimizers updates the second moment v differently.

    Attributes:
        global_lr: g, the outer rate (factor on FedOpt's step).
        server_beta_1: b1, the decay rate of the first moment.
        server_tau: tau, the constant in FedOpt's divisor sqrt(v) + tau. It is added outside the
            root, so that a weight with only zero changes keeps its value.
        server_v_start: Initial value of the second moment v: "zero" for 0, or the paper's
            "tau_squared" for tau^2.
    """

    slot_names: ClassVar[Sequence[str]] = ("mean", "square")

    global_lr: float = setting(GLOBAL_LR, 0.01)
    server_beta_1: float = setting(_BETA_1, 0.9)
    server_tau: float = setting(
        number(
            "server_tau",
            1e-3,
            "Constant that --server_optimizer=adam, adagrad and yogi add to the root of the mean "
            "square, in runs whose workers push changes of weights.",
            "change of weights",
            rule=above_zero(),
        )
    )
    server_v_start: str = setting(
        choice(
            "server_v_start",
            "zero",
            "Initial mean square of --server_optimizer=adam, adagrad and yogi, in runs whose "
            "workers push changes of weights: zero, or the square of --server_tau.",
            ("zero", "tau_squared"),
        )
    )

    def _start_of(self, slot: str) -> float:
        is_squared = slot == "square" and self.server_v_start == "tau_squared"
        return self.server_tau**2 if is_squared else 0.0

    def _step(
        self, theta: Float32, pseudo_gradient: Float32, slots: dict[str, Float32], rate: float
    ) -> None:
        import numpy as np

        mean, square, beta = slots["mean"], slots["square"], np.float32(self.server_beta_1)
        change = np.negative(pseudo_gradient, out=pseudo_gradient)
        mean *= beta
        mean += np.float32(1 - self.server_beta_1) * change
        np.square(change, out=change)
        self._accumulate(square, change)
        np.sqrt(square, out=change)
        change += np.float32(self.server_tau)
        np.divide(mean, change, out=change)
        change *= np.float32(rate)
        theta += change

    @abc.abstractmethod
    def _accumulate(self, square: Float32, squared: Float32) -> None:
        """Update the second moment `square` (v, [k]) in place by `squared` (d^2, [k])."""


@dataclasses.dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """FedOpt's Adagrad: v <- v + d^2; by default without momentum (b1 = 0, so m is d)."""

    server_beta_1: float = setting(_BETA_1, 0.0)

    def _accumulate(self, square: Float32, squared: Float32) -> None:
        square += squared


@dataclasses.dataclass(frozen=True)
class FedAdam(_Adaptive):
    """FedOpt's Adam with the second moment v <- b2 v + (1 - b2) d^2.

    Attributes:
        server_beta_2: b2, the decay rate of the second moment.
        bias_correction: True to multiply the outer rate g by sqrt(1 - b2^(t+1)) / (1 - b1^(t+1)) at
            step t = 0, 1, ..., as Flower's FedAdam does. The FedOpt paper has no bias correction.
    """

    server_beta_2: float = setting(_BETA_2)
    bias_correction: bool = setting(
        switch(
            "bias_correction",
            "Correct the bias of both means of --server_optimizer=adam, as Flower does, in runs "
            "whose workers push changes of weights.",
        )
    )

    def _accumulate(self, square: Float32, squared: Float32) -> None:
        import numpy as np

        square *= np.float32(self.server_beta_2)
        squared *= np.float32(1 - self.server_beta_2)
        square += squared

    def _correction(self, steps: int) -> float:
        if not self.bias_correction:
            return 1.0
        unbiased = 1 - self.server_beta_1 ** (steps + 1)
        return float((1 - self.server_beta_2 ** (steps + 1)) ** 0.5 / unbiased)


@dataclasses.dataclass(frozen=True)
class FedYogi(_Adaptive):
    """FedOpt's Yogi with the second moment v <- v - (1 - b2) d^2 sign(v - d^2).

    Attributes:
        server_beta_2: b2, the decay rate of the second moment v. A step changes v by at most (1 -
            b2) d^2.
    """

    server_beta_2: float = setting(_BETA_2)

    def _accumulate(self, square: Float32, squared: Float32) -> None:
        import numpy as np

        direction = np.sign(square - squared)
        squared *= np.float32(1 - self.server_beta_2)
        squared *= direction
        square -= squared


#: Value of the flag --server_optimizer -> class of the server optimizer if workers push changes of
#: weights. If workers push gradients, "adagrad" and "adam" select the Keras optimizers instead.
OUTER_OPTIMIZERS: dict[str, type[ServerUpdate]] = {
    "nesterov": Nesterov,
    "adagrad": FedAdagrad,
    "adam": FedAdam,
    "yogi": FedYogi,
}
#: All values of the flag --server_optimizer except "script".
SERVER_OPTIMIZERS = tuple(dict.fromkeys((*OPTIMIZERS, *OUTER_OPTIMIZERS)))
