"""Server optimizers of changes of weights: Nesterov as DiLoCo has it, and the three of FedOpt.

A worker's change is w - b on the wire; papers call its opposite D the pseudo-gradient, which the
server subtracts. The sign is turned here, in `_pseudo_gradient`, and nowhere else. Where gradients
travel instead, D is the learning rate times the gradient: one local step of plain SGD.

All is numpy, in pieces that stay in cache; the state is plain arrays. An entry's step depends on
that entry's own slots and on the number of steps alone, so shards hold any part of a variable, and
a range that is released by itself can be stepped by itself.

Source: Douillard et al., "DiLoCo", arXiv 2311.08105; Reddi et al., "Adaptive federated
optimization", arXiv 2003.00295, algorithm 2.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import Described
from thinwire.ops.optimizers.base import ServerUpdate
from thinwire.ops.optimizers.server import OPTIMIZERS, FollowsOuterSchedule, RunsOwnRate
from thinwire.ops.types import ConfigurationError, Kind, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64, ModelSpec

#: --server_v_start values: what FedOpt's second moments begin with.
STARTS = ("zero", "tau_squared")
_PIECE = 1 << 16  # entries of each of the arrays in use at a time: together a second-level cache


@dataclasses.dataclass(frozen=True)
class OuterUpdate(FollowsOuterSchedule, RunsOwnRate, abc.ABC):
    """What steps with pseudo-gradients, its slots being arrays like the weights.

    Attributes:
        global_lr: g, the outer rate.
        global_lr_schedule: Of that rate, as `parse_schedule` reads it; empty: constant.
    """

    optimizer: ClassVar[str]
    slot_names: ClassVar[Sequence[str]]
    weight_decay: ClassVar[float] = 0.0
    awaits_offer: ClassVar[bool] = False
    needs_whole_variables: ClassVar[bool] = False
    needs_one_shard: ClassVar[bool] = False
    needs_dense: ClassVar[bool] = False

    global_lr: float = 1.0
    global_lr_schedule: str = ""

    def __post_init__(self) -> None:
        """Refuse rates that cannot work."""
        _check_range("global_lr", self.global_lr, 0.0, float("inf"))
        self.outer_rate(0.0)  # refuses what is no schedule

    @property
    def described(self) -> Described:
        """Refuse: no class of Keras does the same.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"--server_optimizer={self.optimizer} steps with the changes of weights of local "
            "steps, and here no worker takes any; expected an optimizer of gradients. Give "
            "--method=asgd, and --server_optimizer=sgd, momentum, adam or another of Keras'."
        )

    @property
    def keeps_sparse(self) -> bool:
        """Whether a sparse update changes only its own entries: without slots."""
        return not self.slot_names

    def adds(self, kind: Kind) -> bool:
        """Return whether updates of this kind are added, times the outer rate."""
        return kind is Kind.DELTA and self.keeps_sparse

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return what an update is multiplied by where it is simply subtracted; None: it is not."""
        if not self.keeps_sparse:
            return None
        return -rate if kind is Kind.DELTA else rate * self.global_lr

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the slots for the shard's flat weights [n]: arrays [n] float32, and a count."""
        import numpy as np

        del spec
        if self.keeps_sparse:
            return {}
        slots = {name: np.full_like(theta, self._start_of(name)) for name in self.slot_names}
        return {"steps": np.int64(0), **slots}

    def apply(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Step `theta` in place; see ServerUpdate. With slots a sparse update steps all entries."""
        import numpy as np

        del number
        sign = -1.0 if kind is Kind.DELTA else rate  # see `_pseudo_gradient`
        outer = rate if kind is Kind.DELTA else self.global_lr
        factor = self.factor(kind, rate)
        if factor is not None:
            kernels.apply(theta, update.indices, update.values, factor)
            return update.indices, state
        values = update.values
        if update.indices is not None:
            values = np.zeros_like(theta)
            values[update.indices] = update.values
        outer *= self._correction(int(state["steps"]))
        with np.errstate(over="ignore", under="ignore"):
            for start in range(0, len(theta), _PIECE):
                piece = slice(start, start + _PIECE)
                pseudo_gradient = _pseudo_gradient(values[piece], sign)
                slots = {name: state[name][piece] for name in self.slot_names}
                self._step(theta[piece], pseudo_gradient, slots, outer)
        state["steps"] = np.int64(state["steps"] + 1)
        return None, state

    @abc.abstractmethod
    def _step(
        self, theta: Float32, pseudo_gradient: Float32, slots: dict[str, Float32], rate: float
    ) -> None:
        """Step `theta` [k] and its slots [k] in place.

        Args:
            theta: [k] float32.
            pseudo_gradient: [k] float32, D; its own copy.
            slots: By name, [k] float32.
            rate: g, corrected.
        """

    def _start_of(self, slot: str) -> float:
        """Return what a slot begins with."""
        del slot
        return 0.0

    def _correction(self, steps: int) -> float:
        """Return the factor of the rate after so many steps."""
        del steps
        return 1.0

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the slots."""
        del number
        return [value for value in state.values() if value.ndim]

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the slots, as plain data; see ServerUpdate."""
        return {name: keep(value) if value.ndim else value.copy() for name, value in state.items()}

    def set_weights(self, theta: Float32, state: State) -> None:
        """Do nothing: it steps the weights where they lie."""
        del theta, state

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load what `save` returned; the weights are `theta`."""
        import numpy as np

        del theta
        for name in self.slot_names:
            np.copyto(state[name], saved[name])
        return {**state, **({"steps": np.int64(saved["steps"])} if state else {})}


@dataclasses.dataclass(frozen=True)
class Nesterov(OuterUpdate):
    """DiLoCo's outer step: m <- beta m + D; b <- b - g (D + beta m).

    Attributes:
        global_lr: g.
        momentum: beta; with 0 changes of weights are added, times g.

    Source: Douillard et al., arXiv 2311.08105; the form is PyTorch's SGD(nesterov=True).
    """

    optimizer: ClassVar[str] = "nesterov"

    global_lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        super().__post_init__()
        _check_share("momentum", self.momentum)

    @property
    def slot_names(self) -> Sequence[str]:  # type: ignore[override]
        """The velocity, where there is one."""
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
    """FedOpt, with d = -D: m <- b1 m + (1 - b1) d; v by each class; b <- b + g m / (sqrt v + tau).

    Attributes:
        global_lr: g.
        server_beta_1: b1.
        server_tau: tau, outside the root, so that an entry without any change stays.
        server_v_start: v begins at zero, or at the paper's tau^2.
    """

    momentum: ClassVar[float] = 0.0
    slot_names: ClassVar[Sequence[str]] = ("mean", "square")

    global_lr: float = 0.01
    server_beta_1: float = 0.9
    server_tau: float = 1e-3
    server_v_start: str = "zero"

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        super().__post_init__()
        _check_share("server_beta_1", self.server_beta_1)
        _check_range("server_tau", self.server_tau, 1e-12, 1e6)
        if self.server_v_start not in STARTS:
            raise ConfigurationError(
                f"--server_v_start={self.server_v_start!r}: expected one of {', '.join(STARTS)}."
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
        """Take d^2 [k] into v [k], in place."""


@dataclasses.dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """FedOpt's Adagrad: v <- v + d^2, by default without momentum (b1 = 0)."""

    optimizer: ClassVar[str] = "adagrad"

    server_beta_1: float = 0.0

    def _accumulate(self, square: Float32, squared: Float32) -> None:
        square += squared


@dataclasses.dataclass(frozen=True)
class FedAdam(_Adaptive):
    """FedOpt's Adam: v <- b2 v + (1 - b2) d^2.

    Attributes:
        server_beta_2: b2.
        bias_correction: Whether g is multiplied by sqrt(1 - b2^(t+1)) / (1 - b1^(t+1)) at step
            t = 0, 1, ..., as Flower's FedAdam does; the paper does not.
    """

    optimizer: ClassVar[str] = "adam"

    server_beta_2: float = 0.99
    bias_correction: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        super().__post_init__()
        _check_share("server_beta_2", self.server_beta_2)

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
    """FedOpt's Yogi: v <- v - (1 - b2) d^2 sign(v - d^2).

    Attributes:
        server_beta_2: b2.
    """

    optimizer: ClassVar[str] = "yogi"

    server_beta_2: float = 0.99

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        super().__post_init__()
        _check_share("server_beta_2", self.server_beta_2)

    def _accumulate(self, square: Float32, squared: Float32) -> None:
        import numpy as np

        direction = np.sign(square - squared)
        squared *= np.float32(1 - self.server_beta_2)
        squared *= direction
        square -= squared


#: --server_optimizer value -> the policy where changes of weights travel; those names that Keras
#: has too are Keras' where gradients travel.
OUTER_OPTIMIZERS: dict[str, type[ServerUpdate]] = {
    "nesterov": Nesterov,
    "adagrad": FedAdagrad,
    "adam": FedAdam,
    "yogi": FedYogi,
}
#: All values of --server_optimizer but that of a script's own.
SERVER_OPTIMIZERS = tuple(dict.fromkeys((*OPTIMIZERS, *OUTER_OPTIMIZERS)))


def _pseudo_gradient(values: Float32, factor: float) -> Float32:
    """Return D [k] of what was merged: -1 times changes of weights, a rate times gradients."""
    import numpy as np

    return values * np.float32(factor)


def _check_share(flag: str, value: float) -> None:
    if not 0 <= value < 1:  # refuses NaN too
        raise ConfigurationError(f"--{flag}={value}: expected 0 <= {flag} < 1.")


def _check_range(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        bounds = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
        raise ConfigurationError(f"--{flag}={value}: expected {bounds}.")
