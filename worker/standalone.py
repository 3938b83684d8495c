"""Trains on one device with one Keras optimizer, without a network, as a baseline.

Training without a network is called *local* in the ESync paper and *MSGD* in the DGS paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from thinwire.models.flat_model import SharedModel
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.server import keras_optimizer
from thinwire.ops.types import State
from thinwire.worker.train_step import TrainStep

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class LocalTrainer:
    """Trains a model by one tf.function that computes gradients and applies the optimizer."""

    def __init__(
        self, shared: SharedModel, method: Method, clip_norm: float, weight_decay: float = 0.0
    ) -> None:
        """Build the optimizer that the PS would use for the training method.

        Args:
            shared: Model that this process trains.
            method: Training method of the run, of which only the server optimizer is used.
            clip_norm: Largest L2 norm of a gradient, to which longer gradients are scaled; 0 for no
                limit.
            weight_decay: Factor of weight decay: this factor times the weights is added to each
                gradient before clipping.
        """
        self._shared = shared
        self._step = TrainStep(shared)
        self.optimizer = keras_optimizer(method.server, method.choices["server_optimizer"])
        self._variables = [*shared.variables, *self._step.personal]
        self.optimizer.build(self._variables)
        self._clip_norm, self._weight_decay = clip_norm, weight_decay
        self._rate: float | None = None
        self._train = tf.function(self._compute, reduce_retracing=True)

    def train(self, images: Any, labels: Any, rate: float) -> float:
        """Take one training step on a mini-batch; return the mean loss of the mini-batch."""
        if rate != self._rate:
            self.optimizer.learning_rate.assign(rate)
            self._rate = rate
        return float(self._train(images, labels))

    def flat(self) -> Float32:
        """Return the shared weights as one vector, [num_parameters] float32."""
        return self._shared.flat()

    def save(self) -> State:
        """Return the state that training changes: weights, optimizer state, local variables."""
        return {
            "weights": self.flat(),
            "optimizer": {str(i): np.array(v) for i, v in enumerate(self.optimizer.variables)},
            "local": self._step.save_local(),
        }

    def restore(self, state: State) -> None:
        """Restore weights, optimizer state and local variables that `save` returned."""
        self._shared.assign(state["weights"])
        for number, variable in enumerate(self.optimizer.variables):
            variable.assign(state["optimizer"][str(number)])
        self._step.restore_local(state["local"])

    def _compute(self, images: Any, labels: Any) -> Any:
        loss, gradients = self._step.compute(images, labels)
        if self._weight_decay:
            gradients = [
                gradient + self._weight_decay * variable.value
                for gradient, variable in zip(gradients, self._variables, strict=True)
            ]
        if self._clip_norm:
            gradients, _ = tf.clip_by_global_norm(gradients, self._clip_norm)
        self.optimizer.apply(gradients, self._variables)
        return loss
