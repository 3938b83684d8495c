"""The gradients of all workers: one compiled step and one set of variables, lent in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.data.loading import TrainingShard
from thinwire.models.flat_model import FlatVariables, SharedModel
from thinwire.ops.types import State
from thinwire.simulator.messages import Step
from thinwire.worker.train_step import TrainStep, clip, decay

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Trainer:
    """Computes any worker's gradient.

    Attributes:
        spec: The shared model.
        weights: [num_parameters] float32 at the start of the run.
        statistics: [m] float32 moving statistics at the start, where they are averaged.
        gradient: [num_parameters] float32, of the last step; the next one overwrites it.
    """

    def __init__(
        self, shared: SharedModel, bn_sync: bool, clip_norm: float, weight_decay: float = 0.0
    ) -> None:
        """Compile nothing yet: the first step does."""
        self._step = TrainStep(shared)
        self._clip_norm, self._weight_decay = clip_norm, weight_decay
        self._first_local = self._step.save_local()
        self._averaged = FlatVariables(shared.statistics if bn_sync else [])
        self.spec = shared.spec
        self.weights = shared.flat()
        self.statistics = self._averaged.read()
        self.gradient = np.zeros(shared.spec.num_parameters, np.float32)

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
        if local:
            self._step.restore_local(local)
        self._averaged.assign(statistics)
        self._step.set_weights(weights)
        loss = self._step.gradients(images, labels, self.gradient)
        decay(self.gradient, weights, self._weight_decay)
        clip(self.gradient, self._clip_norm)
        return Step(
            loss=loss,
            samples=len(labels),
            statistics=self._averaged.read(),
            local=self._step.save_local() if local else local,
        )
