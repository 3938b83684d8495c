"""Notices what a script sets in the state of its optimizers, between two fits or while they step.

Where a PS steps, the slots of the script's own optimizer are a copy: the run writes it at the end
of each `fit`, and reads it only when a phase begins. So a script that sets slots between two fits
is noticed at the next one, by their values, however they were set, and a phase then begins with
them. While the run trains the copy is old and nobody reads it. An assignment would be lost without
a trace, and is refused where it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from thinwire.ops.types import ConfigurationError


class OptimizerStates:
    """The variables of some optimizers as the run has left them."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}  # by identity of the variable: digest of its values
        self._assigned: set[int] = set()  # since the end of the last `fit`

    def note(self, variables: Iterable[Any]) -> None:
        """Take the present values for those that the run has left; the variables outlive this."""
        self._known = {id(each): _digest(each) for each in variables}
        self._assigned.clear()

    def forget(self) -> None:
        """Know nothing: the values are the run's from here on, or those of a `fit` that failed."""
        self._known.clear()
        self._assigned.clear()

    def note_assignment(self, variable: Any) -> None:
        """Note that the script assigns to a variable, perhaps the value that it has."""
        self._assigned.add(id(variable))

    def was_assigned(self, variable: Any) -> bool:
        """Return whether the script has assigned to a variable since the values were noted."""
        return id(variable) in self._known and id(variable) in self._assigned

    def differs(self, variable: Any) -> bool:
        """Return whether a variable has other values than the run has left in it."""
        known = self._known.get(id(variable))
        return known is not None and known != _digest(variable)


def _digest(variable: Any) -> bytes:
    values = variable.numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).digest()


def refuse_assignment(variable: Any, optimizer: str, in_fit: bool) -> None:
    """Refuse to set a variable of an optimizer whose state the run has at that moment.

    Raises:
        ConfigurationError: Always.
    """
    where = "a fit" if in_fit else "a loop of its own"
    raise ConfigurationError(
        f"the script has set {variable.path} of {optimizer} within {where}, where the run keeps "
        "that state: the values on this worker are not those that the next step begins with, so "
        "the assignment would be lost. Expected it between two fits, which then counts: train "
        "by several calls of fit, and set the state before one of them or in on_train_end. "
        "learning_rate may be set at any time; model.set_weights sets weights without the "
        "optimizer's state."
    )
