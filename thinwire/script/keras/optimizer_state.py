"""Detect optimizer state that a script sets itself, between two fits or during training.

If the PS steps, the slots (moments) of the script's own optimizer are only a copy of the PS's
slots. Thinwire writes this copy at the end of each `fit`, and reads it only when a new phase of the
run begins. Slots that a script sets between two fits are detected by their values at the next
`fit`, and a phase then begins with the script's slots. During training the copy is outdated. An
assignment to the outdated copy would be lost silently, so the assignment is refused with an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from thinwire.ops.types import ConfigurationError


class OptimizerStates:
    """Digests of the values that Thinwire last wrote to the script's optimizer variables."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}  # id of a variable -> digest of its recorded values
        # Ids of variables that the script has assigned to since the last call of `note`.
        self._assigned: set[int] = set()

    def note(self, variables: Iterable[Any]) -> None:
        """Record the variables' present values as the values of the run.

        Args:
            variables: Optimizer variables; they must outlive this object.
        """
        self._known = {id(variable): _digest(variable) for variable in variables}
        self._assigned.clear()

    def forget(self) -> None:
        """Forget the digests of all variables, because training changes or has changed them."""
        self._known.clear()
        self._assigned.clear()

    def note_assignment(self, variable: Any) -> None:
        """Note that the script assigns to a variable, even if it assigns an equal value."""
        self._assigned.add(id(variable))

    def was_assigned(self, variable: Any) -> bool:
        """Return True if the script has assigned to a variable since the last call of `note`."""
        return id(variable) in self._known and id(variable) in self._assigned

    def differs(self, variable: Any, steps: int = 0) -> bool:
        """Return True if a variable's values differ from the values at the last call of `note`.

        Args:
            variable: Optimizer variable.
            steps: For a counter of steps: number of steps that may have advanced it meanwhile.
        """
        known = self._known.get(id(variable))
        return known is not None and all(known != _digest(variable, n) for n in range(steps + 1))


def _digest(variable: Any, less: int = 0) -> bytes:
    values = variable.numpy() - less if less else variable.numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).digest()


def refuse_assignment(variable: Any, optimizer: str, in_fit: bool) -> None:
    """Reject an assignment to an optimizer's variable while the PS holds the optimizer's state.

    Args:
        variable: Optimizer variable that the script has assigned to.
        optimizer: Name of the optimizer, for the error message.
        in_fit: True within a `fit`; False within a custom training loop.

    Raises:
        ConfigurationError: Always.
    """
    where = "a fit" if in_fit else "a loop of its own"
    raise ConfigurationError(
        f"the script has set {variable.path} of {optimizer} within {where}. During training, the "
        "PS or the other workers also change this state, and the next step does not begin with "
        "the values of this worker, so the assignment would be lost. Expected the assignment "
        "between two calls of fit, where it has an effect: train by several calls of fit, and set "
        "the state before a call or in on_train_end. A script may set learning_rate at any time; "
        "model.set_weights sets weights without the optimizer's state."
    )
