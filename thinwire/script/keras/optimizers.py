"""Optimizers of a script that train in a run, and the exchanges that replace their steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from thinwire.ops.methods.method import Method
from thinwire.ops.methods.validation import refuse_script_steps
from thinwire.ops.policy import describe
from thinwire.ops.sharding.w_global import W_global
from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.gradient_sgd import RATE_TOLERANCE, warn_of_other_rate
from thinwire.script.keras.checks import (
    check_optimizer,
    check_same_variables,
    momentum_of,
    sgd_momentum,
)
from thinwire.script.keras.clock import RunClock
from thinwire.script.keras.plan import StepPlan, is_built, named
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import ExchangeStep, StepOwner
from thinwire.script.session import Session
from thinwire.script.settings import ScriptSettings, read_settings


def settings_with_momentum(
    args: Any, keywords: Mapping[str, Any], optimizer: Any
) -> ScriptSettings:
    """Return a script's settings, with the momentum of its compiled optimizer.

    A script's settings need the momentum only if flags define the server's model and optimizer.

    Args:
        args: Arguments of the script, in a form that `thinwire.script.settings` documents.
        keywords: Flags of the script by name, in addition to `args`.
        optimizer: Optimizer that the script has compiled its model with.

    Raises:
        ConfigurationError: A setting of the compiled optimizer would have no effect in the run.
    """
    chosen = read_settings(args, keywords, type_node="Worker")
    momentum = momentum_of(optimizer)
    is_servers = momentum in (None, describe(chosen.run.method.server).get("momentum", 0.0))
    if not is_servers:
        chosen = read_settings(args, keywords, type_node="Worker", momentum=momentum)
    refuse_script_steps(chosen.run.method, "a worker whose server has its model from flags")
    check_optimizer(optimizer, chosen.run.method, takes_momentum=not is_servers)
    return chosen


class ScriptOptimizers:
    """The objects (`ExchangeStep`) that replace the steps of a script's optimizers.

    Attributes:
        compiled: Object that replaces the steps of the model's compiled optimizer; None before
            `compile`.
        states: Object that detects optimizer state which the script has set itself.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
        owner: The model's session, which exchanges with the servers.
        settings_for: Function of the compiled optimizer that returns the script's settings, called
            if flags define the server's optimizer.
    """

    def __init__(
        self, member: RunMember, owner: StepOwner, settings_for: Callable[[Any], ScriptSettings]
    ) -> None:
        self.compiled: ExchangeStep | None = None
        self._member, self._owner, self._settings_for = member, owner, settings_for
        # Maps the id of an optimizer that trains or has trained in the run to the object that
        # replaces its steps.
        self._stand_ins: dict[int, ExchangeStep] = {}
        self.states = OptimizerStates(member, self)

    def stand_in(self, optimizer: Any) -> ExchangeStep:
        """Return the object that replaces an optimizer's steps; create it if there is none yet."""
        if id(optimizer) not in self._stand_ins:
            self._stand_ins[id(optimizer)] = ExchangeStep(optimizer, self._owner)
        return self._stand_ins[id(optimizer)]

    def has(self, optimizer: Any) -> bool:
        """Return True if exchanges with the servers replace the steps of an optimizer."""
        return id(optimizer) in self._stand_ins

    def are_in(self, tracked: Collection[int]) -> bool:
        """Return True if an id in `tracked` belongs to an optimizer that trains in the run."""
        steps = self._stand_ins.values()
        return any(
            id(optimizer) in tracked for step in steps for optimizer in (step.optimizer, step.inner)
        )

    def prepare(self) -> None:
        """Replace the steps of the optimizer with which the model is compiled now."""
        member, step = self._member, self.compiled
        optimizer = getattr(member.model, "optimizer", None)
        if optimizer is None:
            return
        if not backend().is_stateless:
            if member.model.jit_compile:
                logging.warning("jit_compile is switched off: XLA cannot compile an exchange")
            member.model.jit_compile = False
        if step is not None and step.optimizer is optimizer:
            return
        if not member.is_offered:  # flags define the server's model, so `take` is never called
            member.settings = self._settings_for(optimizer)
            member.stepping = [self.stand_in(optimizer)]
        self.compiled = self.stand_in(optimizer)

    def build_compiled(self) -> None:
        """Create the compiled optimizer's variables (moments) if the model's variables exist."""
        model = self._member.model
        if self.compiled is not None and is_built(model):  # an unbuilt model has no variables yet
            self.compiled.build(model.trainable_variables)

    def take(self, plan: StepPlan) -> None:
        """Let the planned optimizers train in the run, and create their variables.

        Args:
            plan: Optimizers of one training step of the script, with the variables that each
                optimizer updates.
        """
        self._member.stepping = []
        for number, planned in enumerate(plan.steps):
            step = self.stand_in(planned.optimizer)
            step.number = number
            step.build(planned.variables)
            self._member.stepping.append(step)

    @property
    def takes_momentum(self) -> bool:
        """True if the training method, not the optimizer, applies the compiled SGD's momentum."""
        session = self._member.joined
        return session.takes_weights and self.momentum_for(session.settings.run.method) > 0

    def momentum_for(self, method: Method) -> float:
        """Return the compiled SGD's momentum if the training method applies it, else 0."""
        steps = self._member.stepping
        is_alone = len(steps) == 1
        return sgd_momentum(steps[0].inner) if method.takes_momentum and is_alone else 0.0

    # -- variables of each optimizer --------------------------------------------------------------

    def check_step(self, step: ExchangeStep, variables: Sequence[Any]) -> None:
        """Reject an optimizer's step with other variables than the PS expects for the optimizer.

        Args:
            step: Object that replaces the optimizer that is about to step.
            variables: Variables with which the script calls the optimizer in the present training
                step.

        Raises:
            ConfigurationError: The PS knows other variables for the optimizer, or the optimizer is
                not part of the run.
        """
        session = self._member.joined
        check_same_variables(session.shared.variables, variables)
        if step not in self._member.stepping:
            self.refuse_step(step.optimizer, variables)
            return
        if session.takes_weights or session.offer is None:
            return
        # the offer lists the variables of each optimizer
        unused, stepped = set(session.offer.unused), {id(variable) for variable in variables}
        for owner, numbers in enumerate(session.offer.groups()):
            for index in numbers:
                path = session.shared.spec.tensors[index].path
                is_stepped = id(session.shared.variables[index]) in stepped
                if is_stepped == (owner == step.number) or (not is_stepped and path in unused):
                    continue
                what = "steps" if is_stepped else "does not step"
                raise ConfigurationError(
                    f"{named(step.optimizer)} {what} {path}, unlike in the first step, which fixed "
                    "the variables of each optimizer on the PS; expected the same variables in "
                    "each step. Distribute each optimizer with the model that it steps, as in "
                    "thinwire.distribute(optimizer, model=generator), or build it before the loop: "
                    "optimizer.build(generator.trainable_variables)."
                )

    def refuse_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Reject an optimizer that would train shared variables on this worker alone.

        Raises:
            ConfigurationError: The optimizer is not part of the run, but it updates a variable that
                all workers train.
        """
        member = self._member
        trainable = {id(variable) for variable in member.model.trainable_variables}
        if member.session is not None:
            shared = {id(variable) for variable in member.session.shared.variables}
            shared |= set() if W_global else trainable
        # before the model joins the run, W_global may list variables of the script's other models
        else:
            shared = trainable & {id(variable) for variable in W_global} or trainable
        touched = [variable for variable in variables if id(variable) in shared]
        if touched:
            raise ConfigurationError(
                f"{named(optimizer)} steps {touched[0].path} and {len(touched) - 1} more variables "
                f"of {member.model.name!r} on this worker alone; expected a distributed optimizer. "
                "A train_step must call the optimizer already in the first step, in which Thinwire "
                "finds the optimizers. In a custom loop write `optimizer = "
                "thinwire.distribute(optimizer, model=model)`."
            )

    # -- rates, schedules and the loss scale ------------------------------------------------------

    def begin_clocks(self, method: Method) -> tuple[int, ...]:
        """From now on, evaluate each optimizer's learning-rate schedule at the run's batch count.

        Args:
            method: Training method of the run.

        Returns:
            For each optimizer that steps, the batch count that its schedule begins with.
        """
        reads_own_count = method.steps_on_workers and method.schedule_clock == "steps"
        firsts = []
        for step in self._member.stepping:
            count = int(step.inner._iterations)
            if step.has_schedule and not reads_own_count:
                if step.clock is None:
                    step.clock = RunClock(step.inner)
                elif not self.states.differs(step.inner._iterations):
                    count = step.clock.count
                step.clock.go_on(count)
            firsts.append(count)
        return tuple(firsts)

    def note_rates(self) -> None:
        """Record the optimizers' present learning rates as the rates with which the PS begins."""
        for step in self._member.stepping:
            step.known_rate = 0.0 if step.rate is None else float(step.rate.numpy())

    def follow_rate(self, session: Session) -> None:
        """Use the PS's learning rate if this worker joins a run that has already taken steps.

        Another worker, or an earlier start of the run, may have set the learning rate of the PS. If
        this script has set a learning rate since `compile`, the script's rate is sent to the PS
        instead.
        """
        if (
            session.takes_weights
            or len(self._member.stepping) > 1
            or not session.part.core.versions[0]
        ):
            return
        step = self._member.stepping[0]
        if step.rate is not None and float(step.rate.numpy()) == np.float32(step.known_rate):
            step.adopt_rate(session.part.core.learning_rate)

    def adopt_rate(self, session: Session) -> None:
        """Use the server's learning rate (from flags) unless the script set one since `compile`."""
        step = self.compiled
        if step is None or step.rate is None:
            return
        rate = float(step.rate.numpy())
        if abs(rate - step.known_rate) > RATE_TOLERANCE * abs(step.known_rate):
            return
        warn_of_other_rate("the optimizer's learning_rate", rate, session)
        step.adopt_rate(session.part.core.learning_rate)


class OptimizerStates:
    """Detects optimizer state that a script sets, by checksums of the values that Thinwire wrote.

    If the PS updates the weights, the slots (moments) of the script's own optimizer are only a copy
    of the PS's slots. Thinwire writes the optimizer's slots at the end of each `fit`, and reads
    them only when a new phase of the run begins. If a script sets slots between two fits, the next
    `fit` detects their values, and a phase of the run begins with the script's slots. During
    training, the optimizer slots in the script are outdated. An assignment to outdated optimizer
    slots would be lost silently, so an error rejects it.

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
        counts = {id(step.inner._iterations) for step in self._member.stepping}
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
            for step in self._member.stepping
            for variable in step.state
            if self._is_run_s(step, variable)
        ]

    def _is_run_s(self, step: ExchangeStep, variable: Any) -> bool:
        """Return True if the PS or a codec holds the valid value of an optimizer's variable."""
        if not self._member.joined.takes_weights:
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
        for step in self._member.stepping:
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
