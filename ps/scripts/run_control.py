"""The control streams of workers' scripts, of the run's evaluator, and of Supervisors.

`RunControl` passes the messages of control streams to `Barriers`, `EpochMeetings` and
`Evaluations`, and performs the outcomes that these objects return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.scripts.barriers import Barriers
from thinwire.ps.scripts.epoch_meetings import EpochMeetings
from thinwire.ps.scripts.evaluations import Evaluations
from thinwire.ps.scripts.evaluators import Evaluators
from thinwire.ps.scripts.notices import (
    EVALUATOR,
    SUPERVISORS,
    Notice,
    Outcome,
    ScriptsEnd,
    notice,
)
from thinwire.ps.service.connections import Connection
from thinwire.ps.service.state import ShardState


class RunControl:
    """Server side of the control streams of a run's scripts (writer thread, except where noted).

    Attributes:
        barriers: State of the barriers between the workers' scripts; any thread may read it.

    Args:
        shard: State of the shard.
        lease_seconds: Time after which a disconnected script or Supervisor counts as lost, in
            seconds.
        publish_status: Function that sends the run's status to supervisors. It is called before the
            result of an evaluation is sent, so that a Supervisor has the status at that time.
        clock: Function that returns monotonic time in seconds, the clock of this shard.
    """

    def __init__(
        self,
        shard: ShardState,
        lease_seconds: float,
        publish_status: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard, self._publish_status, self._clock = shard, publish_status, clock
        self._stalled_seconds = 0.0
        self._evaluators = Evaluators(lease_seconds)
        config = shard.core.config
        self.barriers = Barriers(
            *(config.nb_workers, self._evaluators),
            *(lease_seconds, config.start_timeout_seconds),
        )
        self._evaluations = Evaluations(self._evaluators, self.barriers.present)
        self._meetings = EpochMeetings(
            *(self.barriers.present, lambda: self._shard.core.rounds.waiting()),
            stop_fit=self.barriers.stop_fit,
        )
        # worker id -> stream of the worker's script; EVALUATOR -> stream of the run's evaluator
        self._streams: dict[int, Connection] = {}

    def is_running(self, worker: int) -> bool:
        """Return True if a worker's script has connected and is still running; any thread may call
        this.
        """
        return self.barriers.is_running(worker, self.now())

    def why(self, reason: str) -> str:
        """Return an explanation if scripts ended the run for the given reason; else ""."""
        ended = self.barriers.ended
        return ended.message if ended is not None and ended.cause == reason else ""

    def begin(self, connection: Connection) -> None:
        """Register the stream of a worker's script or of the evaluator. The shard closes an older
        stream of a client that registers a new stream.
        """
        client, incarnation, now = _client_of(connection), connection.incarnation, self.now()
        old = self._streams.get(client)
        self._streams[client] = connection
        if old is not None:
            old.stream.close()
        if client == EVALUATOR:
            self._evaluators.connect()
            self._perform([*self.barriers.tick(now), *self._evaluations.begin_evaluator(now)])
        else:
            self._perform(self.barriers.begin(client, incarnation, now))
            self._perform(self._evaluations.begin(client, incarnation, now))
            self._perform(self._meetings.begin(client, incarnation, now))

    def lost(self, connection: Connection) -> None:
        """Record that the stream of a worker's script or of the evaluator has ended."""
        if not self._is_current(connection):
            return
        del self._streams[client := _client_of(connection)]
        if client == EVALUATOR:
            self._evaluators.is_connected = False
            self._perform(self._evaluations.end_evaluator(self.now()))
        else:
            self.barriers.lost(client, connection.incarnation, self.now())

    def receive(self, connection: Connection, message: Any) -> None:
        """Record a checked message of a worker's script or of the evaluator."""
        if self._is_current(connection):
            self._perform(self._outcomes_of(_client_of(connection), message, self.now()))

    def _outcomes_of(self, client: int, message: Any, now: float) -> Sequence[Outcome]:
        barriers, meetings, evaluations = self.barriers, self._meetings, self._evaluations
        match message:
            case pb.Heartbeat():
                return barriers.alive(client, now)
            case pb.Barrier():
                outcomes = barriers.arrive(client, message, now)
                outcomes += evaluations.arrive(client, message.name, now)
                for name in (*message.passed, message.name):
                    outcomes += meetings.arrive(client, name, now)
                return outcomes
            case pb.FitBegun():
                return evaluations.begin_fit(client, message, now)
            case pb.FitEnded():
                return evaluations.end_fit(message)
            case pb.StopFit():
                fit, epochs = message.fit, message.epochs
                logging.info("the script of worker %d ends call %d of fit early", client, fit)
                meetings.end_fit(fit, epochs)
                return barriers.stop_fit(client, fit, epochs, now)
            case pb.EpochMeeting():
                return meetings.meet(client, message, now)
            case pb.EpochEnded():
                place = message.fit, message.epoch
                return evaluations.request(client, *place, now, message.by_script)
            case pb.Evaluated():
                return self._evaluated(client, message, now)
            case pb.Finished():
                return [
                    notice(client, finished=pb.Finished()),
                    *barriers.finish(client, message.failed, message.message, now),
                    *evaluations.arrive(client, "", now),
                    *meetings.arrive(client, "", now),
                ]
        raise TypeError(f"no script sends a {type(message).__name__} message")

    def _evaluated(self, client: int, evaluated: pb.Evaluated, now: float) -> Sequence[Outcome]:
        evaluations = self._evaluations
        if client == EVALUATOR:
            return evaluations.answer(evaluated, now)
        if evaluated.by_script and evaluated.answers:
            return evaluations.answer_of_script(client, evaluated, now)
        if evaluated.answers:
            return evaluations.know(client, evaluated, now)
        # an evaluation that the worker's script made without a request of the shard
        versions = [self._shard.core.version]
        made = pb.Evaluated(versions=versions, metrics=evaluated.metrics)
        return evaluations.answer(made, now)

    # -- Supervisors --------------------------------------------------------------------------

    def offer_evaluator(self, connection: Connection, offer: pb.Evaluator, why: str) -> None:
        """Record whether a Supervisor starts an evaluator process when scripts need one.

        Args:
            connection: Network connection of the Supervisor.
            offer: The Supervisor's message.
            why: Reason why the Supervisor starts no evaluator; empty if it starts one.
        """
        now = self.now()
        if offer.available:
            self._evaluators.offer(connection, offer.starting)
            for message in self._evaluations.known_to_supervisors():
                connection.send(message)
        else:
            self._evaluators.withdraw(connection, why, now)
        self._perform([*self.barriers.tick(now), *self._evaluations.settle(now)])

    def lose_supervisor(self, connection: Connection) -> None:
        """Record that the control stream of a Supervisor has ended."""
        self._evaluators.lose(connection, self.now())
        self._perform(self._evaluations.settle(self.now()))

    # -- deadlines ----------------------------------------------------------------------------

    def excuse(self, seconds: float) -> None:
        """Extend the scripts' deadlines by `seconds`, for which the shard's process was stalled."""
        self._stalled_seconds += seconds

    def now(self) -> float:
        """Return the present time without the time for which the shard's process was stalled."""
        return self._clock() - self._stalled_seconds

    def tick(self) -> None:
        """Send the scripts the messages that result from deadlines that have passed."""
        now, version = self.now(), self._shard.core.version
        self._perform(self.barriers.tick(now))
        self._perform(self._evaluations.tick(now, version))
        self._perform(self._meetings.tick(now, version))

    # -- internal methods ---------------------------------------------------------------------

    def _is_current(self, connection: Connection) -> bool:
        return self._streams.get(_client_of(connection)) is connection

    def _perform(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Notice():
                    self._send(outcome)
                case ScriptsEnd(cause, message):
                    if message:
                        logging.info("the run ends (cause %s): %s", cause, message)
                    self._shard.queue.put(events.Stop(cause))

    def _send(self, outcome: Notice) -> None:
        """Send a notice to its receivers that are connected."""
        receiver = self._streams.get(outcome.to)
        receivers = [] if receiver is None else [receiver]
        if outcome.to == SUPERVISORS:
            if outcome.message.WhichOneof("body") == "evaluated":
                self._publish_status()
            receivers = list(self._evaluators.supervisors)
        for connection in receivers:
            connection.send(outcome.message)


def _client_of(connection: Connection) -> int:
    """Return the id of a script's worker, or `EVALUATOR`."""
    return EVALUATOR if connection.role == pb.ROLE_EVALUATOR else connection.id
