"""Connection of a following shard (id 1 and up) to shard 0, which leads the run.

A shard with id 1 or higher receives the run id, the membership epochs and the end of the run from
shard 0. A shard with id 1 or higher regularly sends its counters to shard 0.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.types import ConfigurationError, ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import (
    ClientSession,
    Dialler,
    RequestRejected,
    payload_limit,
    rhythm,
)
from thinwire.ps.core import events
from thinwire.ps.service.handshake import Identity, hello_to_leader
from thinwire.ps.wire.epochs import decode_epoch
from thinwire.ps.wire.reports import is_last
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.settings import Run

if TYPE_CHECKING:
    from thinwire.ps.service.server import ShardServer

_REPORT_SECONDS = 1.0
#: Stop reasons after which every shard must apply exactly as many updates as shard 0 applied.
_SPENT = ("iter_max", "epochs")
_LOOK_SECONDS = 0.05
#: Key of the digest of the initial weights in the document of shard 0's Welcome message. The key is
#: missing if shard 0 got its weights without a worker's offer.
WEIGHTS_DIGEST = "weights_digest"
#: Key of the phase (number of the script's model) in the document of shard 0's Welcome message.
PHASE = "phase"


@dataclasses.dataclass(frozen=True)
class LeaderModel:
    """Identity of shard 0's model, which shard 0 sends to another shard that has no model."""

    run_id: str
    weights_digest: str


def find_model(run: Run, mine: Identity, closing: threading.Event) -> LeaderModel:
    """Wait until shard 0 has a model that a worker has offered; return that model's identity.

    Args:
        run: Settings of the training run.
        mine: Identity (settings) of this shard, which has no model yet, with the phase number of
            the model that it waits for.
        closing: Event that ends the wait for shard 0's model when the event is set.

    Raises:
        Unreachable: Shard 0 did not answer within the time limit.
        RequestRejected: Shard 0 rejected the Hello of this shard.
        ConfigurationError: Shard 0 has got its model from its flags, not from a worker.
    """
    address, hello = run.addresses[0], hello_to_leader(mine)
    dialler = Dialler(
        f"shard 0 at {address}",
        lambda: ClientSession(address, hello, 0, credentials=run.credentials),
        closing,
        (pb.REASON_STARTING,),
    )
    while True:
        session, welcome = dialler.dial(run.reconnect_timeout_seconds)
        session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
        session.close()
        document = json.loads(welcome.document)
        if document.get(PHASE, 0) >= mine.phase or closing.wait(_LOOK_SECONDS):
            break
    digest = document.get(WEIGHTS_DIGEST)
    if digest is None:
        raise ConfigurationError(
            f"shard 0 at {address} has its model from its flags, but this shard expects a "
            "worker's model; give all shards the same --model_from."
        )
    return LeaderModel(welcome.run_id, str(digest))


