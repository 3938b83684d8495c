"""Phases of a script: whenever some script's model is another one than the run's, all go on anew.

A phase begins before the first step of a `fit`, or behind its last callback, with the model of one
script, which all take over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.models.flat_model import SharedModel
from thinwire.models.seeds import seed_apart
from thinwire.ops.types import ConfigurationError
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
    """The phases of one model's script.

    Args:
        member: The model's place in the run.
        optimizers: Of the script.
        trial: Of the model's train_step.
        joining: Makes the sessions.
        evaluations: To which each `fit` is reported.
        stop: Of the present `fit`.
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
        self._offers = False  # the model that the next phase begins with
        self._trained: list[int] = []  # by identity: what was trainable when the phase began
        self._seeded: dict[int, Any] = {}  # by identity: what random layers draw by

    def prepare_fit(self) -> None:
        """Be ready for what has been compiled since the `fit` before."""
        self._is_traced_anew = self._member.model.train_function is None
        self._optimizers.prepare()

    def begin(self) -> None:
        """Join before the first step of a `fit` or a loop, unless only that shows the model."""
        member = self._member
        if self._trial.is_standard:
            self._optimizers.build_compiled()
            create_before_trace(member.model)
        if member.session is None and member.is_offered:
            self._trial.before_first(self.begin_with)
        elif self._wait_for_change("begin"):
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
            if member.in_fit:  # else the first rounds would be of those who have joined first
                member.wait_for_others("begin-joined")
            self._evaluations.report_fit()

    def note_end(self) -> None:
        """Note what the run leaves in the optimizers, to notice what the script then sets there."""
        self._optimizers.note_states()

    def note_failure(self) -> None:
        """Take nothing for the run's that a `fit` which failed has left in the optimizers."""
        self._optimizers.forget_states()

    def end(self) -> None:
        """Let all workers go on with weights that callbacks have set at the end of `fit`."""
        member = self._member
        if not member.stopped and self._wait_for_change("left"):
            self._go_on(self._joining.again())

    @property
    def begins_with_step(self) -> bool:
        """Whether the next step begins a phase, the first included: it shows what is offered."""
        return self._member.session is None or self._awaits_step

    def begin_with(self, plan: StepPlan) -> bool:
        """Join, or begin a phase, once it is known what steps.

        Returns:
            Whether the model has other weights than before.

        Raises:
            ConfigurationError: The model cannot be shared, or the PS cannot step as it does.
        """
        member, model = self._member, self._member.model
        shared = SharedModel.of(model, member.is_offered, plan.variables)
        session = self._joining.offer(plan, shared)
        before = session.variables.read()
        if len(before) != session.variables.size:
            raise ConfigurationError(
                f"{model.name!r} creates its variables within its first step, where they have "
                "no values yet; expected a model that is built before. Call it on one mini-batch "
                "before fit: model(x[:1])."
            )
        check_same_variables(shared.variables, plan.variables)
        self._trained = [id(each) for each in model.trainable_variables]
        if member.session is None:
            self._join_first(session)
        else:
            self._go_on(session)
        return not np.array_equal(before, session.weights)

    def _join_first(self, session: Session) -> None:
        """Join the run for the first time, and meet the other scripts."""
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
        if member.in_fit or settings.is_launched:  # loops under other launchers wait for nobody
            member.take_end(member.barriers.begin_run(settings.is_launched))
        if not (member.stopped or member.catch_up.is_behind):
            lift_hold()
        if member.in_fit:
            member.barriers.count_fit()
            member.wait_for_others("begin")
            self._evaluations.report_fit()
        self._seed_apart(session.own.id_worker)

    def _wait_for_change(self, where: str) -> bool:
        """Wait until all scripts begin this `fit`, or have left it, each with its model.

        Returns:
            Whether some script's model is another one than the run's: weights that were set, or
            what `compile` and `trainable` have changed.
        """
        member = self._member
        if member.session is None or member.barriers is None:
            return False
        is_other = member.succeeds or (not member.stopped and not member.joined.has_run_s_values)
        if where == "begin":
            trained = [id(each) for each in member.model.trainable_variables]
            has_changed = member.model.run_eagerly and trained != self._trained
            is_other = is_other or has_changed or self._is_traced_anew
            is_other = self._optimizers.are_set_by_script or is_other
        opening = member.wait_for_others(where, is_other)
        member.barriers.where = where
        self._offers = opening is not None and opening.offers
        return opening is not None and opening.changes

    def _await_step(self) -> None:
        """Let the first step begin the phase: it shows what the model is."""
        self._awaits_step = True
        self._trial.before_first(self.begin_with)

    def _go_on(self, session: Session) -> None:
        """Go on with the model of the script that offers its own."""
        member, self._awaits_step = self._member, False
        where = "" if member.barriers is None else member.barriers.where
        member.go_on_as(session)
        self._optimizers.note_rates()
        if self._offers:
            self._joining.join()
        if member.wait_for_others(f"{where}-offered") is None:
            return
        if not self._offers:
            self._joining.join()
        member.wait_for_others(f"{where}-joined")
        if where == "begin":
            self._optimizers.forget_states()
            self._evaluations.report_fit()
        else:
            self._optimizers.note_states()  # the phase has begun with them
        self._seed_apart(session.own.id_worker)

    def _seed_apart(self, id_worker: int) -> None:
        """Let Dropout and the like draw otherwise than those of other workers do, once each.

        The launcher seeds all scripts alike.
        """
        variables = self._member.model.non_trainable_variables
        seed_apart((each for each in variables if id(each) not in self._seeded), id_worker)
        self._seeded |= {id(each): each for each in variables}
