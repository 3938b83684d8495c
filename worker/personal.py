"""Trains personal layers: trainable variables that a worker does not share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thinwire.models.flat_variables import FlatVariables
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.optimizers.base import LocalStep
from thinwire.ops.sharding.w_global import model_spec
from thinwire.ops.types import State


class PersonalLayers:
    """Trainable variables outside of W_global (the shared model), updated by a local optimizer.

    The class `TrainStep` saves the values of the personal variables. The class `PersonalLayers`
    saves the slots of the personal variables' optimizer.

    Attributes:
        gradient: [n] float32 gradient of the personal variables for the newest mini-batch; n is 0
            if all variables are shared.

    Args:
        variables: Personal (unshared trainable) variables, in the model's order.
        optimizer: Optimizer of the training method's local steps; plain SGD if the method has no
            local steps.
    """

    def __init__(self, variables: Sequence[Any], optimizer: LocalStep) -> None:
        self._values, self._optimizer = FlatVariables(variables), optimizer
        size = self._values.size
        self.gradient = np.zeros(size, np.float32)
        spec = model_spec(variables, numbers_paths=True) if size else None
        self._slots: State = optimizer.init(size, spec) if size else {}

    def begin_round(self) -> None:
        """Start a training round: reset the slots (moments) of the personal layers' optimizer."""
        if self._values.size:
            self._slots = self._optimizer.restart(self._values.read(), self._slots)

    def check(self) -> None:
        """Reject a gradient of the personal variables that is not finite.

        Raises:
            NonFiniteUpdate: The personal variables' gradient contains NaN or infinity.
        """
        if not np.isfinite(self.gradient).all():
            raise NonFiniteUpdate(
                "the gradient of layers outside W_global contains NaN or infinity; expected finite "
                "values. Lower the learning rate."
            )

    def step(self, rate: float) -> None:
        """Update the personal variables by their gradient, at the learning rate `rate`."""
        if not self._values.size:
            return
        weights = self._values.read()
        # Personal layers have no global model to start a round from. The last argument is the
        # weights themselves, so that a proximal term in the optimizer is zero.
        self._slots = self._optimizer.step(weights, self.gradient, rate, self._slots, weights)
        self._values.assign(weights)

    def save(self) -> State:
        """Return the slots of the personal variables' optimizer as plain data."""
        return self._optimizer.save(self._slots) if self._slots else {}

    def restore(self, state: State) -> None:
        """Restore the personal optimizer's slots from `save`, after the variables' values."""
        if state:
            self._slots = self._optimizer.restore(state, self._values.read(), self._slots)
