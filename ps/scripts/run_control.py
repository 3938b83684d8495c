"""The control streams of workers' scripts, of the run's evaluator, and of Supervisors.

`RunControl` passes the messages of control streams to `Barriers`, `EpochMeetings` and
`Evaluations`, and sends the answers of these objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.scripts.barriers import (
    BarrierArrival,
    BarrierOpening,
    Barriers,
    ChiefNamed,
    FitStop,
    Outcome,
    ScriptsEnd,
)
from thinwire.ps.scripts.epoch_meetings import (
    EpochMeetings,
    FitEndsEarly,
    MeetingAnswer,
    MeetingOutcome,
)
from thinwire.ps.scripts.evaluations import (
    Evaluations,
    ForEvaluator,
    ForScript,
    ForSupervisors,
    Notice,
)
from thinwire.ps.service.connections import Connection


class RunControl:
    """Server side of the control streams of a run's scripts (writer thread, except where noted).

    Args:
        barriers: State of the barriers between the workers' scripts.
        lease_seconds: Time after which a disconnected Supervisor counts as lost, in seconds.
        put: Function that queues an event for the shard's state machine.
        version: Function that returns the number of updates that the shard has applied so far.
        held: Function that returns the ids of the workers that wait in a round for other workers'
            pushes.
        publish_status: Function that sends the run's status to supervisors. It is called before the
            request for an evaluation is sent, so that a supervisor has the status at the time of
            the request.
        clock: Function that returns monotonic time in seconds, the clock of this shard.
    """

    def __init__(
        self,
        barriers: Barriers,
        lease_seconds: float,
        put: Callable[[events.Event], None],
        version: Callable[[], int] = int,
        held: Callable[[], Collection[int]] = frozenset,
        publish_status: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._barriers, self._put, self._clock = barriers, put, clock
        self._evaluations = Evaluations(lease_seconds, barriers.present)
        self._meetings = EpochMeetings(barriers.present, held)
        self._version, self._publish_status = version, publish_status
        self._streams: dict[int, Connection] = {}  # worker id -> stream of the worker's script
        # id(connection) -> connection, for each Supervisor that starts evaluators
        self._supervisors: dict[int, Connection] = {}
        self._evaluator: Connection | None = None

    def is_worker(self, worker: int) -> bool:
        """Return True if the run has a worker with this id; any thread may call this."""
        return self._barriers.is_worker(worker)

    def has_begun(self, phase: int) -> bool:
        """Return True if all scripts have agreed to begin phase (model) number `phase` or a later
        phase; any thread may call this.
        """
        return self._barriers.phase >= phase

    def is_running(self, worker: int) -> bool:
        """Return True if a worker's script has connected and is still running; any thread may call
        this.
        """
        return self._barriers.is_running(worker, self._clock())

    @staticmethod
    def range_refusal(worker: int) -> str:
        """Return an error text for a script whose worker id the run does not have; any thread may
        call this.
        """
        return f"id: there is no worker {worker}; give all nodes the same --nb_workers."

    def why(self, reason: str) -> str:
        """Return an explanation if scripts ended the run for the given reason; else ""."""
        ended = self._barriers.ended
        return ended.message if ended is not None and ended.cause == reason else ""

    def begin(self, connection: Connection) -> None:
        """Register the stream of a worker's script. The shard closes an older stream of a script
        that registers a new stream.
        """
        old = self._streams.get(connection.id)
        self._streams[connection.id] = connection
        if old is not None:
            old.stream.close()
        now, worker, incarnation = self._clock(), connection.id, connection.incarnation
        self._perform(self._barriers.begin(worker, incarnation, now))
        self._notify(self._evaluations.begin(worker, incarnation, now))
        self._conclude(self._meetings.begin(worker, incarnation, now))

    def arrive(self, connection: Connection, arrival: BarrierArrival) -> None:
        """Record that a worker's script has reached a barrier of all scripts."""
        if self._is_current(connection):
            now, worker = self._clock(), connection.id
            self._perform(self._barriers.arrive(worker, arrival, now))
            self._notify(self._evaluations.arrive(worker, arrival.name, now))
            for name in (*arrival.passed, arrival.name):
                self._conclude(self._meetings.arrive(worker, name, now))

    def receive(
        self,
        connection: Connection,
        message: pb.FitBegun | pb.FitEnded | pb.EpochEnded | pb.Evaluated,
    ) -> None:
        """Record a script's report about its call of fit, or an evaluation that it has made."""
        if not self._is_current(connection):
            return
        evaluations, worker, now = self._evaluations, connection.id, self._clock()
        match message:
            case pb.FitBegun():
                self._notify(evaluations.begin_fit(worker, message, now))
            case pb.FitEnded():
                self._notify(evaluations.end_fit(message))
            case pb.EpochEnded():
                place = message.fit, message.epoch
                self._notify(evaluations.request(worker, *place, now, message.by_script))
            case pb.Evaluated() if message.by_script and message.answers:
                self._notify(evaluations.answer_of_script(worker, message, now))
            case pb.Evaluated() if message.answers:
                self._notify(evaluations.know(worker, message, now))
            # an evaluation that the worker's script made without a request of the shard
            case pb.Evaluated():
                evaluated = pb.Evaluated(versions=[self._version()], metrics=message.metrics)
                self._notify(evaluations.answer(evaluated, now))

    def stop_fit(self, connection: Connection, fit: int, epochs: int) -> None:
        """Record that a script ends the current call of fit early for all scripts."""
        if self._is_current(connection):
            logging.info("the script of worker %d ends call %d of fit early", connection.id, fit)
            self._meetings.end_fit(fit, epochs)
            self._perform(self._barriers.stop_fit(connection.id, fit, epochs, self._clock()))

    def meet(self, connection: Connection, meeting: pb.EpochMeeting) -> None:
        """Record that a script has reached a meeting of all scripts at the end of an epoch."""
        if self._is_current(connection):
            self._conclude(self._meetings.meet(connection.id, meeting, self._clock()))

    def finish(self, connection: Connection, failed: bool, message: str) -> None:
        """Record that a script has ended, and send that script a confirmation."""
        if not self._is_current(connection):
            return
        outcomes = self._barriers.finish(connection.id, failed, message, self._clock())
        connection.send(pb.ToClient(finished=pb.Finished()))
        self._perform(outcomes)
        self._notify(self._evaluations.arrive(connection.id, "", self._clock()))
        self._conclude(self._meetings.arrive(connection.id, "", self._clock()))

    def alive(self, connection: Connection) -> None:
        """Record the time of a heartbeat message of a worker's script."""
        if self._is_current(connection):
            self._perform(self._barriers.alive(connection.id, self._clock()))

    def lost(self, connection: Connection) -> None:
        """Record that the control stream of a worker's script has ended."""
        if self._is_current(connection):
            del self._streams[connection.id]
            self._barriers.lost(connection.id, connection.incarnation, self._clock())

    # -- evaluators and their Supervisors -----------------------------------------------------

    def offer_evaluator(
        self, connection: Connection, is_available: bool, why: str, is_starting: bool = False
    ) -> None:
        """Record whether a Supervisor starts an evaluator process when scripts need one.

        Args:
            connection: Network connection of the Supervisor.
            is_available: True if the Supervisor can start an evaluator.
            why: Reason why the Supervisor starts no evaluator; empty if it starts one.
            is_starting: True if the evaluator's process already runs but has not connected yet.
        """
        number, now = id(connection), self._clock()
        self._barriers.first_evaluator.report(is_available and is_starting)
        self._perform(self._barriers.tick(now))
        if not is_available:
            self._supervisors.pop(number, None)
            self._notify(self._evaluations.withdraw(number, why, now))
            return
        self._supervisors[number] = connection
        for message in self._evaluations.offer(number, now):
            connection.send(message)

    def lose_supervisor(self, connection: Connection) -> None:
        """Record that the control stream of a Supervisor has ended."""
        if self._supervisors.pop(id(connection), None) is not None:
            self._barriers.first_evaluator.lose_supervisor(self._clock())
            self._notify(self._evaluations.withdraw(id(connection), "", self._clock()))

    def begin_evaluator(self, connection: Connection) -> None:
        """Register the stream of the run's evaluator process. The shard closes the stream of an
        older evaluator.
        """
        old, self._evaluator = self._evaluator, connection
        if old is not None:
            old.stream.close()
        self._barriers.first_evaluator.arrive()
        self._perform(self._barriers.tick(self._clock()))
        self._notify(self._evaluations.begin_evaluator(self._clock()))

    def take_evaluation(self, connection: Connection, evaluated: pb.Evaluated) -> None:
        """Record an evaluation's result that the evaluator has sent."""
        if self._evaluator is connection:
            self._notify(self._evaluations.answer(evaluated, self._clock()))

    def lose_evaluator(self, connection: Connection) -> None:
        """Record that the control stream of the run's evaluator has ended."""
        if self._evaluator is connection:
            self._evaluator = None
            self._notify(self._evaluations.end_evaluator(self._clock()))

    # -- deadlines ----------------------------------------------------------------------------

    def excuse(self, seconds: float) -> None:
        """Extend the scripts' deadlines by `seconds`, for which the shard's process was stalled."""
        self._barriers.excuse(seconds)
        self._evaluations.excuse(seconds)
        self._meetings.excuse(seconds)

    def tick(self) -> None:
        """Send the scripts the messages that result from deadlines that have passed."""
        now = self._clock()
        self._perform(self._barriers.tick(now))
        self._notify(self._evaluations.tick(now, self._version()))
        self._conclude(self._meetings.tick(now, self._version()))

    def next_deadline(self) -> float | None:
        """Return the time of the scripts' next deadline, at which `tick` must be called; None if
        none is set.
        """
        now = self._clock()
        parts = (self._barriers, self._evaluations, self._meetings)
        moments = [part.next_deadline(now) for part in parts]
        return min((when for when in moments if when is not None), default=None)

    def _is_current(self, connection: Connection) -> bool:
        return self._streams.get(connection.id) is connection

    def _notify(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            match notice:
                case ForScript():
                    script = self._streams.get(notice.worker)
                    receivers = [] if script is None else [script]
                case ForEvaluator():
                    receivers = [] if self._evaluator is None else [self._evaluator]
                case ForSupervisors():
                    if notice.message.WhichOneof("body") == "evaluated":
                        self._publish_status()
                    receivers = list(self._supervisors.values())
            for receiver in receivers:
                receiver.send(notice.message)

    def _conclude(self, outcomes: Sequence[MeetingOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case MeetingAnswer():
                    self._send(outcome.worker, epoch_meeting=outcome.meeting)
                case FitEndsEarly():
                    logging.info(
                        "the script of worker %d ends its call %d of fit after %d epochs",
                        *(outcome.worker, outcome.fit, outcome.epochs),
                    )
                    stop = self._barriers.stop_fit
                    worker, fit, epochs = outcome.worker, outcome.fit, outcome.epochs
                    self._perform(stop(worker, fit, epochs, self._clock()))

    def _perform(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case BarrierOpening():
                    opening = pb.Barrier(
                        name=outcome.name, changes=outcome.changes, offers=outcome.offers
                    )
                    self._send(outcome.worker, barrier=opening)
                case FitStop():
                    stop = pb.StopFit(fit=outcome.fit, epochs=outcome.epochs)
                    self._send(outcome.worker, stop_fit=stop)
                case ChiefNamed():
                    self._send(outcome.worker, chief=pb.Chief(worker=outcome.chief))
                case ScriptsEnd():
                    if outcome.message:
                        logging.info("the run ends (cause %s): %s", outcome.cause, outcome.message)
                    self._put(events.Stop(outcome.cause))

    def _send(self, worker: int, **body: Any) -> None:
        """Send a message to a worker's script; do nothing if the script is not connected."""
        stream = self._streams.get(worker)
        if stream is not None:
            stream.send(pb.ToClient(**body))
