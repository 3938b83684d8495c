"""The server update: a released update becomes new weights, through a Keras optimizer.

Plain SGD touches only the entries of a sparse update and is done by the apply kernels, which equal
Keras's SGD; so does momentum (`ops/optimizers/momentum_sgd`). Everything else runs Keras itself
(`ops/optimizers/variables`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import Described
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.base import ServerUpdate
from thinwire.ops.optimizers.schedule import parse_schedule
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.types import ConfigurationError, Kind, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64, ModelSpec

#: --server_optimizer value of whatever the script has compiled.
SCRIPT = "script"
#: Other values of --server_optimizer -> class of keras.optimizers.
OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "SGD",
    **{name.lower(): name for name in allow_list.OPTIMIZERS if name != "SGD"},
}


class RunsOwnRate:
    """What steps at the rate of the run's own schedule: no script sets it, or has the slots."""

    num_optimizers = 1

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Refuse: no script has this optimizer."""
        raise ValueError(f"slots of {len(slots)} optimizers; expected none")

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the rate of the run's own schedule."""
        del batches, state, number
        return scheduled

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the batches: where a script has a schedule, its workers read it."""
        del state, number
        return batches

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Leave the rate to the run's own schedule."""
        del rate, number
        return state

    def slots(self, state: State) -> list[list[Slot]]:
        """Return none: no script has this optimizer."""
        del state
        return []


class FollowsOuterSchedule:
    """What steps with changes of weights at a rate of its own."""

    global_lr: float
    global_lr_schedule: str

    def outer_rate(self, fraction: float) -> float:
        """Return the rate of changes of weights when `fraction` (0..1) of the budget is spent."""
        text = self.global_lr_schedule
        return parse_schedule(self.global_lr, text, "global_lr_schedule").rate(fraction)


@dataclasses.dataclass(frozen=True)
class OptimizerUpdate(FollowsOuterSchedule, RunsOwnRate):
    """How the PS steps, by a class of Keras; changes of weights are opposites of gradients to it.

    Attributes:
        optimizer: A value of --server_optimizer other than "script".
        momentum: For sgd and momentum.
        weight_decay: Decoupled, as Keras does it; 0: as the optimizer has it by default.
        global_lr: The outer rate, with which it steps by changes of weights.
        global_lr_schedule: Of that rate, as `parse_schedule` reads it; empty: constant.
    """

    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    global_lr: float = 1.0
    global_lr_schedule: str = ""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                f"--server_optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}."
            )
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"--momentum={self.momentum}: expected 0 <= momentum < 1.")
        self.outer_rate(0.0)  # refuses what is no schedule
        for name in ("weight_decay", "global_lr"):
            if not getattr(self, name) >= 0:  # refuses NaN too
                raise ConfigurationError(f"--{name}={getattr(self, name)}: expected 0 or more.")
        if self.momentum and not self._is_sgd:
            raise ConfigurationError(
                f"--momentum belongs to sgd; --server_optimizer={self.optimizer} has its own."
            )

    @property
    def _is_sgd(self) -> bool:
        return OPTIMIZERS[self.optimizer] == "SGD"

    @property
    def described(self) -> Described:
        """The Keras optimizer that it stands for, with a learning rate to be assigned."""
        options: dict[str, Any] = {"learning_rate": 0.0}
        if self.weight_decay:
            options["weight_decay"] = self.weight_decay
        if self._is_sgd:
            options["momentum"] = self.momentum
        return Described(OPTIMIZERS[self.optimizer], options)

    @property
    def keeps_sparse(self) -> bool:
        """Whether a sparse update changes only its own entries."""
        return self._is_sgd and not self.momentum and not self.weight_decay

    @property
    def awaits_offer(self) -> bool:
        """Never: the flags name it."""
        return False

    @property
    def needs_whole_variables(self) -> bool:
        """Whether no shard may hold a part of a variable."""
        return OPTIMIZERS[self.optimizer] not in allow_list.ELEMENTWISE

    @property
    def needs_one_shard(self) -> bool:
        """Never: nothing is clipped by a norm of all variables."""
        return False

    @property
    def needs_dense(self) -> bool:
        """Whether gradients of which only a part is sent make it divide by zero."""
        return OPTIMIZERS[self.optimizer] in allow_list.DENSE_ONLY

    def adds(self, kind: Kind) -> bool:
        """Return whether updates of this kind are added, times the outer rate."""
        return kind is Kind.DELTA and self.keeps_sparse

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's state for the shard's flat weights; see ServerUpdate."""
        if self.keeps_sparse:
            return {}
        if self._is_sgd and not self.weight_decay:
            from thinwire.ops.optimizers.momentum_sgd import MomentumSGD

            return {"optimizer": MomentumSGD(self.momentum, theta)}
        from thinwire.ops.optimizers.variables import VariablesOptimizer

        return {"optimizer": VariablesOptimizer(self.described, theta, spec)}

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return what an update is multiplied by where it is simply subtracted; None: it is not."""
        if not self.keeps_sparse:
            return None
        return -rate if kind is Kind.DELTA else rate

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
        """Step `theta` in place; see ServerUpdate."""
        del number
        if "optimizer" in state:
            state["optimizer"].step(theta, update, rate, negate=kind is Kind.DELTA)
            return None, state
        factor = -rate if kind is Kind.DELTA else rate
        kernels.apply(theta, update.indices, update.values, factor)
        return update.indices, state

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the slots that `save` keeps something of."""
        del number
        found: Sequence[Any] = state["optimizer"].changing() if "optimizer" in state else ()
        return found

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the slots, as plain data; see ServerUpdate."""
        saved: State = state["optimizer"].save(keep) if "optimizer" in state else {}
        return saved

    def set_weights(self, theta: Float32, state: State) -> None:
        """Go on from weights `theta` [n] that something else has changed; the slots stay."""
        if "optimizer" in state:
            state["optimizer"].set_weights(theta)

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load what `save` returned; the weights are `theta`."""
        if "optimizer" in state:
            state["optimizer"].restore(saved, theta)
        return state


def keras_optimizer(choice: ServerUpdate) -> Any:
    """Build the Keras optimizer that a policy of the flags names, at a rate to be assigned."""
    from thinwire.ops.optimizers.described import build_optimizer

    return build_optimizer(choice.described)
