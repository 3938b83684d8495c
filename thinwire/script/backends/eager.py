"""Parts that backends share whose steps run eagerly, or whose state is on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thinwire.script.backends.base import StepSession


def replace_train_step(model: Any, session: StepSession) -> dict[str, Any]:
    """Replace a model's train_step by the session's; return the replaced attribute by name."""
    train_step = model.train_step

    @functools.wraps(train_step)
    def step(data: Any) -> Any:
        return session.train_step(data)

    model.train_step = step
    return {"train_step": train_step}


def call_and_restore(model: Any, call: Callable[[], object]) -> None:
    """Call a train_step once; restore the variables that the model had before the call.

    Variables that the call creates keep their values.
    """
    before = [(variable, np.array(variable.numpy())) for variable in model.variables]
    call()
    for variable, values in before:
        variable.assign(values)
    model.reset_metrics()


class HostSums:
    """Sums of a script's assignments as NumPy arrays."""

    def __init__(self) -> None:
        # maps the id of a variable to the float32 sum of the script's changes of it
        self._sums: dict[int, Any] = {}

    @property
    def has_any(self) -> bool:
        """True if a variable was assigned since the last `clear`."""
        return bool(self._sums)

    def add(self, variable: Any, change: Any) -> None:
        """Add a change, an array of the variable's shape, to the variable's sum."""
        known = self._sums.get(id(variable))
        values = np.asarray(change, np.float32)
        self._sums[id(variable)] = values if known is None else known + values

    def read(self, variables: Sequence[Any]) -> list[Any] | None:
        """Return the sums of variables as float32 arrays; None if there is no sum at all."""
        if not self._sums:
            return None
        return [
            self._sums.get(id(variable), np.zeros(variable.shape, np.float32))
            for variable in variables
        ]

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()
