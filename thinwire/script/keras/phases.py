"""Begins the phases of a run: in a phase, the model and its optimizers stay the same.

A new phase of the run begins whenever a script's model differs from the run's model: before the
first step of a `fit`, or after its last callback. At the start of a new phase, one script offers
its model to the servers (sends its description and weights), and all workers continue with this
model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.models.flat_model import SharedModel
from thinwire.models.seeds import seed_apart
from thinwire.ops.types import ConfigurationError
from thinwire.proto.barriers import Point
from thinwire.script.fit_barriers import FitBarriers
from thinwire.script.keras.central import fill_slots, take_final
from thinwire.script.keras.checks import check_same_variables, check_variables
from thinwire.script.keras.evaluations import FitEvaluations
from thinwire.script.keras.offers import new_session
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.plan import StepPlan
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.trial import StepTrial, create_before_trace
from thinwire.script.member import Action, Event, MemberAction, OutOfTurn, Standing, Wait
from thinwire.script.own_changes import set_by_script
from thinwire.script.session import Session
from thinwire.worker.held_files import lift_hold
from thinwire.worker.script import RECORD

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Phases:
    """Carries out the actions of a model's `ScriptMember`, in calls of `fit` and in loops.

    Attributes:
        has_slots: True if the script's optimizers have the PS's state of the present `fit`.

    Args:
        member: Membership of the model in a run.
        trial: Object that calls or traces the model's train_step to find its optimizers before the
            first step.
        evaluations: Object that reports the start of each `fit` to the evaluator.
    """

    def __init__(
        self,
        member: RunMember,
        optimizers: ScriptOptimizers,
        trial: StepTrial,
        evaluations: FitEvaluations,
    ) -> None:
        self._member, self._optimizers, self._trial = member, optimizers, trial
        self.has_slots = False
        # Step plan and shared variables in the model's newest offer to the PS; None before the
        # first offer.
        self._offered: tuple[StepPlan, SharedModel] | None = None
        # session of the next phase, which takes the place of the present one
        self._coming: Session | None = None
        # session whose final state has been loaded in the present `fit`
        self._final: Session | None = None
        self._is_traced_anew = False
        # ids of the model's trainable variables at the start of the phase of the run
        self._trained: list[int] = []
        # Maps the id of a random layer's variable to the variable, once it has this worker's seed.
        self._seeded: dict[int, Any] = {}
        self._actions: dict[MemberAction, Callable[[], Event | None]] = {
            MemberAction.FIND_STEP: self._find_step,
            MemberAction.TAKE_SESSION: self._take_session,
            MemberAction.JOIN: self._join,
            MemberAction.FOLLOW_RATE: lambda: optimizers.follow_rate(member.joined),
            MemberAction.MEET_RUN: self._meet_run,
            MemberAction.LIFT_HOLD: lift_hold,
            MemberAction.COUNT_FIT: lambda: member.met_barriers.count_fit(),
            MemberAction.REPORT_FIT: evaluations.report_fit,
            MemberAction.SEED: self._seed_apart,
            MemberAction.FORGET_STATES: optimizers.states.forget,
            MemberAction.NOTE_STATES: optimizers.states.note,
            MemberAction.FINISH_ROUNDS: lambda: member.finish_rounds(member.joined),
            MemberAction.KEEP_STATE: lambda: member.keep_state(at_end=True),
            MemberAction.TAKE_FINAL: self._take_final,
            MemberAction.FILL_SLOTS: self._fill_slots,
            MemberAction.LEAVE: member.close,
            MemberAction.LEAVE_FAILED: lambda: member.close("error"),
        }

    def receive(self, event: Event) -> None:
        """Report an event of the script, and carry out all actions that follow from it."""
        state = self._member.state
        try:
            action = state.receive(event)
            while action is not None:
                action = state.receive(self._carry_out(action))
        except OutOfTurn:
            raise
        except BaseException:
            state.receive(Event.FAILED)
            raise

    def _carry_out(self, action: Action) -> Event:
        """Carry out an action; return its result."""
        if isinstance(action, Wait):
            return self._wait(action)
        return self._actions[action]() or Event.DONE

    # -- events of the script ---------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Begin a call of `fit`, before Keras' own `fit` begins.

        The steps of an optimizer that was compiled after the previous `fit` are replaced.
        """
        self.has_slots, self._final = False, None
        self._is_traced_anew = self._member.model.train_function is None
        self._optimizers.prepare()
        self.receive(Event.FIT_BEGINS)

    def begin(self) -> None:
        """Join the run before the first step of `fit` or a training loop, or in that step."""
        if self._trial.is_standard:
            self._optimizers.build_compiled()
            create_before_trace(self._member.model)
        self.receive(Event.TRAINING_BEGINS)

    def begin_with(self, plan: StepPlan) -> bool:
        """Join the run, or begin the run's next phase, with the optimizers of a first step.

        Args:
            plan: Optimizers of one training step of the script, with the variables that each
                optimizer updates.

        Returns:
            True if joining the run has changed the model's weights.

        Raises:
            ConfigurationError: The model cannot be trained in a run, or the PS cannot update the
                model as the script does without Thinwire.
        """
        member, model = self._member, self._member.model
        shared = SharedModel.of(model, member.is_offered, plan.variables)
        self._offered = plan, shared
        self._coming = session = new_session(member, self._optimizers, plan, shared)
        before = session.variables.read()
        if len(before) != session.variables.size:
            raise ConfigurationError(
                f"{model.name!r} creates its variables within its first training step, when they "
                "have no initial values yet; expected a model that is built before this step. "
                "Call the model on one mini-batch before fit: model(x[:1])."
            )
        check_same_variables(shared.variables, plan.variables)
        self._trained = [id(variable) for variable in model.trainable_variables]
        self.receive(Event.STEP_FOUND)
        return not np.array_equal(before, session.weights)

    def join_loop(self) -> Float32 | None:
        """Rejoin the run for a training loop after a `fit`, at whose end the worker has left.

        If the script has set weights since the end of the `fit`, the model keeps the script's
        weights, and the next step sends this change to the PS.

        Returns:
            [num_parameters] float32 change of the run's weights since the worker left; None if the
            weights have not changed or the worker need not rejoin.
        """
        member, session = self._member, self._member.session
        has_left = member.state.standing in (Standing.LEFT, Standing.LEFT_BEHIND)
        if session is None or member.in_fit or session.stopped or not has_left:
            return None
        if self._optimizers.states.are_set_by_script(in_step=True):
            raise ConfigurationError(
                f"the script has set the state of an optimizer of {member.model.name!r} between a "
                "fit and a training loop that follows it, where the PS takes over no optimizer "
                "state; set the state between two fits, or before the first step of the script."
            )
        before, set_here = session.weights.copy(), set_by_script(session)
        self.receive(Event.LOOP_STEPS)
        change = session.weights - before
        if set_here is not None:
            # The method `shared.assign` counts as an assignment by the script, so the next step
            # sends the script's change to the PS.
            session.shared.assign(set_here + change)
        return change if change.any() else None

    def fail(self) -> None:
        """Leave the run because a `fit` has failed, which has changed the optimizers' state."""
        self._optimizers.states.forget()
        self.receive(Event.FIT_FAILS)

    def leave(self) -> None:
        """Leave the run after the last step of a `fit`, and load the run's weights."""
        member, set_here = self._member, None
        if member.is_training and member.is_offered:
            set_here = set_by_script(member.joined)
        self.receive(Event.FIT_ENDS)
        if set_here is not None and not member.stopped:
            member.joined.variables.assign(set_here)

    # -- actions ----------------------------------------------------------------------------------

    def _find_step(self) -> Event | None:
        """Describe the model for the next phase, if its variables are known."""
        member, is_end = self._member, self._member.state.standing is Standing.CLOSING
        is_known = is_end or not (self._is_traced_anew or member.model.run_eagerly)
        if is_known and member.session is not None and self._offered is not None:
            self._coming = new_session(member, self._optimizers, *self._offered)
            return None
        self._trial.before_first(self.begin_with)
        return Event.LATER

    def _take_session(self) -> None:
        if self._coming is None:
            raise RuntimeError("the model has no session for the next phase")
        is_first = self._member.session is None
        self._member.go_on_as(self._coming)
        if not is_first:
            self._optimizers.note_rates()

    def _join(self) -> Event:
        """Join the run; before, create the session if flags define the server's model."""
        member, is_first = self._member, self._member.session is None
        if member.is_offered or not is_first:
            return member.join()
        shared = SharedModel.of(member.model, is_offered=False)
        check_variables(shared.variables)
        member.session = Session(member.own_settings, shared, member.num_train)
        result = member.join()
        self._optimizers.adopt_rate(member.session)
        return result

    def _meet_run(self) -> Event | None:
        """Wait for the scripts of all workers, after this script has joined for the first time."""
        member, session = self._member, self._member.joined
        settings, part = session.settings, session.part
        id_worker = session.own.id_worker
        barriers = member.barriers = FitBarriers(
            settings.run, id_worker, part.run_id, member.stop_fit
        )
        RECORD.endings.append(member.leave_at_end)
        # A training loop of the script's own waits for the other scripts only if `thinwire run`
        # started them.
        if member.in_fit or settings.is_launched:
            member.until_end(lambda: barriers.begin_run(settings.is_launched))
        return Event.HALTED if member.stopped else None

    def _wait(self, action: Wait) -> Event:
        """Wait at a barrier; where a phase may begin, compare this script's model with the run's.

        A new phase begins if the model of a script differs from the run's model: the script has set
        weights, or changed the model by `compile` or `trainable`.
        """
        member, point = self._member, action.point
        if member.stopped:
            return Event.HALTED
        if member.barriers is None:
            return Event.OPENED
        barriers, differs = member.barriers, action.compares and self._differs(point)
        opening = member.until_end(lambda: barriers.wait(point, differs))
        if action.compares:
            barriers.where = point
        if opening is None:
            return Event.HALTED
        if not opening.changes:
            return Event.OPENED
        return Event.OFFERS if opening.offers else Event.FOLLOWS

    def _differs(self, point: Point) -> bool:
        """Return True if this script's model differs from the model that the run trains."""
        member = self._member
        if member.state.standing is Standing.SUCCEEDING:
            return True
        differs = not member.joined.has_run_s_values
        if point is Point.BEGIN:
            trained = [id(variable) for variable in member.model.trainable_variables]
            has_changed = member.model.run_eagerly and trained != self._trained
            differs = differs or has_changed or self._is_traced_anew
            differs = self._optimizers.states.are_set_by_script() or differs
        return differs

    def _take_final(self) -> None:
        """Load the final state of an ended run while the shards still wait for this worker."""
        session = self._member.joined
        if session.stopped and self._final is not session:
            self._final = session
            self.has_slots = take_final(self._member, session)

    def _fill_slots(self) -> None:
        self.has_slots = fill_slots(self._member, self._member.joined)

    def _seed_apart(self) -> None:
        """Give the model's random layers a seed that differs by worker, once for each layer.

        The launcher gives the same seed to the scripts of all workers. Without a seed by worker,
        Dropout would draw the same noise on all workers.
        """
        variables = self._member.model.non_trainable_variables
        seed_apart(
            (variable for variable in variables if id(variable) not in self._seeded),
            self._member.joined.own.id_worker,
        )
        self._seeded |= {id(variable): variable for variable in variables}
