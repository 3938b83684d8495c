"""The worker of a distributed torch optimizer, which scripts use as ``optimizer.thinwire``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from thinwire.ops.methods.validation import refuse_local_epochs
from thinwire.ops.types import ConfigurationError, State
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.barriers import Point
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.settings import END_REASONS, RETURNED_EARLY, SCRIPT_FAILED
from thinwire.script import interrupts
from thinwire.script.central_state import CentralState
from thinwire.script.data.place import WorkerPlace
from thinwire.script.fit_barriers import FitBarriers
from thinwire.script.kept_state import KeptState
from thinwire.script.member import Action, Event, MemberAction, ScriptMember, Standing, Wait
from thinwire.script.session import LeavesOnExit, Session
from thinwire.script.settings import ScriptSettings
from thinwire.script.steps import EpochTraffic, RunOver, StepInfo
from thinwire.script.torch.data import part_of
from thinwire.script.torch.exchange import TorchExchange
from thinwire.script.torch.groups import check_for_server, momentum_for
from thinwire.script.torch.modules import FlatParameters, check_members
from thinwire.script.torch.optimizers import StepArguments, SteppedOptimizer
from thinwire.script.torch.phase import TorchPhase
from thinwire.script.torch.states import slots_of
from thinwire.worker.client.control import RunHalted
from thinwire.worker.held_files import lift_hold
from thinwire.worker.program import program_here
from thinwire.worker.script import RECORD, LeftBehind


class TorchSession(LeavesOnExit):
    """Trains torch modules as a worker in a run, in a training loop that the script writes.

    The run begins with the first step of the first optimizer. All optimizers of a script share one
    session, so the script distributes them before that step.

    Attributes:
        settings: Settings of the script; None if the script trains outside of a run.
        calls: Maps the Python id of an optimizer to the arguments of the call of
            `thinwire.distribute`.
    """

    def __init__(
        self, settings: ScriptSettings | None = None, num_train: int | None = None
    ) -> None:
        """Create the session.

        Args:
            settings: Settings of the script; None outside of a run.
            num_train: Number of rows of the whole training set; None if unknown.
        """
        self.settings, self._num_train = settings, num_train
        self.calls: dict[int, Any] = {}
        self._steps: list[SteppedOptimizer] = []
        self._state = ScriptMember(is_offered=True)
        self._session: Session | None = None
        self._phase: TorchPhase | None = None
        # phase and session that take the place of the present ones
        self._coming: tuple[TorchPhase, Session] | None = None
        self._barriers: FitBarriers | None = None
        self._kept = None if settings is None else KeptState.of(settings)
        # parameters that phases trained which a restarted script has skipped, by id
        self._passed_over: dict[int, Any] = {}
        self._has_reported_end = False
        self._lock = threading.Lock()
        self._exchange = None if settings is None else TorchExchange(settings, self._lock)
        self._actions: dict[MemberAction, Callable[[], Event | None]] = {
            MemberAction.FIND_STEP: self._find_step,
            MemberAction.TAKE_SESSION: self._take_session,
            MemberAction.JOIN: self._join,
            MemberAction.MEET_RUN: self._meet_run,
            MemberAction.LIFT_HOLD: lift_hold,
        }

    # -- for scripts ------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """True if the optimizers train in a run; False outside of a run."""
        return self.settings is not None

    @property
    def last(self) -> StepInfo | None:
        """Result of the newest exchange with the servers; None before the first step."""
        return None if self._exchange is None else self._exchange.last

    @property
    def traffic(self) -> EpochTraffic:
        """Sums of the bytes and the staleness of all exchanges."""
        return EpochTraffic() if self._exchange is None else self._exchange.traffic

    @property
    def stopped(self) -> bool:
        """True if the training run has ended; further steps change nothing."""
        return self._session is not None and self._session.stopped

    @property
    def stop_reason(self) -> str:
        """The reason for the end of the run; an empty text while the run continues."""
        return "" if self._session is None else self._session.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges with the servers that have begun."""
        return 0 if self._session is None else self._session.part.core.step

    def shard(self, *data: Any) -> Any:
        """Return this worker's part of a training set; the whole set outside of a run.

        Args:
            data: A DataLoader or a map-style Dataset; or arrays and tensors [N, ...].
        """
        settings = self.settings
        if settings is None:
            return data[0] if len(data) == 1 else data
        return part_of(data, WorkerPlace.of(settings.run, settings.worker().id_worker))

    def refresh(self) -> None:
        """Load the run's newest weights into the modules, for an evaluation or a saved file.

        Local steps that no exchange has sent are pushed first.
        """
        session = self._session
        if session is None or session.stopped or not self._is_joined:
            return
        with self._lock:
            session.part.flush()
            session.part.pull()
            session.assign()

    def close(self, cause: str = "done") -> None:
        """Leave the run; the modules keep their present weights."""
        interrupts.remove_listener(self._interrupt)
        with self._lock:
            if self._session is not None:
                self._session.close(cause)

    # -- for distributed optimizers ---------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """True after the first step, which fixes the script's optimizers and modules."""
        return self._session is not None

    @property
    def is_server_stepping(self) -> bool:
        """True after the first step if the PS takes the steps of the optimizers."""
        return self._session is not None and not self._session.takes_weights

    @property
    def place(self) -> tuple[Sequence[str], int]:
        """The servers' addresses and this worker's number."""
        return self._own.run.addresses, self._own.worker().id_worker

    def add(self, optimizer: Any, modules: list[Any]) -> None:
        """Let one more optimizer exchange with the servers.

        Raises:
            ConfigurationError: The first step is over, the PS cannot step the optimizer, or the
                optimizer has a parameter that no module has.
        """
        name = type(optimizer).__name__
        if self.has_begun:
            raise ConfigurationError(
                f"distribute() received {name} after the first step of another optimizer; expected "
                "all calls before that step, when the PS receives the descriptions of all "
                "optimizers and modules."
            )
        if not self._own.run.method.steps_on_workers:
            check_for_server(optimizer, type(optimizer))
        check_members(optimizer, modules)
        self._steps.append(SteppedOptimizer.of(optimizer, modules, self))

    def step(self, optimizer: Any, given: StepArguments) -> Any:
        """Do a step of an optimizer with the other workers; return the closure's loss, if any."""
        number = next(n for n, known in enumerate(self._steps) if known.optimizer is optimizer)
        is_valid = self._begin() or given.closure is not None
        self._raise_if_broken()
        if self.stopped or self._state.is_behind or self._exchange is None:
            self._report_end()
            return given.evaluated()
        session, phase = self._joined, self._known_phase
        loss = self._exchange.step(session, phase, number, given, is_valid)
        self._raise_if_broken()
        if session.stopped:
            self._take_final()
        if self._kept is not None and self._kept.is_due(session):
            self._kept.save(session, phase.states)
        return loss

    def load_slots(self) -> None:
        """Load the PS's state of the optimizers into the script's optimizers."""
        if self._is_joined and self.is_server_stepping and self._has_central_state:
            self._fetch_slots()

    @property
    def _has_central_state(self) -> bool:
        """True if the shards answer: they do so after the run's end until all workers have left."""
        return not self.stopped or self.stop_reason in END_REASONS

    def _fetch_slots(self) -> None:
        session = self._joined
        state, offer = self._fetch(None), session.offer
        if state is not None and offer is not None:
            optimizers, variables = self._known_phase.optimizers, session.shared.variables
            state.fill_slots(offer, optimizers, variables, slots_of)

    def _take_final(self) -> None:
        """Load the final weights of a run that has ended."""
        session = self._joined
        if self._has_central_state and session.part.run_id:
            state = self._fetch(session.statistics.size)
            if state is not None:
                session.assign(state.weights())

    def _fetch(self, num_statistics: int | None) -> CentralState | None:
        """Return the shards' state, as `CentralState.fetch` does; None if no shard answers."""
        try:
            with self._lock:
                return CentralState.fetch(self._joined.part, num_statistics)
        except (StreamLost, Unreachable, RequestRejected) as error:
            logging.warning("cannot fetch the state of the PS; the script keeps its own: %s", error)
            return None

    # -- the first step ---------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Join the run at the first step, or begin its next phase where other parameters train.

        Returns:
            True if that has not changed the weights, so that gradients are still valid.
        """
        if not self._state.begins_with_step:
            return self.stopped or not self._known_phase.is_left() or self._begin_phase()
        refuse_local_epochs(self._own.run.method, "a loop of the script's own")
        if not self._own.run.model_is_offered:
            raise ConfigurationError(
                "flags define the model of this parameter server, which trains no torch modules; "
                "expected a script that `thinwire run` starts, or a PS with --model_from=worker."
            )
        self._find_step()
        view = FlatParameters([p for step in self._steps for p in step.parameters])
        before = view.read()
        self._receive(Event.LOOP_BEGINS)
        self._receive(Event.STEP_FOUND)
        return np.array_equal(before, view.read())

    def _begin_phase(self) -> bool:
        """Begin a phase of the run with other parameters; return True if no weight has changed.

        Scripts unfreeze layers, or add a parameter group, in the middle of a loop. All scripts wait
        for each other there: one of them offers its parameters to the servers, and all join again.
        """
        view = FlatParameters([p for step in self._steps for p in step.parameters])
        before, session = view.read(), self._joined
        if self._barriers is None:
            raise RuntimeError("the script has not met the other scripts yet")
        if self._is_joined:
            with self._lock:
                session.part.flush()
        self._barriers.count_fit()
        self._receive(Event.TRAINING_BEGINS)
        if self._is_joined:
            # otherwise a worker that joins first would take the phase's first round alone
            self._wait(Wait(Point.BEGIN_JOINED))
        return np.array_equal(before, view.read())

    def _new_session(self, phase: TorchPhase) -> Session:
        """Return the session that offers a phase's parameters and optimizers to the servers."""
        method, kept = self._own.run.method, self._kept
        if not RECORD.program:
            RECORD.program = program_here(phase.texts()).rows()
        logging.info(
            "a torch loop trains %d parameters; it must divide its data among the workers, by "
            "thinwire.worker_id() and thinwire.num_workers(), or by optimizer.thinwire.shard(...)",
            len(phase.shared.variables),
        )

        def restore(session: Session, last_step: int) -> State | None:
            """Load the optimizer state that an earlier process of this worker saved."""
            return None if kept is None else kept.restore(session, phase.states, last_step)

        return Session(
            self._own,
            phase.shared,
            self._num_train,
            momentum_for(phase.steps, method),
            phase.offer(self._num_train or 0),
            () if method.steps_on_workers else phase.optimizers,
            self._session,
            0 if self._barriers is None else self._barriers.phase,
            restore,
            slots_of=slots_of,
        )

    # -- actions of the state machine -------------------------------------------------------------

    def _receive(self, event: Event) -> None:
        """Report an event of the script, and carry out all actions that follow from it."""
        try:
            action = self._state.receive(event)
            while action is not None:
                action = self._state.receive(self._carry_out(action))
        except BaseException:
            self._state.receive(Event.FAILED)
            raise

    def _carry_out(self, action: Action) -> Event:
        """Carry out an action; actions that a torch loop does not need do nothing."""
        if isinstance(action, Wait):
            return self._wait(action)
        return self._actions.get(action, lambda: None)() or Event.DONE

    def _wait(self, action: Wait) -> Event:
        """Wait at a barrier of a phase; this script's parameters differ from the run's."""
        if self.stopped or self._barriers is None:
            return Event.HALTED if self.stopped else Event.OPENED
        try:
            opening = self._barriers.wait(action.point, action.compares)
        except RunHalted as ended:
            self._end(ended)
            return Event.HALTED
        if not opening.changes:
            return Event.OPENED
        return Event.OFFERS if opening.offers else Event.FOLLOWS

    def _find_step(self) -> None:
        """Load the run's newest state, and describe the next phase with it."""
        if self._is_member:
            with self._lock:
                self._joined.part.pull()
                self._joined.assign()
            if self.is_server_stepping:
                self._fetch_slots()
        phase = TorchPhase.of(self._steps, self._own.run.method, self._phase)
        self._coming = phase, self._new_session(phase)

    def _take_session(self) -> None:
        if self._coming is None:
            raise RuntimeError("there is no session for the next phase")
        before, (phase, session) = self._session, self._coming
        if before is not None:
            before.close("done")
            if before.stopped:
                session.end_as(before)
        with self._lock:
            self._phase, self._session, self._coming = phase, session, None

    def _join(self) -> Event:
        """Join the run; a script that was restarted may be in an earlier phase than the run."""
        if self._known_phase.is_left():
            # the other scripts have begun this phase before
            self._find_step()
            self._take_session()
        session = self._joined
        with self._lock:
            is_behind = not (session.stopped or self._open(session))
            interrupts.add_listener(self._interrupt)
            if is_behind:
                session.stay_behind()
                return Event.JOINED_BEHIND
            if session.part.run_id:
                session.assign()
        return Event.HALTED if session.stopped else Event.JOINED

    def _open(self, session: Session) -> bool:
        """Join the run; return False if it is in a later phase than this script.

        Raises:
            ConfigurationError, LeftBehind: The run has trained parameters in a phase that this
                script has skipped, and does not train them any more.
        """
        phase = 0 if self._barriers is None else self._barriers.phase
        try:
            session.open()
        except RequestRejected as rejected:
            if rejected.reason != pb.REASON_PHASE:
                raise
            if rejected.phase > phase:
                self._passed_over |= {id(p): p for p in session.shared.variables}
                return False
            session.go_to_phase(rejected.phase)
            session.open()
        lost = self._passed_over.keys() - {id(p) for p in session.shared.variables}
        if lost:
            text = (
                f"this script was restarted in a later phase of its run, which does not train "
                f"{len(lost)} parameters of an earlier phase any more"
            )
            if session.own.num_restarts:
                raise LeftBehind(f"{text}; the other workers continue without this worker.")
            raise ConfigurationError(f"{text}; start a new run with --overwrite.")
        self._passed_over.clear()
        return True

    def _meet_run(self) -> Event | None:
        """Wait for the scripts of all workers, after this script has joined."""
        session = self._joined
        part, is_launched = session.part, session.settings.is_launched
        barriers = FitBarriers(session.settings.run, session.own.id_worker, part.run_id)
        self._barriers = barriers
        RECORD.endings.append(self._leave_at_end)
        RECORD.refreshers.append(self.refresh)
        if is_launched:
            try:
                barriers.begin_run(is_launched)
            except RunHalted as ended:
                self._end(ended)
        return Event.HALTED if self.stopped else None

    def _end(self, ended: RunHalted) -> None:
        """Record the end of the run; raise RunOver if another worker's script failed."""
        core = self._joined.part.core
        core.stopped, core.stop_reason = True, ended.cause
        self._raise_if_broken(ended.message)

    def _leave_at_end(self, failed: bool, message: str) -> None:
        """Leave the run at the script's end; first push local steps if the script succeeded."""
        session = self._session
        if session is not None and not failed and not session.stopped:
            with self._lock:
                session.part.flush()
            if self._kept is not None:
                self._kept.save(session, self._known_phase.states, at_end=True)
        self.close("error" if failed else "done")

    # -- small parts ------------------------------------------------------------------------------

    @property
    def _own(self) -> ScriptSettings:
        if self.settings is None:
            raise RuntimeError("the script trains in this process alone, without a run of Thinwire")
        return self.settings

    @property
    def _joined(self) -> Session:
        if self._session is None:
            raise RuntimeError("the script has not joined a run of Thinwire yet")
        return self._session

    @property
    def _known_phase(self) -> TorchPhase:
        if self._phase is None:
            raise RuntimeError("the script has not joined a run of Thinwire yet")
        return self._phase

    @property
    def _is_joined(self) -> bool:
        return self._state.standing is Standing.JOINED

    @property
    def _is_member(self) -> bool:
        session = self._session
        return session is not None and session.part.is_member and not session.stopped

    def _interrupt(self) -> None:
        """End a wait of the session, because a signal interrupts this process."""
        if self._session is not None:
            self._session.part.interrupt()

    def _raise_if_broken(self, message: str = "") -> None:
        """Raise RunOver if the failure of another worker's script ended the run."""
        if self.stop_reason in (SCRIPT_FAILED, RETURNED_EARLY):
            raise RunOver(str(RunHalted(self.stop_reason, message)), self.stop_reason)

    def _report_end(self) -> None:
        """Log once that the run has ended, so that later steps of the loop have no effect."""
        if self.stopped and not self._has_reported_end:
            self._has_reported_end = True
            logging.warning(
                "the run has ended (%s): further steps change nothing; a training loop can check "
                "optimizer.thinwire.stopped",
                self.stop_reason or "interrupted",
            )
