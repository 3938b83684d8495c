"""The gradients of all workers: one compiled step and one set of variables, lent in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from data.chosen import Shard
from models.shared import SharedModel
from ops.types import State
from worker.train_step import TrainStep, clip

if TYPE_CHECKING:
    from ops.types import Float32


class Trainer:
    """Computes any worker's gradient.

    Attributes:
        gradient: [num_parameters] float32, of the last step; the next one overwrites it.
    """

    def __init__(self, shared: SharedModel, clip_norm: float) -> None:
        """Compile nothing yet: the first step does."""
        self._step = TrainStep(shared)
        self._clip_norm = clip_norm
        self._first_local = self._step.save_local()
        self.gradient = np.zeros(shared.spec.num_parameters, np.float32)

    def local_of(self, number: int) -> State:
        """Return what stays on a worker besides the shared weights, at its start."""
        if not self._first_local:
            return {}
        self._step.restore_local(self._first_local)
        self._step.vary_local_randomness(number)
        return self._step.save_local()

    def step(self, weights: Float32, shard: Shard, local: State) -> tuple[float, int, State]:
        """Compute the gradient of a worker's next mini-batch.

        Args:
            weights: [num_parameters] float32 on a 64-byte border.
            shard: Its examples; the place in them moves on.
            local: What stays on the worker (statistics, dropout seeds).

        Returns:
            The mean loss, the number of examples, and what stays on the worker now.
        """
        batch = shard.cursor.next()
        images, labels = shard.images[batch], shard.labels[batch]
        if local:
            self._step.restore_local(local)
        self._step.set_weights(weights)
        loss = self._step.gradients(images, labels, self.gradient)
        clip(self.gradient, self._clip_norm)
        return loss, len(labels), self._step.save_local() if local else local
