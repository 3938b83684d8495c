"""Detects optimizer state that a script sets itself, between two fits or during training.

If the PS updates the weights, the slots (moments) of the script's own optimizer are only a copy of
the PS's slots. Thinwire writes the optimizer's slots (moments) at the end of each `fit`, and reads
them only when a new phase of the run begins. If a script sets slots (moments) between two fits, the
next `fit` detects their values, and a phase of the run begins with the script's slots. During
training, the optimizer slots (moments) in the script are outdated. An assignment to outdated
optimizer slots would be lost silently, so an error rejects it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from thinwire.ops.types import ConfigurationError


class OptimizerStates:
    """Checksums of the values that Thinwire last wrote to the script's optimizer variables."""

    def __init__(self) -> None:
        # maps the id of an optimizer variable to the checksum of its recorded values
        self._known: dict[int, bytes] = {}
        # Ids of optimizer variables that the script has assigned to since the last call of `note`.
        self._assigned: set[int] = set()

    def note(self, variables: Iterable[Any]) -> None:
        """Record the present values of optimizer variables as the values of the run.

        Args:
            variables: Optimizer variables whose values are recorded; the variables must outlive
                this `OptimizerStates`.
        """
        self._known = {id(variable): _digest(variable) for variable in variables}
        self._assigned.clear()

    def forget(self) -> None:
        """Forget the recorded checksums of all optimizer variables, since training changes them."""
        self._known.clear()
        self._assigned.clear()

    def note_assignment(self, variable: Any) -> None:
        """Note that the script assigns to an optimizer variable, even if the value stays equal."""
        self._assigned.add(id(variable))

    def was_assigned(self, variable: Any) -> bool:
        """Return True if the script has assigned to an optimizer variable since the last `note`."""
        return id(variable) in self._known and id(variable) in self._assigned

    def differs(self, variable: Any, steps: int = 0) -> bool:
        """Return True if an optimizer variable's values have changed since the last `note`.

        Args:
            variable: Optimizer variable whose values are compared with the values at the last
                `note`.
            steps: If the optimizer variable counts steps, the number of steps by which the variable
                may have advanced since the last `note`.
        """
        known = self._known.get(id(variable))
        return known is not None and all(known != _digest(variable, n) for n in range(steps + 1))


def _digest(variable: Any, less: int = 0) -> bytes:
    values = variable.numpy() - less if less else variable.numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).digest()


def refuse_assignment(variable: Any, optimizer: str, in_fit: bool) -> None:
    """Reject an assignment to an optimizer's variable while the PS holds the variable's value.

    Args:
        variable: Optimizer variable that the script has assigned to.
        optimizer: Name of the script's optimizer for the error message.
        in_fit: True within a `fit`; False within a training loop that the script writes itself.

    Raises:
        ConfigurationError: Each call of the method raises this error.
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
