"""Begins the phases of a run: in a phase, the model and its optimizers stay the same.

A new phase of the run begins whenever a script's model differs from the run's model: before the
first step of a `fit`, or after its last callback. At the start of a new phase, one script offers
its model to the servers (sends its description and weights), and all workers continue with this
model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.models.flat_model import SharedModel
from thinwire.models.seeds import seed_apart
from thinwire.ops.types import ConfigurationError
from thinwire.proto.barriers import Point
from thinwire.script.keras.checks import check_same_variables
from thinwire.script.keras.early_metrics import create_before_trace
from thinwire.script.keras.early_stop import EarlyStop
from thinwire.script.keras.evaluations import FitEvaluations
from thinwire.script.keras.fit_barriers import FitBarriers
from thinwire.script.keras.joining import Joining
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.plan import StepPlan
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.trial import StepTrial
from thinwire.script.session import Session
from thinwire.worker.held_files import lift_hold
from thinwire.worker.script import RECORD


class Phases:
    """Begins the phases of a run in which one model of a script is trained.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
        optimizers: Optimizers of the script that train in the run.
        trial: Object that calls or traces the model's train_step to find its optimizers before the
            first step.
        joining: Object that creates the sessions with the servers and joins the run.
        evaluations: Object that reports the start of each `fit` to the evaluator.
        stop: Object that agrees with the other workers' scripts on an early end of a `fit`.
    """

    def __init__(
        self,
        member: RunMember,
        optimizers: ScriptOptimizers,
        trial: StepTrial,
        joining: Joining,
        evaluations: FitEvaluations,
        stop: EarlyStop,
    ) -> None:
        self._member, self._optimizers, self._trial = member, optimizers, trial
        self._joining, self._evaluations, self._stop = joining, evaluations, stop
        self._awaits_step = self._is_traced_anew = False
        # True if this script offers its model for the phase of the run that begins
        self._offers = False
        # ids of the model's trainable variables at the start of the phase of the run
        self._trained: list[int] = []
        # Maps the id of a random layer's variable to the variable, once it has this worker's seed.
        self._seeded: dict[int, Any] = {}

    def prepare_fit(self) -> None:
        """Replace the steps of an optimizer that was compiled after the previous `fit`."""
        self._is_traced_anew = self._member.model.train_function is None
        self._optimizers.prepare()

    def begin(self) -> None:
        """Join the run before the first step of `fit` or a training loop, or in that step."""
        member = self._member
        if self._trial.is_standard:
            self._optimizers.build_compiled()
            create_before_trace(member.model)
        if member.session is None and member.is_offered:
            self._trial.before_first(self.begin_with)
        elif self._wait_for_change(Point.BEGIN):
            if self._is_traced_anew or member.model.run_eagerly:
                self._await_step()
            else:
                self._go_on(self._joining.again())
        elif member.succeeds:  # the run has ended, and this model keeps its own weights
            self._await_step()
        elif not member.stopped:
            self._optimizers.forget_states()
            if member.is_offered:
                self._joining.join()
            else:
                self._joining.join_by_flags()
            # If workers did not wait for each other after joining, those that join first would take
            # the first rounds of a `fit` without those that join later.
            if member.in_fit:
                member.wait_for_others(Point.BEGIN_JOINED)
            self._evaluations.report_fit()

    def note_end(self) -> None:
        """Record the optimizers' state at the end of a `fit`, to detect changes by the script."""
        self._optimizers.note_states()

    def note_failure(self) -> None:
        """Forget the recorded optimizer state after a failed `fit`, which has changed it."""
        self._optimizers.forget_states()

    def end(self) -> None:
        """Begin a phase of the run if callbacks changed weights or model at the end of a `fit`."""
        member = self._member
        if not member.stopped and self._wait_for_change(Point.LEFT):
            self._go_on(self._joining.again())

    @property
    def begins_with_step(self) -> bool:
        """True if the run's next phase begins with a step, as only a step shows the variables."""
        return self._member.session is None or self._awaits_step

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
        session = self._joining.offer(plan, shared)
        before = session.variables.read()
        if len(before) != session.variables.size:
            raise ConfigurationError(
                f"{model.name!r} creates its variables within its first training step, when they "
                "have no initial values yet; expected a model that is built before this step. "
                "Call the model on one mini-batch before fit: model(x[:1])."
            )
        check_same_variables(shared.variables, plan.variables)
        self._trained = [id(variable) for variable in model.trainable_variables]
        if member.session is None:
            self._join_first(session)
        else:
            self._go_on(session)
        return not np.array_equal(before, session.weights)

    def _join_first(self, session: Session) -> None:
        """Join the run for the first time, and wait for the other workers' scripts."""
        member = self._member
        member.session, member.has_place = session, True
        self._joining.join()
        if session.stopped:
            return
        self._optimizers.follow_rate(session)
        settings, part = session.settings, session.part
        member.barriers = FitBarriers(
            settings.run, session.own.id_worker, part.run_id, self._stop.stop
        )
        RECORD.at_end(member.leave_at_end)
        # A training loop of the script's own waits for the other scripts only if `thinwire run`
        # started them.
        if member.in_fit or settings.is_launched:
            member.take_end(member.barriers.begin_run(settings.is_launched))
        if not (member.stopped or member.catch_up.is_behind):
            lift_hold()
        if member.in_fit:
            member.barriers.count_fit()
            member.wait_for_others(Point.BEGIN)
            self._evaluations.report_fit()
        self._seed_apart(session.own.id_worker)

    def _wait_for_change(self, where: Point) -> bool:
        """Wait until all scripts have begun or ended the current `fit`, and compare their models.

        Args:
            where: Point of the `fit`: BEGIN or LEFT.

        Returns:
            True if the model of a script differs from the run's model: the script has set weights,
            or changed the model by `compile` or `trainable`.
        """
        member = self._member
        if member.session is None or member.barriers is None:
            return False
        differs = member.succeeds or (not member.stopped and not member.joined.has_run_s_values)
        if where is Point.BEGIN:
            trained = [id(variable) for variable in member.model.trainable_variables]
            has_changed = member.model.run_eagerly and trained != self._trained
            differs = differs or has_changed or self._is_traced_anew
            differs = self._optimizers.are_set_by_script() or differs
        opening = member.wait_for_others(where, differs)
        member.barriers.where = where
        self._offers = opening is not None and opening.offers
        return opening is not None and opening.changes

    def _await_step(self) -> None:
        """Let a `fit`'s first step begin the run's phase, because the step shows the variables."""
        self._awaits_step = True
        self._trial.before_first(self.begin_with)

    def _go_on(self, session: Session) -> None:
        """Begin a phase of the run: the script that offers its model joins before all others."""
        member, self._awaits_step = self._member, False
        begins = member.barriers is not None and member.barriers.where is Point.BEGIN
        member.go_on_as(session)
        self._optimizers.note_rates()
        if self._offers:
            self._joining.join()
        if member.wait_for_others(Point.BEGIN_OFFERED if begins else Point.LEFT_OFFERED) is None:
            return
        if not self._offers:
            self._joining.join()
        member.wait_for_others(Point.BEGIN_JOINED if begins else Point.LEFT_JOINED)
        if begins:
            self._optimizers.forget_states()
            self._evaluations.report_fit()
        else:
            # record the optimizer state with which the phase of the run began
            self._optimizers.note_states()
        self._seed_apart(session.own.id_worker)

    def _seed_apart(self, id_worker: int) -> None:
        """Give the model's random layers a seed that differs by worker, once for each layer.

        The launcher gives the same seed to the scripts of all workers. Without a seed by worker,
        Dropout would draw the same noise on all workers.
        """
        variables = self._member.model.non_trainable_variables
        seed_apart(
            (variable for variable in variables if id(variable) not in self._seeded), id_worker
        )
        self._seeded |= {id(variable): variable for variable in variables}
