"""Joins the run in each phase: offers (describes) the script's model, creates the session."""

from __future__ import annotations

import dataclasses
from typing import Any

from thinwire.models.flat_model import SharedModel
from thinwire.ops.types import State
from thinwire.script.data.data import Shared
from thinwire.script.keras.checks import check_variables
from thinwire.script.keras.compiled import describe_compiled
from thinwire.script.keras.early_stop import EarlyStop
from thinwire.script.keras.kept_state import KeptState
from thinwire.script.keras.offers import make_offer
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.plan import StepPlan
from thinwire.script.keras.run_member import RunMember
from thinwire.script.session import Session
from thinwire.worker.held_files import lift_hold
from thinwire.worker.program import program_here
from thinwire.worker.script import RECORD


class Joining:
    """Creates a model's sessions with the servers and joins the run.

    Attributes:
        data: This worker's training data for the current `fit`; empty for the script's own training
            loop.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
        optimizers: Optimizers of the script that train in the run.
        stop: Object that agrees with the other workers' scripts on an early end of a `fit`.
        num_train: Number of rows of the whole training set, from `distribute`; None if the script
            has not given it.
    """

    def __init__(
        self,
        member: RunMember,
        optimizers: ScriptOptimizers,
        stop: EarlyStop,
        num_train: int | None,
    ) -> None:
        self.data = Shared({})
        self._member, self._optimizers, self._stop = member, optimizers, stop
        self._num_train = num_train
        self._kept = None if member.settings is None else KeptState.of(member.settings)
        # Step plan and shared variables in the model's newest offer to the PS; None before the
        # first offer.
        self._offered: tuple[StepPlan, SharedModel] | None = None

    def join(self) -> None:
        """Join or rejoin the run; load the server's weights, loss scale and batch counts."""
        member = self._member
        member.join()
        session = member.joined
        stepping = [step.inner for step in self._optimizers.stepping]
        if member.catch_up.is_behind and not session.stopped:
            self._stop.pass_over()
            member.catch_up.forget_states(stepping)
        else:
            member.catch_up.remember_states(stepping)
        self._optimizers.start(session)
        if member.barriers is not None and not (member.catch_up.is_behind or session.stopped):
            lift_hold()

    def join_by_flags(self) -> None:
        """Join or rejoin a run whose server has a model and an optimizer from flags."""
        member, is_first = self._member, self._member.session is None
        if is_first:
            shared = SharedModel.of(member.model, is_offered=False)
            self._optimizers.take_compiled()
            check_variables(shared.variables)
            member.session = Session(member.own_settings, shared, self._num_train)
        self.join()
        if is_first:
            self._optimizers.adopt_rate(member.joined)

    @property
    def has_offered(self) -> bool:
        """True if this model has been offered to the PS before."""
        return self._offered is not None

    def again(self) -> Session:
        """Return a session for the run's next phase, with the variables the PS accepted last."""
        if self._offered is None:
            raise RuntimeError("the model has not registered with a run of Thinwire yet")
        return self.offer(*self._offered)

    def offer(self, plan: StepPlan, shared: SharedModel) -> Session:
        """Return a session that offers (describes) the model to the PS for the first or next phase.

        Args:
            plan: Optimizers of the script, with the variables that each optimizer updates.
            shared: Variables of the model that all workers train.

        Raises:
            ConfigurationError: The PS cannot update the model as the script does without Thinwire.
        """
        member, data, optimizers = self._member, self.data, self._optimizers
        settings, before, barriers = member.own_settings, member.session, member.barriers
        optimizers.take(plan)
        method, self._offered = settings.run.method, (plan, shared)
        plan.check(method, member.model.name)
        num_train = self._num_train or data.num_examples
        firsts = optimizers.begin_clocks(method)
        offer = make_offer(shared, plan, method, firsts, num_train, data.batch_size)
        # only the first offer to the PS describes the state before any training
        if not RECORD.program:
            compiled = describe_compiled(member.model, plan, offer, data.batch_size)
            RECORD.program = program_here(compiled).rows()
        offer = dataclasses.replace(offer, succession=member.num_before)
        inner = [step.inner for step in optimizers.stepping]
        momentum = optimizers.momentum_for(method)
        phase = 0 if before is None or barriers is None else barriers.phase
        return Session(
            settings,
            shared,
            num_train,
            momentum,
            offer,
            inner,
            before,
            phase,
            self._restore,
            self._check_states,
        )

    def _check_states(self, session: Session) -> None:
        """Reject an offer of the model to the PS if this process lacks the optimizer state for it.

        A shard accepts a model's offer only before the phase of the run for which the offer is
        made. After a restart of this worker, the barrier may select the worker to offer its model
        although the phase of the run has begun already. A worker that the barrier selects too late
        joins without an offer, and `_check_states` is not called. `CatchUp.check_states` compares
        the optimizer states.
        """
        if not session.takes_weights:
            stepping = [step.inner for step in self._optimizers.stepping]
            self._member.catch_up.check_states(session, stepping)

    def keep_state(self, at_end: bool = False) -> None:
        """Write a checkpoint of the optimizers that step on this worker, if one is due.

        Args:
            at_end: True at the end of a `fit`. A checkpoint is then due if the optimizers have
                taken a step since the last checkpoint.
        """
        session = self._member.session
        if self._kept is not None and session is not None and not self._member.is_behind:
            with self._member.lock:
                self._kept.save(session, self._stepping, at_end)

    def _restore(self, session: Session, last_step: int) -> State | None:
        """Load the optimizer state that an earlier process of this worker saved."""
        return (
            None if self._kept is None else self._kept.restore(session, self._stepping, last_step)
        )

    @property
    def _stepping(self) -> list[Any]:
        """The optimizers that train in the run, with their loss-scaling wrappers."""
        return [step.optimizer for step in self._optimizers.stepping]
