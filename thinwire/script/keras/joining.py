"""Joins the run in each phase: offers (describes) the script's model, and creates the session."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from thinwire.models.flat_model import SharedModel
from thinwire.ops.types import ConfigurationError, State
from thinwire.script.data.data import Shared
from thinwire.script.keras.checks import check_variables
from thinwire.script.keras.compiled import describe_compiled
from thinwire.script.keras.early_stop import EarlyStop
from thinwire.script.keras.held_weights import set_by_script
from thinwire.script.keras.kept_state import KeptState
from thinwire.script.keras.offers import make_offer
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.plan import StepPlan
from thinwire.script.keras.run_member import RunMember
from thinwire.script.session import Session
from thinwire.worker.held_files import lift_hold
from thinwire.worker.program import program_here
from thinwire.worker.script import RECORD

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Joining:
    """Creates a model's sessions with the servers, and joins the run.

    Attributes:
        data: This worker's training data for the current `fit`; empty for a custom training loop.

    Args:
        member: Settings, session and barriers of the model in its run.
        optimizers: Optimizers of the script.
        stop: Agrees with the other scripts on an early end of a `fit`.
        num_train: Number of rows of the whole training set, as given to `distribute`; None if the
            script has not given it.
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
        # Step plan and shared variables of the model's newest offer; None before the first offer.
        self._offered: tuple[StepPlan, SharedModel] | None = None

    def join(self) -> None:
        """Join or rejoin the run; load the server's weights, schedule counts and loss scale."""
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
        """Join or rejoin a run in which flags define the server's model and optimizer."""
        member, is_first = self._member, self._member.session is None
        if is_first:
            shared = SharedModel.of(member.model, is_offered=False)
            self._optimizers.take_compiled()
            check_variables(shared.variables)
            member.session = Session(member.own_settings, shared, self._num_train)
        self.join()
        if is_first:
            self._optimizers.adopt_rate(member.joined)

    def join_loop(self) -> Float32 | None:
        """Rejoin the run for a training loop after a `fit`: the worker left at the end of `fit`.

        If the script has set weights since the end of the `fit`, the model keeps the script's
        changes, and the next step sends the changes to the PS.

        Returns:
            [num_parameters] float32 change of the run's weights since the worker left; None if the
            weights have not changed or the worker need not rejoin.
        """
        member, session = self._member, self._member.session
        if session is None or session.stopped or member.in_fit or not member.has_left:
            return None
        member.has_left = False
        if self._optimizers.are_set_by_script(in_step=True):
            raise ConfigurationError(
                f"the script has set the state of an optimizer of {member.model.name!r} between a "
                "fit and a training loop that follows it, where the PS takes over no optimizer "
                "state; set the state between two fits, or before the first step of the script."
            )
        self._optimizers.forget_states()  # steps of the loop change the recorded states
        before, set_here = session.weights.copy(), set_by_script(session)
        self.join()
        if member.barriers is not None:
            member.take_end(member.barriers.begin_loop())
        change = session.weights - before
        if set_here is not None:
            # `shared.assign` counts as an assignment by the script, so the next step sends the
            # script's change to the PS.
            session.shared.assign(set_here + change)
        return change if change.any() else None

    def again(self) -> Session:
        """Return a session for the run's next phase, with the variables of the last offer."""
        if self._offered is None:
            raise RuntimeError("the model has not registered with a run of Thinwire yet")
        return self.offer(*self._offered)

    def offer(self, plan: StepPlan, shared: SharedModel) -> Session:
        """Return a session for the first or the next phase, with an offer (model description).

        Args:
            plan: Optimizers of the script and the variables that each optimizer steps.
            shared: Shared variables of the model.

        Raises:
            ConfigurationError: The PS cannot take the steps that the script takes without Thinwire.
        """
        member, data, optimizers = self._member, self.data, self._optimizers
        settings, before, barriers = member.own_settings, member.session, member.barriers
        optimizers.take(plan)
        method, self._offered = settings.run.method, (plan, shared)
        plan.check(method, member.model.name)
        num_train = self._num_train or data.num_examples
        firsts = optimizers.begin_clocks(method)
        offer = make_offer(shared, plan, method, firsts, num_train, data.batch_size)
        if not RECORD.program:  # only the first offer describes the state before any training
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
        """Reject an offer if this process does not have the optimizer state to be offered.

        A shard accepts an offer only before the phase of the offer begins. After a restart the
        barrier may select this worker to offer although the phase has begun. The worker then joins
        without an offer, and this check is not called. `CatchUp.check_states` has the check itself.
        """
        if not session.takes_weights:
            stepping = [step.inner for step in self._optimizers.stepping]
            self._member.catch_up.check_states(session, stepping)

    def keep_state(self, at_end: bool = False) -> None:
        """Write a checkpoint of the optimizers that step on this worker, if a checkpoint is due.

        Args:
            at_end: True at the end of a `fit`. A checkpoint is then due if there were steps since
                the last checkpoint.
        """
        session = self._member.session
        if self._kept is not None and session is not None and not self._member.catch_up.is_behind:
            with self._member.lock:
                self._kept.save(session, self._stepping, at_end)

    def _restore(self, session: Session, last_step: int) -> State | None:
        """Load the optimizer state that an earlier process of this worker saved."""
        return (
            None if self._kept is None else self._kept.restore(session, self._stepping, last_step)
        )

    @property
    def _stepping(self) -> list[Any]:
        """The optimizers that step in the run, with their loss-scaling wrappers."""
        return [step.optimizer for step in self._optimizers.stepping]
