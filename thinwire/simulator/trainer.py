"""Computes all simulated workers' gradients by one compiled training step without side effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from thinwire.data.loading import TrainingShard
from thinwire.models.flat_model import SharedModel
from thinwire.models.flat_variables import FlatVariables
from thinwire.ops.types import State
from thinwire.simulator.messages import Step
from thinwire.worker.gradients import clip, decay
from thinwire.worker.train_step import TrainStep, as_tensor

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Trainer:
    """Computes the gradient of any worker; several threads may call `step` concurrently.

    A training step of a `Trainer` neither reads nor writes the model's variables, because it takes
    all values as arguments.

    Attributes:
        spec: Names and shapes of the shared model's tensors.
        weights: Initial weights of the model, [num_parameters] float32.
        statistics: Initial moving statistics of batch normalization, [m] float32; m = 0 if they are
            not averaged over workers.
    """

    def __init__(
        self, shared: SharedModel, bn_sync: bool, clip_norm: float, weight_decay: float = 0.0
    ) -> None:
        """Create a trainer, whose first training step compiles the computation.

        Args:
            shared: Keras model with the variables that workers share.
            bn_sync: True if moving statistics of batch normalization are averaged over the workers.
            clip_norm: Largest L2 norm of a gradient; 0: gradients are not clipped.
            weight_decay: Coefficient of the coupled weight decay that is added to the gradient; 0:
                no weight decay.
        """
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
        """Return a worker's initial local state, with random seeds that differ between workers."""
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
            weights: Weights of the model, [num_parameters] float32, aligned to 64 bytes.
            statistics: Averaged moving statistics of batch normalization, [m] float32; m = 0 if
                they are not averaged over workers.
            shard: Training examples of the worker, in which the step advances the position by one
                mini-batch.
            local: Worker-local state (dropout seeds, statistics that are not averaged).
        """
        images, labels = shard.next()
        loss, flat, averages, new_local = self._gradient_at(
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
            local={name: value.numpy() for name, value in zip(local, new_local, strict=True)},
        )

    def _compute_at(
        self, weights: Any, statistics: Any, local: list[Any], images: Any, labels: Any
    ) -> tuple[Any, Any, Any, list[Any]]:
        """Return loss, gradient, new moving statistics and new worker-local state, as tensors."""
        values = [
            *zip(self._step.local, local, strict=True),
            *self._averaged.parts(statistics),
            *self._shared.parts(weights),
        ]
        with keras.StatelessScope(values, collect_losses=True):
            loss, gradient, _ = self._step.compute_flat(images, labels)
            new_local = [variable.value for variable in self._step.local]
            return loss, gradient, self._averaged.joined(), new_local
