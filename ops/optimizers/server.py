"""The server update: a released update becomes new weights, through a Keras optimizer.

Plain SGD touches only the entries of a sparse update and is done by the apply kernels, which equal
Keras's SGD; so does momentum (`ops/optimizers/momentum_sgd`). Everything else runs Keras itself on
the shard's flat buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.optimizers.base import ServerUpdate
from thinwire.ops.types import ConfigurationError, Kind, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

#: --server_optimizer value -> name in keras.optimizers.
OPTIMIZERS = {"sgd": "SGD", "momentum": "SGD", "adam": "Adam"}


@dataclasses.dataclass(frozen=True)
class OptimizerUpdate:
    """How the PS steps.

    Attributes:
        optimizer: sgd, momentum or adam.
        momentum: For sgd and momentum.
        weight_decay: Decoupled, as Keras does it; 0 is off.
        global_lr: Factor on updates of kind ``delta`` that plain SGD adds.
        feeds_deltas: Give -mean of deltas to the optimizer instead of adding them.
    """

    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    global_lr: float = 1.0
    feeds_deltas: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                f"--server_optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}."
            )
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"--momentum={self.momentum}: expected 0 <= momentum < 1.")
        for name in ("weight_decay", "global_lr"):
            if not getattr(self, name) >= 0:  # refuses NaN too
                raise ConfigurationError(f"--{name}={getattr(self, name)}: expected 0 or more.")
        if self.momentum and self.optimizer == "adam":
            raise ConfigurationError(
                "--momentum belongs to sgd; --server_optimizer=adam has betas."
            )

    @property
    def keeps_sparse(self) -> bool:
        """Whether a sparse update changes only its own entries."""
        return OPTIMIZERS[self.optimizer] == "SGD" and not self.momentum and not self.weight_decay

    def adds(self, kind: Kind) -> bool:
        """Return whether updates of this kind are added, times `global_lr`."""
        return kind is Kind.DELTA and not self.feeds_deltas

    def init(self, theta: Float32) -> State:
        """Return the optimizer's state for the shard's flat weights [n] float32."""
        if self.keeps_sparse:
            return {}
        if OPTIMIZERS[self.optimizer] == "SGD" and not self.weight_decay:
            from thinwire.ops.optimizers.momentum_sgd import MomentumSGD

            return {"optimizer": MomentumSGD(self.momentum, theta)}
        return {"optimizer": FlatKerasOptimizer(keras_optimizer(self), theta)}

    def apply(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
    ) -> tuple[Int64 | None, State]:
        """Step `theta` in place.

        Args:
            theta: [n] float32.
            update: The released, weighted mean.
            kind: What its values mean.
            rate: Scheduled learning rate, used for gradients.
            kernels: That apply it.
            state: From `init`.

        Returns:
            The entries that changed (None: all), and the state.
        """
        adds = self.adds(kind)
        if "optimizer" in state and not adds:
            state["optimizer"].step(theta, update, rate, negate=kind is Kind.DELTA)
            return None, state
        factor = -self.global_lr if adds else (-rate if kind is Kind.DELTA else rate)
        if update.indices is None:
            kernels.apply_dense(theta, update.values, factor)
        else:
            kernels.apply_sparse(theta, update.indices, update.values, factor)
        return update.indices, state


def keras_optimizer(choice: ServerUpdate) -> Any:
    """Build the Keras optimizer that the choice names."""
    import keras

    options: dict[str, Any] = {"weight_decay": choice.weight_decay or None}
    if OPTIMIZERS[choice.optimizer] == "SGD":
        options["momentum"] = choice.momentum
    return getattr(keras.optimizers, OPTIMIZERS[choice.optimizer])(**options)


class FlatKerasOptimizer:
    """A Keras optimizer that owns a flat copy of the shard and writes each step back."""

    def __init__(self, optimizer: Any, theta: Float32) -> None:
        """Build the slots for `theta` [n] float32."""
        import keras
        import tensorflow as tf

        self.optimizer = optimizer
        self.variable = keras.Variable(theta, name="shard")
        optimizer.build([self.variable])

        # One fused pass over the slots: XLA takes half the time of op by op here (BUILD_NOTES).
        traced: Callable[[Callable[[Any], None]], Callable[[Any], None]] = tf.function(
            input_signature=[tf.TensorSpec(theta.shape, tf.float32)], jit_compile=True
        )
        self._step = traced(lambda gradient: optimizer.apply([gradient], [self.variable]))
        self._rate: float | None = None  # what the optimizer's variable holds

    def step(self, theta: Float32, update: Update, rate: float, negate: bool) -> None:
        """Apply one gradient [n] or sparse update; `theta` gets the result."""
        import numpy as np

        gradient = update.values
        if update.indices is not None:
            gradient = np.zeros_like(theta)
            gradient[update.indices] = update.values
        if rate != self._rate:  # setting a variable costs half as much as the whole step
            self.optimizer.learning_rate.assign(rate)
            self._rate = rate
        self._step(_as_tensor(-gradient if negate else gradient))
        # A view of the tensor behind the variable: one copy, into theta, instead of two.
        np.copyto(theta, np.asarray(memoryview(self.variable.value.value())))

    def save(self) -> State:
        """Return every slot, the step counter included."""
        return {str(i): v.numpy() for i, v in enumerate(self.optimizer.variables)}

    def restore(self, slots: State, theta: Float32) -> None:
        """Load what `save` returned, at weights `theta`."""
        self._rate = None
        self.variable.assign(theta)
        for number, variable in enumerate(self.optimizer.variables):
            variable.assign(slots[str(number)])


def _as_tensor(values: Float32) -> Any:
    """Return a tensor [n] of a buffer [n], without a copy where it lies on a 64-byte border.

    The tensor may share the buffer's memory: neither may change while it is in use.
    """
    import tensorflow as tf

    if values.ctypes.data % 64 or not values.flags.writeable:
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
