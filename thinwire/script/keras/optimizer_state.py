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
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.plan import named
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import ExchangeStep

if TYPE_CHECKING:
    from thinwire.script.keras.optimizers import ScriptOptimizers


class OptimizerStates:
    """Detects optimizer state that a script sets, by checksums of the values that Thinwire wrote.

    Args:
        member: Membership of the model in a run.
        optimizers: Optimizers of the script that train in the run.
    """

    def __init__(self, member: RunMember, optimizers: ScriptOptimizers) -> None:
        self._member, self._optimizers = member, optimizers
        # maps the id of an optimizer variable to the checksum of its recorded values
        self._known: dict[int, bytes] = {}
        # Ids of optimizer variables that the script has assigned to since the last call of `note`.
        self._assigned: set[int] = set()
        self._has_warned_of_flags = False

    def note(self) -> None:
        """Record the optimizers' state at the end of a `fit`, to detect changes by the script."""
        self._known = {id(variable): _digest(variable) for variable in self._kept_by_run}
        self._assigned.clear()

    def forget(self) -> None:
        """Forget the recorded optimizer state, because training changes the optimizers."""
        self._known.clear()
        self._assigned.clear()

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

    def are_set_by_script(self, in_step: bool = False) -> bool:
        """Return True if the script has set values of an optimizer since the end of the last `fit`.

        `are_set_by_script` considers only optimizer state that the PS or a codec holds during
        training.

        Args:
            in_step: True within a training step. The graph of a step may advance the optimizer's
                step count before the exchange, so the count may be one ahead of the recorded value.

        Raises:
            ConfigurationError: The run cannot use the optimizer state that the script has set.
        """
        run_variables = self._kept_by_run
        counts = {id(step.inner._iterations) for step in self._optimizers.stepping}
        has_changed = any(
            self.differs(variable, steps=in_step and id(variable) in counts)
            for variable in run_variables
        )
        if not self._optimizers.takes_momentum:
            return has_changed
        # The worker's codec applies the momentum, so the optimizer's own momentum slots are always
        # 0. The script can only assign zeros to these slots, upon which the codec restarts without
        # momentum.
        known = self._assigned & self._known.keys() - counts
        assigned = [variable for variable in run_variables if id(variable) in known]
        for variable in assigned:
            if np.any(variable.numpy()):
                raise ConfigurationError(
                    f"the script has set {variable.path} to values other than 0, but with this "
                    "method the workers' codecs keep SGD's momentum; expected 0 for all entries, "
                    "which restarts the codecs without momentum. Take --method=bsp or "
                    "--method=asgd, whose PS takes over all optimizer slots."
                )
        return has_changed or bool(assigned)

    @property
    def _kept_by_run(self) -> list[Any]:
        return [
            variable
            for step in self._optimizers.stepping
            for variable in step.state
            if self._is_run_s(step, variable)
        ]

    def _is_run_s(self, step: ExchangeStep, variable: Any) -> bool:
        """Return True if the PS or a codec holds the valid value of an optimizer's variable."""
        if not self._member.takes_weights:
            return True
        if variable is step.inner._iterations:
            return step.has_schedule and step.clock is not None
        return self._optimizers.takes_momentum

    def check_assignment(self, variable: Any) -> None:
        """Note that the script assigns to a variable, if the variable belongs to an optimizer.

        Args:
            variable: Keras variable of this process to which the script has assigned a value.

        Raises:
            ConfigurationError: The PS holds the value of the optimizer variable during training, so
                the assignment would be lost.
        """
        member = self._member
        for step in self._optimizers.stepping:
            if not any(variable is owned for owned in step.state):
                continue
            if not member.is_offered:
                if member.session is not None and not self._has_warned_of_flags:
                    self._has_warned_of_flags = True
                    logging.warning(
                        "setting %s has no effect: flags define this server's optimizer. Start "
                        "the script with `thinwire run`, whose server steps with the script's "
                        "optimizer",
                        variable.path,
                    )
            elif member.is_training and self._is_run_s(step, variable):
                where = "a fit" if member.in_fit else "a loop of its own"
                raise ConfigurationError(
                    f"the script has set {variable.path} of {named(step.optimizer)} within "
                    f"{where}. During training, the PS or the other workers also change this "
                    "state, and the next step does not begin with the values of this worker, so "
                    "the assignment would be lost. Expected the assignment between two calls of "
                    "fit, where it has an effect: train by several calls of fit, and set the state "
                    "before a call or in on_train_end. A script may set learning_rate at any time; "
                    "model.set_weights sets weights without the optimizer's state."
                )
            self._assigned.add(id(variable))
            if variable is step.inner._iterations and step.clock is not None:
                step.clock.pause()


def _digest(variable: Any, less: int = 0) -> bytes:
    values = variable.numpy() - less if less else variable.numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).digest()
