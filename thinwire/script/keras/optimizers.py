"""The optimizers of a script that step in the run, and what stands in for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.ops.methods.method import Method
from thinwire.ops.methods.validation import refuse_script_steps
from thinwire.ops.sharding.w_global import W_global
from thinwire.ops.types import ConfigurationError
from thinwire.script.gradient_sgd import RATE_TOLERANCE, warn_of_other_rate
from thinwire.script.keras.checks import (
    check_offered_step,
    check_optimizer,
    check_same_variables,
    momentum_of,
    refuse_step_alone,
)
from thinwire.script.keras.clock import RunClock
from thinwire.script.keras.offers import sgd_momentum
from thinwire.script.keras.optimizer_state import OptimizerStates, refuse_assignment
from thinwire.script.keras.plan import StepPlan, is_built, named
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import ExchangeStep, StepOwner
from thinwire.script.session import Session
from thinwire.script.settings import ScriptSettings, read_settings

if TYPE_CHECKING:
    from thinwire.ops.types import Int64


def settings_with_momentum(
    args: Any, keywords: Mapping[str, Any], optimizer: Any
) -> ScriptSettings:
    """Return a script's settings, with the compiled optimizer's momentum where the method has one.

    Args:
        args: See thinwire.script.settings.
        keywords: Further flags by name.
        optimizer: Compiled, of a worker whose server has its own from flags.

    Raises:
        ConfigurationError: A setting of the optimizer would have no effect.
    """
    chosen = read_settings(args, keywords, type_node="Worker")
    momentum = momentum_of(optimizer)
    is_servers = momentum in (None, chosen.run.method.server.momentum)
    if not is_servers:
        chosen = read_settings(args, keywords, type_node="Worker", momentum=momentum)
    refuse_script_steps(chosen.run.method, "a worker whose server has its model from flags")
    check_optimizer(optimizer, chosen.run.method, takes_momentum=not is_servers)
    return chosen


class ScriptOptimizers:
    """What stands in for the optimizers of one model's script.

    Attributes:
        compiled: Stands in for the model's own; None: it has none yet.
        stepping: Of all that step in the present phase, in the order of the offer.
        sequence: Their numbers, as they step in one train_step.

    Args:
        member: The model's place in the run.
        owner: What the steps need of the worker.
        settings_for: Returns the settings with an optimizer whose server has its own from flags.
    """

    def __init__(
        self, member: RunMember, owner: StepOwner, settings_for: Callable[[Any], ScriptSettings]
    ) -> None:
        self.compiled: ExchangeStep | None = None
        self.stepping: list[ExchangeStep] = []
        self.sequence: list[int] = []
        self._member, self._owner, self._settings_for = member, owner, settings_for
        self._stand_ins: dict[int, ExchangeStep] = {}  # by optimizer: all that there were
        self._clocks: dict[ExchangeStep, RunClock] = {}  # of those with a schedule
        self._states = OptimizerStates()
        self._has_warned_of_flags = False

    def stand_in(self, optimizer: Any) -> ExchangeStep:
        """Return what stands in for an optimizer, once for each."""
        known = self._stand_ins.get(id(optimizer))
        if known is None:
            known = self._stand_ins[id(optimizer)] = ExchangeStep(optimizer, self._owner)
        return known

    def has(self, optimizer: Any) -> bool:
        """Return whether there is what stands in for an optimizer."""
        return id(optimizer) in self._stand_ins

    def are_in(self, tracked: Collection[int]) -> bool:
        """Return whether one that steps is among these, by identity."""
        steps = self._stand_ins.values()
        return any(id(each) in tracked for step in steps for each in (step.optimizer, step.inner))

    def prepare(self) -> None:
        """Stand in for the compiled optimizer, whichever that is now."""
        member, step = self._member, self.compiled
        optimizer = getattr(member.model, "optimizer", None)
        if optimizer is None:
            return
        if member.model.jit_compile:
            logging.warning("jit_compile is switched off: XLA cannot compile an exchange")
        member.model.jit_compile = False
        if step is not None and step.optimizer is optimizer:
            return
        if not member.is_offered:
            member.settings = self._settings_for(optimizer)
        self.compiled = self.stand_in(optimizer)
        if member.session is not None and not member.is_offered:  # no phase begins there
            self.stepping = [self.compiled]

    def build_compiled(self) -> None:
        """Create the variables of the compiled optimizer, where it steps all of the model's."""
        model = self._member.model
        if self.compiled is not None and is_built(model):  # else some of them are still to come
            self.compiled.build(model.trainable_variables)

    def take(self, plan: StepPlan) -> None:
        """Let those of a plan step from now on; they are built by now."""
        self.stepping = []
        for number, planned in enumerate(plan.steps):
            step = self.stand_in(planned.optimizer)
            step.number = number
            step.build(planned.variables)
            self.stepping.append(step)

    def take_compiled(self) -> None:
        """Let the compiled one step from now on."""
        if self.compiled is not None:
            self.stepping = [self.compiled]

    @property
    def takes_momentum(self) -> bool:
        """Whether the method has taken the compiled SGD's momentum over."""
        session = self._member.joined
        return session.takes_weights and self.momentum_for(session.settings.run.method) > 0

    def momentum_for(self, method: Method) -> float:
        """Return the compiled SGD's momentum, where a method takes it over; else 0."""
        is_alone = len(self.stepping) == 1
        return sgd_momentum(self.stepping[0].inner) if method.takes_momentum and is_alone else 0.0

    # -- what each steps ------------------------------------------------------------------------

    def check_step(self, step: ExchangeStep, variables: Sequence[Any]) -> None:
        """Refuse variables that a step is given, and the run does not share or step so.

        Raises:
            ConfigurationError: Others of the model, or those of another optimizer.
        """
        session = self._member.joined
        check_same_variables(session.shared.variables, variables)
        if step not in self.stepping:
            self.refuse_step(step.optimizer, variables)
        elif not session.takes_weights and session.offer is not None:
            check_offered_step(
                step.optimizer, step.number, variables, session.shared, session.offer
            )

    def refuse_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Refuse an optimizer that would train some of the model's variables here alone.

        Raises:
            ConfigurationError: It does.
        """
        member = self._member
        if member.session is not None:
            shared = member.session.shared.variables
            if not W_global:
                shared = [*shared, *member.model.trainable_variables]
        else:  # it has not joined: W_global may be of another model yet
            own = {id(variable): variable for variable in member.model.trainable_variables}
            listed = [own[id(variable)] for variable in W_global if id(variable) in own]
            shared = listed or list(own.values())
        refuse_step_alone(optimizer, variables, shared, member.model.name)

    # -- state that the script sets ---------------------------------------------------------------

    def note_states(self) -> None:
        """Take the optimizers' present state for the run's, at the end of a `fit`."""
        self._states.note(self._kept_by_run)

    def forget_states(self) -> None:
        """Forget the state of the `fit` before: the present one changes it."""
        self._states.forget()

    @property
    def are_set_by_script(self) -> bool:
        """Whether the script has set state that the run keeps, since the end of the last `fit`.

        Raises:
            ConfigurationError: The run cannot take it over.
        """
        kept = self._kept_by_run
        has_changed = any(self._states.differs(each) for each in kept)
        if not self.takes_momentum:
            return has_changed
        # The codec has the momentum, and the slots stay 0: what was assigned to them is a restart.
        counts = {id(step.inner._iterations) for step in self.stepping}
        slots = [each for each in kept if id(each) not in counts]
        assigned = [each for each in slots if self._states.was_assigned(each)]
        for each in assigned:
            if np.any(each.numpy()):
                raise ConfigurationError(
                    f"the script has set {each.path} to values other than 0, and with this "
                    "method the workers' codecs keep SGD's momentum; expected 0 in all places, "
                    "which lets them begin again without. Take --method=bsp or --method=asgd, "
                    "whose PS takes over all slots."
                )
        return has_changed or bool(assigned)

    @property
    def _kept_by_run(self) -> list[Any]:
        return [each for step in self.stepping for each in step.state if self._is_run_s(step, each)]

    def _is_run_s(self, step: ExchangeStep, variable: Any) -> bool:
        """Return whether the run has the value of an optimizer's variable, not this worker."""
        if not self._member.takes_weights:
            return True
        is_count = variable is step.inner._iterations
        if is_count:
            return step.has_schedule and self.clock_of(step) is not None
        return self.takes_momentum

    def check_assignment(self, variable: Any, is_training: bool) -> None:
        """Note that the script assigns to a variable, if it is one of an optimizer that steps.

        Args:
            variable: Any of Keras.
            is_training: Whether the run trains this model at this moment.

        Raises:
            ConfigurationError: It does, and so the assignment would be lost.
        """
        for step in self.stepping:
            if not any(variable is each for each in step.state):
                continue
            if not self._member.is_offered:
                self._warn_of_flags(variable)
            elif is_training and self._is_run_s(step, variable):
                refuse_assignment(variable, named(step.optimizer), self._member.in_fit)
            self._states.note_assignment(variable)
            if variable is step.inner._iterations and step in self._clocks:
                self._clocks[step].pause()

    def _warn_of_flags(self, variable: Any) -> None:
        if self._member.session is not None and not self._has_warned_of_flags:
            self._has_warned_of_flags = True
            logging.warning(
                "setting %s has no effect: this server has its optimizer from flags. Start the "
                "script with `thinwire run`, whose server steps with the script's optimizer",
                variable.path,
            )

    # -- rates, schedules and the loss scale ------------------------------------------------------

    def begin_clocks(self, method: Method) -> tuple[int, ...]:
        """Let schedules be read at the run's counts, from their own on.

        Args:
            method: Of the run.

        Returns:
            The count that the phase begins with, of each optimizer that steps.
        """
        is_own = method.steps_on_workers and method.schedule_clock == "steps"
        firsts = []
        for step in self.stepping:
            count = int(step.inner._iterations)
            if step.has_schedule and not is_own:
                clock = self._clocks.get(step)
                if clock is None:
                    clock = self._clocks[step] = RunClock(step.inner)
                elif not self._states.differs(step.inner._iterations):
                    count = clock.count
                clock.go_on(count)
            firsts.append(count)
        return tuple(firsts)

    def clock_of(self, step: ExchangeStep) -> RunClock | None:
        """Return what an optimizer's schedule is read at here; None: its own count, or none."""
        return self._clocks.get(step)

    def advance(self, session: Session) -> Int64:
        """Return the counts [k] of the schedules of all that step, after an exchange.

        A graph assigns them to the clocks, in this order.
        """
        counts = []
        for number, step in enumerate(self.stepping):
            clock, count = self.clock_of(step), session.schedule_count(number)
            if clock is not None and count is not None:
                clock.count = count
            counts.append(0 if clock is None else clock.count)
        return np.array(counts, np.int64)

    def start(self, session: Session) -> None:
        """Begin with the counts and the loss scale of a run that was joined."""
        for step, count in zip(self.stepping, self.advance(session), strict=True):
            if (clock := self.clock_of(step)) is not None:
                clock.go_on(int(count))
            step.assign_scale(session.loss_scale)

    def note_rates(self) -> None:
        """Take the present rates for those that the phase begins with."""
        for step in self.stepping:
            step.known_rate = 0.0 if step.rate is None else float(step.rate.numpy())

    def follow_rate(self, session: Session) -> None:
        """Go on with the rate that the PS steps with; others, or an earlier start, may have set it.

        A rate that this script has set since `compile` goes to the PS.
        """
        if session.takes_weights or len(self.stepping) > 1 or not session.part.core.versions[0]:
            return
        step = self.stepping[0]
        if step.rate is not None and float(step.rate.numpy()) == np.float32(step.known_rate):
            step.adopt_rate(session.part.core.learning_rate)

    def adopt_rate(self, session: Session) -> None:
        """Go on with the server's learning rate, unless the script has set one since `compile`."""
        step = self.compiled
        if step is None or step.rate is None:
            return
        now = float(step.rate.numpy())
        if abs(now - step.known_rate) > RATE_TOLERANCE * abs(step.known_rate):
            return
        warn_of_other_rate("the optimizer's learning_rate", now, session)
        step.adopt_rate(session.part.core.learning_rate)
