"""The weights at which a worker computes its next gradient, and the change that it pushes.

A training method determines which of four classes a worker uses:

- `AtBase`: gradients are computed at the weights that the shards sent last.
- `AfterLocalSteps`: a local optimizer changes the weights between two exchanges.
- `AheadOfAnswer`: the weights include the newest push before the shards have answered it.
- `ScriptOwned`: the script's own optimizer steps, and the weights include its unsent changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.codecs.error_feedback import wrappers_of
from thinwire.ops.kernels.numpy_ops import aligned, all_finite
from thinwire.worker.core.local_round import LocalRound

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.methods.method import Method
    from thinwire.ops.types import Float32, ModelSpec, State


@dataclasses.dataclass(frozen=True)
class WorkerArrays:
    """Arrays and functions of a worker's engine that its local model uses.

    Attributes:
        method: Training method of the run.
        spec: Paths, shapes and dtypes of the shared model's variables.
        kernels: Set of array functions for the host or the device that holds the gradients.
        base: [n] float32 weights as received from the shards, in host memory.
        newest: [n] float32 weights as received from the shards, where steps are computed: the copy
            of `base` on the device, or `base` itself.
        allocate: Function that returns weights of zero, [n] float32, where steps are computed.
        add_sent: Function of weights [n], a shard's number and a sign, which adds (1) or subtracts
            (-1) the newest push to the shard in the weights.
    """

    method: Method
    spec: ModelSpec
    kernels: Kernels
    base: Float32
    newest: Float32
    allocate: Callable[[], Float32]
    add_sent: Callable[[Float32, int, int], None]

    def round(self, start: Float32, weights: Float32) -> LocalRound:
        """Return the counts, and the local optimizer, of the steps between two exchanges."""
        method = self.method
        return LocalRound(method.local, self.newest, start, weights, self.spec, self.kernels)


class AtBase:
    """Local model whose gradients are computed at the weights that the shards sent last.

    The other local models are subclasses.

    Attributes:
        weights: [n] float32 weights at which to compute the next gradient; not a copy. The array is
            a `thinwire.ops.kernels.device.DeviceArray` if steps are computed on the device.
        round: Counts of the mini-batches since the last exchange, and the local optimizer.
        takes_local_steps: True if a local optimizer steps between two exchanges.
    """

    takes_local_steps = False

    def __init__(self, engine: WorkerArrays) -> None:
        """Start at the weights of the worker's engine."""
        self._engine, self.weights = engine, engine.newest
        self.round = engine.round(engine.newest, engine.newest)

    def take(
        self, values: Float32, rate: float, loss: float | None, statistics: Float32 | None
    ) -> None:
        """Process the result of one mini-batch, before the codec encodes it.

        Args:
            values: [n] float32 gradient at `weights`, or weights after the script's own step.
            rate: Learning rate of this step.
            loss: Mean loss of the mini-batch; None if unknown.
            statistics: [m] moving statistics after the mini-batch; None if shard 0 does not average
                statistics.

        Raises:
            NonFiniteUpdate: A value is NaN or infinite. The local model is unchanged.
        """

    def to_push(self, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the values [n] that an exchange must encode, and the learning rate for them."""
        return self._engine.method.local.as_gradient(self.weights, values, rate)

    def pushed(self, shards: Iterable[int]) -> None:
        """Take note of a new push, which is about to be sent to the shards."""

    def answered(self, shard: int) -> None:
        """Take note of a shard's first answer to the newest push."""

    def catch_up(self) -> None:
        """Adopt new weights in `base`, when no push waits for an answer."""

    def restart(self, unsent: Callable[[], Float32]) -> None:
        """Start the next round at the shards' newest weights.

        Args:
            unsent: Function that returns the codec's residual (unsent changes), [n] float32.
        """
        self.round.restart()

    def forget(self) -> None:
        """Drop accumulated gradients, because shards rejected the newest push as too large."""
        self.round.forget()

    def save(self, unanswered: Iterable[int]) -> State:
        """Return the state, except the state of `round`.

        Args:
            unanswered: Shards that have not answered the newest push. The saved state is of the
                time after their answers.
        """
        return {}

    def restore(self, state: State) -> None:
        """Restore a state that `save` returned."""


class AfterLocalSteps(AtBase):
    """Local model that a local optimizer changes between two exchanges.

    The local steps of a round start at the shards' weights. If the training method is `ahead`, a
    part of the residual (unsent changes) is added to the weights at which a round starts.
    """

    takes_local_steps = True

    def __init__(self, engine: WorkerArrays) -> None:
        self._engine, self.weights = engine, engine.allocate()
        self._start = engine.allocate() if engine.method.ahead else engine.newest
        self.round = engine.round(self._start, self.weights)

    def take(
        self, values: Float32, rate: float, loss: float | None, statistics: Float32 | None
    ) -> None:
        """Take one step of the local optimizer with a gradient."""
        self.round.step(values, rate)

    def to_push(self, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return by how much the local steps have changed the weights."""
        return self.weights - self._start, rate

    def restart(self, unsent: Callable[[], Float32]) -> None:
        """Start the next round at the shards' newest weights, plus a part of the residual."""
        engine = self._engine
        if engine.method.ahead:
            self._start[:] = engine.newest
            residual = unsent()
            if engine.newest is engine.base:
                # The codec may keep the residuals on the device although steps run on the host.
                residual = np.asarray(residual)
            self._start += residual * np.float32(engine.method.ahead)
        self.round.restart()


class AheadOfAnswer(AtBase):
    """Local model that includes the newest push before the shards have answered it.

    The shards add the blocks of a push to their own weights. The shards' replies add the changes of
    other workers to this worker's weights, one step later than this worker's own changes.
    """

    def __init__(self, engine: WorkerArrays) -> None:
        super().__init__(engine)
        self.weights = engine.allocate()

    def pushed(self, shards: Iterable[int]) -> None:
        """Add the new push to the shards' weights."""
        self.catch_up()
        for shard in shards:
            self._engine.add_sent(self.weights, shard, 1)

    def catch_up(self) -> None:
        """Adopt new weights in `base`, when no push waits for an answer."""
        np.copyto(self.weights, self._engine.base)


class ScriptOwned(AtBase):
    """Local model that the script's own optimizer changes; it includes the unsent changes.

    Without the unsent changes, the script would compute a similar change at every step until the
    first change is sent, and the sum would be too large. With the unsent changes in its model, a
    single worker trains exactly as Keras without Thinwire, for any codec. Including unsent changes
    is the error reset of Xie et al., "CSER: Communication-efficient SGD with Error Reset", NeurIPS
    2020, at every step.

    Attributes:
        unsent: [n] float32 sum of the changes of weights that no push has sent yet, over all steps.
        step_taken: [n] float32 weights before the newest step minus the weights after it, which the
            codec encodes. The array stays constant until the next step.
        is_ahead: True if the codec has not encoded the newest step yet.
    """

    def __init__(self, engine: WorkerArrays) -> None:
        super().__init__(engine)
        self.weights, self.step_taken, self.unsent = (aligned(len(engine.base)) for _ in range(3))
        self.is_ahead = False

    def step(self, values: Float32, loss: float | None, statistics: Float32 | None = None) -> None:
        """Record a training step that the script's own optimizer has taken.

        Args:
            values: [n] weights after the step of the script's optimizer, which started at
                `weights`.
            loss: Mean loss of the mini-batch of the step; None if unknown.
            statistics: [m] moving statistics after the step; None if shard 0 does not average
                statistics.

        Raises:
            NonFiniteUpdate: A weight, the loss or a statistic is NaN or infinite. The recorded
                changes stay as before the step.
        """
        finite = loss is None or bool(np.isfinite(loss))
        finite = finite and (statistics is None or all_finite(statistics))
        if not (finite and all_finite(values)):
            raise NonFiniteUpdate(
                "the weights after a step of the script's optimizer, or the loss, are NaN or "
                "infinite. Lower the optimizer's learning rate, or clip its gradients (clipnorm, "
                "global_clipnorm)."
            )
        np.subtract(self.weights, values, out=self.step_taken)
        self.unsent -= self.step_taken
        self.catch_up()
        self.is_ahead = True

    def take(
        self, values: Float32, rate: float, loss: float | None, statistics: Float32 | None
    ) -> None:
        """Record the script's step, unless `step` has recorded it already."""
        if not self.is_ahead:
            self.step(values, loss, statistics)
        self.is_ahead = False

    def to_push(self, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the newest step of the script's optimizer."""
        return self.step_taken, 1.0

    def answered(self, shard: int) -> None:
        """Subtract the newest push, which the shard has now, from the unsent changes."""
        self._engine.add_sent(self.unsent, shard, -1)

    def catch_up(self) -> None:
        """Set `weights` to `base` + `unsent` after a change of one of them."""
        np.add(self._engine.base, self.unsent, out=self.weights)

    def forget(self) -> None:
        """Drop the unsent changes when the codec drops its residual (unsent values)."""
        super().forget()
        self.unsent.fill(0.0)

    def save(self, unanswered: Iterable[int]) -> State:
        """Return the unsent changes, without the newest push, which the shards are to apply."""
        unsent = self.unsent.copy()
        for shard in unanswered:
            self._engine.add_sent(unsent, shard, -1)
        return {"unsent": unsent}

    def restore(self, state: State) -> None:
        """Restore the unsent changes, after the shards have applied the newest push."""
        np.copyto(self.unsent, state["unsent"])


def local_model(engine: WorkerArrays) -> AtBase:
    """Return the local model that a training method needs."""
    method = engine.method
    if method.takes_local_steps:
        return AfterLocalSteps(engine)
    if not method.steps_on_workers:
        return AtBase(engine)
    # With momentum, the codec sends more than the change by a step, and only the codec knows how
    # much. So the unsent part of the changes cannot be recorded outside of the codec.
    if not any(codec.keeps_momentum for codec in wrappers_of(method.codec)):
        return ScriptOwned(engine)
    return AheadOfAnswer(engine) if method.overlap else AtBase(engine)