class LeaderClient:
    """Connection of a following shard (id 1 and up) to shard 0, with automatic reconnection.

    Attributes:
        halted: Cause of the run's end as shard 0 reported it; None while the run continues.
        lost_for_good: True if this shard has given up reconnecting to shard 0.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        layout: ShardLayout,
        put: Callable[[events.Event], None],
        report: Callable[[], str],
        credentials: Credentials = NO_CREDENTIALS,
        is_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the connection to shard 0 without opening it.

        Args:
            address: ``host:port`` of shard 0.
            hello: Hello message of this shard for shard 0.
            layout: Layout of this shard: the slices of variables that it holds.
            put: Function that queues an event for the state machine of this shard.
            report: Function that returns this shard's counters as JSON text.
            credentials: Certificates and token with which this shard authenticates to shard 0.
            is_wanted: Function that returns True while workers are connected to this shard.
        """
        self._is_wanted = is_wanted
        self._hello, self._put, self._report = hello, put, report
        self._session: ClientSession | None = None
        self._closing, self._hurry = threading.Event(), threading.Event()
        self._has_reported_end, self._lease_seconds = False, 0.0
        # True after `reconnect` has closed the stream to shard 0 in order to reconnect.
        self._comes_again = False
        limit, arrivals = payload_limit(layout), rhythm()
        self._dialler = Dialler(
            f"shard 0 at {address}",
            lambda: ClientSession(
                address, hello, limit, credentials=credentials, arrivals=arrivals
            ),
            self._closing,
            (pb.REASON_STARTING,),
        )
        self.halted: str | None = None
        self._requested_end: str | None = None
        self.lost_for_good = False

    def connect(self, timeout_seconds: float) -> pb.Welcome:
        """Connect to shard 0 within a time limit; return its Welcome message.

        Raises:
            Unreachable: Shard 0 did not answer within the time limit.
            RequestRejected: Shard 0 rejected the Hello of this shard.
        """
        session, welcome = self._dialler.dial(timeout_seconds)
        self._session = session
        self._hello.run_id, self._lease_seconds = welcome.run_id, welcome.lease_seconds
        if self._requested_end is not None:
            # the earlier stream to shard 0 may have lost the request to end the run
            self.request_end(self._requested_end)
        return welcome

    def follow(self, reconnect_seconds: float) -> None:
        """Start the threads that receive shard 0's messages, report to shard 0, and reconnect to
        it.
        """
        threading.Thread(
            target=self._listen, args=(reconnect_seconds,), name="leader", daemon=True
        ).start()
        threading.Thread(target=self._report_regularly, name="leader-report", daemon=True).start()

    def reconnect(self, hello: pb.Hello) -> None:
        """Reconnect to shard 0 with the script's next model, as if this shard had restarted with
        the model.

        Args:
            hello: Hello message of this shard for the next model.
        """
        hello.run_id = self._hello.run_id
        self._hello.CopyFrom(hello)
        session, self._comes_again = self._session, True
        if session is not None:
            session.close()

    def request_end(self, cause: str) -> None:
        """Request shard 0 to end the run; any thread may call this.

        The shard repeats its request to end the run after a reconnection to shard 0.
        """
        self._requested_end = cause
        session = self._session
        if session is not None:
            session.send_control(pb.ToServer(halt=pb.Halt(cause=cause)))

    def report_unreachable(self, silent: events.WorkersUnreachable) -> None:
        """Report to shard 0 the workers from which this shard receives no messages."""
        session = self._session
        if session is not None:
            members = [
                pb.Member(worker=member.worker, incarnation=member.incarnation)
                for member in silent.members
            ]
            session.send_control(pb.ToServer(heartbeat=pb.Heartbeat(unreachable=members)))

    def close(self) -> None:
        """Send the last counters and a Leave message to shard 0, and close the connection."""
        self._closing.set()
        self._hurry.set()
        session = self._session
        if session is not None:
            session.send_control(pb.ToServer(report=pb.Report(document=self._report())))
            session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
            session.close()

    def _listen(self, reconnect_seconds: float) -> None:
        while not self._closing.is_set():
            try:
                self._receive()
            except (StreamLost, Malformed) as error:
                if self._closing.is_set() or self.halted:
                    return
                if not self._comes_again:
                    logging.warning("this PS shard lost its connection to shard 0: %s", error)
                self._comes_again = False
                if not self._return(reconnect_seconds):
                    return

    def _return(self, reconnect_seconds: float) -> bool:
        """Reconnect to shard 0; retry while workers are connected to this shard.

        If workers are connected to this shard, the run continues, and only the network path to
        shard 0 has failed.

        Returns:
            True if shard 0 was reached; False if the run is over for this shard.
        """
        while not self._closing.is_set():
            try:
                self.connect(reconnect_seconds)
                return True
            except Unreachable as failure:
                logging.error("%s", failure)
                if self._is_wanted():
                    continue
            except RequestRejected as failure:
                logging.error("%s", failure)
            self.lost_for_good = True
            self._put(events.Stop("interrupted"))
            return False
        return False

    def _receive(self) -> None:
        while self._session is not None:
            message, _ = self._session.listen()
            body = message.WhichOneof("body")
            if body == "membership":
                self._put(decode_epoch(message.membership))
            elif body == "halt":
                self.halted = message.halt.cause
                self._end_in_time(events.Stop(message.halt.cause))

    def _end_in_time(self, stop: events.Stop) -> None:
        """End this shard.

        If the run has reached its limit of updates or epochs, the shard first receives the pushes
        in flight.

        When all workers have left the run, all their pushes have arrived, because a worker waits
        for the reply of every shard. At the end of the run, a shard waits at most one lease for the
        workers to leave, since a worker may be dead or unable to reach this shard.
        """
        if stop.reason not in _SPENT:
            self._put(stop)
            return
        drain = threading.Thread(target=self._drain, args=(stop,), name="drain", daemon=True)
        drain.start()

    def _drain(self, stop: events.Stop) -> None:
        deadline = time.monotonic() + self._lease_seconds
        while self._is_wanted() and time.monotonic() < deadline:
            if self._closing.wait(_LOOK_SECONDS):
                break
        self._put(stop)

    def report_end(self) -> None:
        """Make the report thread send this shard's counters to shard 0 immediately, once in a run.

        The method `close` sends the last report of this shard's counters to shard 0.
        """
        if not self._has_reported_end:
            self._has_reported_end = True
            self._hurry.set()

    def _report_regularly(self) -> None:
        while not self._closing.is_set():
            self._hurry.wait(_REPORT_SECONDS)
            self._hurry.clear()
            session = self._session
            if session is not None:
                session.send_control(pb.ToServer(report=pb.Report(document=self._report())))


#: Seconds for which shard 0 waits for the last reports of the following shards after the end of the
#: run. The wait is short because users wait for the end. If a shard reports too late, its counters
#: of about the last second are lost.
_PATIENCE_SECONDS = 2.0


def figures_are_final(server: ShardServer) -> bool:
    """Return True if the counters of this shard cannot change any more until its process ends."""
    return server.core.stop_reason is not None and not server.connections.workers


def figures_are_awaited(server: ShardServer) -> bool:
    """Return True if shard 0 should still wait for the last counters of connected shards."""
    ended_at = server.core.ended_at
    if ended_at is None or time.monotonic() - ended_at >= _PATIENCE_SECONDS:
        return False
    return any(
        not (shard.left or shard.stream.lost or is_last(_report_of(server, shard.id)))
        for shard in server.connections.with_role(pb.ROLE_SHARD)
    )


def _report_of(server: ShardServer, shard: int) -> str:
    return server.reports.get((pb.ROLE_SHARD, shard), "{}")
