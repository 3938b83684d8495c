"""This worker in each phase of its script: what it offers to the servers, and how it joins."""

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
    """Makes the sessions of a model, and joins by them.

    Attributes:
        data: What the present `fit` trains on; of a loop nothing is known.

    Args:
        member: The model's place in the run.
        optimizers: Of the script.
        stop: Of the present `fit`.
        num_train: Size of the whole training set, as the script has given it.
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
        self._offered: tuple[StepPlan, SharedModel] | None = None  # in this model's last phase

    def join(self) -> None:
        """Join or join again, and take over the server's weights, counts and loss scale."""
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
        """Join a server that has its model, and its optimizer, from flags; or join it again."""
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
        """Join again where a loop goes on behind a `fit`, at whose end this worker has left.

        Weights that the script has set meanwhile stay, where they travel with its next step.

        Returns:
            By how much the run's weights [num_parameters] have changed meanwhile; None: not.
        """
        member, session = self._member, self._member.session
        if session is None or session.stopped or member.in_fit or not member.has_left:
            return None
        member.has_left = False
        if self._optimizers.are_set_by_script:
            raise ConfigurationError(
                f"the script has set the state of an optimizer of {member.model.name!r} between a "
                "fit and a loop of its own behind it, where no phase of the run begins; expected "
                "it between two fits, or before the first step of the script."
            )
        self._optimizers.forget_states()  # the loop's steps change it from here on
        before, set_here = session.weights.copy(), set_by_script(session)
        self.join()
        if member.barriers is not None:
            member.take_end(member.barriers.begin_loop())
        change = session.weights - before
        if set_here is not None:
            session.shared.assign(set_here + change)  # as the script would: it is its change
        return change if change.any() else None

    def again(self) -> Session:
        """Return this worker in the next phase, of the same variables."""
        if self._offered is None:
            raise RuntimeError("the model has not joined a run yet")
        return self.offer(*self._offered)

    def offer(self, plan: StepPlan, shared: SharedModel) -> Session:
        """Return this worker in the next phase, or the first, with what is offered to the servers.

        Args:
            plan: What the script steps.
            shared: The model.

        Raises:
            ConfigurationError: The PS cannot step as the script does.
        """
        member, data, optimizers = self._member, self.data, self._optimizers
        settings, before, barriers = member.own_settings, member.session, member.barriers
        optimizers.take(plan)
        method, self._offered = settings.run.method, (plan, shared)
        plan.check(method, member.model.name)
        num_train = self._num_train or data.num_examples
        firsts = optimizers.begin_clocks(method)
        offer = make_offer(shared, plan, method, firsts, num_train, data.batch_size)
        if not RECORD.program:  # as the script has compiled it, before anything is trained
            compiled = describe_compiled(member.model, plan, offer, data.batch_size)
            RECORD.program = program_here(compiled).rows()
        offer = dataclasses.replace(offer, succession=member.num_before)
        own = [step.inner for step in optimizers.stepping]
        momentum = optimizers.momentum_for(method)
        phase = 0 if before is None or barriers is None else barriers.phase
        return Session(
            settings,
            shared,
            num_train,
            momentum,
            offer,
            own,
            before,
            phase,
            self._restore,
            self._check_states,
        )

    def _check_states(self, session: Session) -> None:
        """Refuse to offer what this process does not know; see `CatchUp.check_states`.

        A shard takes an offer only before its phase begins. The barrier names a worker that comes
        back later as the one that offers, too, and it joins without.
        """
        if not session.takes_weights:
            stepping = [step.inner for step in self._optimizers.stepping]
            self._member.catch_up.check_states(session, stepping)

    def keep_state(self, at_end: bool = False) -> None:
        """Keep what local steps have made of the optimizers, if it is time; see `KeptState`."""
        session = self._member.session
        if self._kept is not None and session is not None and not self._member.catch_up.is_behind:
            with self._member.lock:
                self._kept.save(session, self._stepping, at_end)

    def _restore(self, session: Session, last_step: int) -> State | None:
        """Go on with what a process before this one has kept of this worker's local steps."""
        return (
            None if self._kept is None else self._kept.restore(session, self._stepping, last_step)
        )

    @property
    def _stepping(self) -> list[Any]:
        """The optimizers, with the loss scaling around them."""
        return [step.optimizer for step in self._optimizers.stepping]
