"""The trainable variables of a worker's model that are not shared: it trains them by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thinwire.models.flat_model import FlatVariables
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.optimizers.base import LocalStep
from thinwire.ops.sharding.w_global import model_spec
from thinwire.ops.types import State


class PersonalLayers:
    """Trainable variables outside W_global, stepped by the method's local optimizer.

    Their values are among those that a `TrainStep` saves; here are the optimizer's slots.

    Attributes:
        gradient: [n] float32 of the newest mini-batch; n is 0 where all is shared.

    Args:
        variables: Of the model, in its order.
        optimizer: Of local steps; where the method has none, plain SGD.
    """

    def __init__(self, variables: Sequence[Any], optimizer: LocalStep) -> None:
        self._values, self._optimizer = FlatVariables(variables), optimizer
        size = self._values.size
        self.gradient = np.zeros(size, np.float32)
        spec = model_spec(variables, numbers_paths=True) if size else None
        self._slots: State = optimizer.init(size, spec) if size else {}

    def begin_round(self) -> None:
        """Begin local steps: what an exchange does to the optimizer's slots is done."""
        if self._values.size:
            self._slots = self._optimizer.restart(self._values.read(), self._slots)

    def check(self) -> None:
        """Refuse a gradient that no step can be made of.

        Raises:
            NonFiniteUpdate: It holds NaN or infinity.
        """
        if not np.isfinite(self.gradient).all():
            raise NonFiniteUpdate(
                "the gradient of layers outside W_global holds NaN or infinity; expected finite "
                "values. Lower the learning rate."
            )

    def step(self, rate: float) -> None:
        """Take a step against the gradient, at the scheduled learning rate."""
        if not self._values.size:
            return
        weights = self._values.read()
        # No round's model pulls them: they have none.
        self._slots = self._optimizer.step(weights, self.gradient, rate, self._slots, weights)
        self._values.assign(weights)

    def save(self) -> State:
        """Return the slots as plain data."""
        return self._optimizer.save(self._slots) if self._slots else {}

    def restore(self, state: State) -> None:
        """Take back what `save` gave; the variables have their values again."""
        if state:
            self._slots = self._optimizer.restore(state, self._values.read(), self._slots)
