"""The gradients of all workers: one compiled step, a function of the values it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from thinwire.data.loading import TrainingShard
from thinwire.models.flat_model import FlatVariables, SharedModel
from thinwire.ops.types import State
from thinwire.simulator.messages import Step
from thinwire.worker.train_step import TrainStep, as_tensor, clip, decay

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Trainer:
    """Computes any worker's gradient, several of them in threads of the caller's.

    No step reads or writes the model's own variables.

    Attributes:
        spec: The shared model.
        weights: [num_parameters] float32 at the start of the run.
        statistics: [m] float32 moving statistics at the start, where they are averaged.
    """

    def __init__(
        self, shared: SharedModel, bn_sync: bool, clip_norm: float, weight_decay: float = 0.0
    ) -> None:
        """Compile nothing yet: the first step does."""
        self._step = TrainStep(shared)
        self._clip_norm, self._weight_decay = clip_norm, weight_decay
        self._first_local = self._step.save_local()
        self._shared = FlatVariables(shared.variables)
        self._averaged = FlatVariables(shared.statistics if bn_sync else [])
        self._gradient_at = tf.function(self._compute_at, reduce_retracing=True)
        self.spec = shared.spec
        self.weights = shared.flat()
        self.statistics = self._averaged.read()

    def local_of(self, number: int) -> State:
        """Return what stays on a worker besides the shared weights, at its start."""
        if not self._first_local:
            return {}
        self._step.restore_local(self._first_local)
        self._step.vary_local_randomness(number)
        return self._step.save_local()

    def step(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Step:
        """Compute the gradient of a worker's next mini-batch.

        Args:
            weights: [num_parameters] float32 on a 64-byte border.
            statistics: [m] float32 moving statistics to begin with, where they are averaged.
            shard: The worker's examples; the place in them moves on.
            local: What stays on the worker (dropout seeds, statistics that are not averaged).
        """
        images, labels = shard.next()
        loss, flat, averages, kept = self._gradient_at(
            as_tensor(weights), statistics, [*local.values()], images, labels
        )
        gradient = flat.numpy()
        decay(gradient, weights, self._weight_decay)
        clip(gradient, self._clip_norm)
        return Step(
            gradient=gradient,
            loss=float(loss),
            samples=len(labels),
            statistics=averages.numpy(),
            local={name: value.numpy() for name, value in zip(local, kept, strict=True)},
        )

    def _compute_at(
        self, weights: Any, statistics: Any, local: list[Any], images: Any, labels: Any
    ) -> tuple[Any, Any, Any, list[Any]]:
        """Return (loss, gradient, statistics after it, what stays on the worker), as tensors."""
        given = [
            *zip(self._step.local, local, strict=True),
            *self._averaged.parts(statistics),
            *self._shared.parts(weights),
        ]
        with keras.StatelessScope(given, collect_losses=True):
            loss, gradient, _ = self._step.compute_flat(images, labels)
            kept = [variable.value for variable in self._step.local]
            return loss, gradient, self._averaged.joined(), kept
