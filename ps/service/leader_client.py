"""Shards 1.. dial shard 0: run id, membership epochs, the end of the run, their last figures."""

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
#: Stop reasons after which every shard applies as many updates as shard 0 did.
_SPENT = ("iter_max", "epochs")
_LOOK_SECONDS = 0.05
#: Name of the initial weights in the document of shard 0's Welcome, where a worker offered them.
WEIGHTS_DIGEST = "weights_digest"
#: And of the phase of the script that they begin.
PHASE = "phase"


@dataclasses.dataclass(frozen=True)
class LeaderModel:
    """What a following shard without model knows of that of shard 0."""

    run_id: str
    weights_digest: str


def find_model(run: Run, mine: Identity, closing: threading.Event) -> LeaderModel:
    """Wait until shard 0 has the model that a worker has offered, and return what it is.

    Args:
        run: The run's settings.
        mine: This shard's identity, without a model; its phase is that of the model.
        closing: Set when nobody wants to know any more.

    Raises:
        Unreachable: Shard 0 did not answer in time.
        RequestRejected: It did not want this shard.
        ConfigurationError: It has its model from its flags.
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
        found = json.loads(welcome.document)
        if found.get(PHASE, 0) >= mine.phase or closing.wait(_LOOK_SECONDS):
            break
    digest = found.get(WEIGHTS_DIGEST)
    if digest is None:
        raise ConfigurationError(
            f"shard 0 at {address} has its model from its flags; give all shards the same "
            "--model_from."
        )
    return LeaderModel(welcome.run_id, str(digest))


class LeaderClient:
    """A following shard's view of shard 0."""

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
        """Prepare to follow.

        Args:
            address: Of shard 0.
            hello: This shard's introduction.
            layout: Of this shard.
            put: Queues an event for the core.
            report: Makes this shard's metrics document.
            credentials: Of this shard.
            is_wanted: Whether there are workers that talk to this shard.
        """
        self._is_wanted = is_wanted
        self._hello, self._put, self._report = hello, put, report
        self._session: ClientSession | None = None
        self._closing, self._hurry = threading.Event(), threading.Event()
        self._has_reported_end, self._lease_seconds = False, 0.0
        self._comes_again = False  # of its own will
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
        """Reach shard 0 within the time.

        Raises:
            Unreachable: It did not answer.
            Refused: It did not want this shard.
        """
        session, welcome = self._dialler.dial(timeout_seconds)
        self._session = session
        self._hello.run_id, self._lease_seconds = welcome.run_id, welcome.lease_seconds
        if self._requested_end is not None:
            self.request_end(self._requested_end)  # an earlier stream may have been lost
        return welcome

    def follow(self, reconnect_seconds: float) -> None:
        """Start to listen and report, in threads; reconnect when shard 0 comes back."""
        threading.Thread(
            target=self._listen, args=(reconnect_seconds,), name="leader", daemon=True
        ).start()
        threading.Thread(target=self._report_regularly, name="leader-report", daemon=True).start()

    def begin_phase(self, hello: pb.Hello) -> None:
        """Join again with another model, as a shard that was started again does.

        Args:
            hello: This shard's introduction from now on.
        """
        hello.run_id = self._hello.run_id
        self._hello.CopyFrom(hello)
        session, self._comes_again = self._session, True
        if session is not None:
            session.close()

    def request_end(self, cause: str) -> None:
        """Request shard 0 to end the run (any thread); again whenever it is found anew."""
        self._requested_end = cause
        session = self._session
        if session is not None:
            session.send_control(pb.ToServer(halt=pb.Halt(cause=cause)))

    def report_unreachable(self, silent: events.WorkersUnreachable) -> None:
        """Notify shard 0 of workers that are silent here."""
        session = self._session
        if session is not None:
            members = [
                pb.Member(worker=each.worker, incarnation=each.incarnation)
                for each in silent.members
            ]
            session.send_control(pb.ToServer(heartbeat=pb.Heartbeat(unreachable=members)))

    def close(self) -> None:
        """Leave with a last report."""
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
                    logging.warning("lost shard 0: %s", error)
                self._comes_again = False
                if not self._return(reconnect_seconds):
                    return

    def _return(self, reconnect_seconds: float) -> bool:
        """Find shard 0 again; as long as workers come here, it is the network that is cut.

        Returns:
            Whether it was found; else the run is over for this shard.
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
        """End this shard too; a spent budget first lets updates on their way arrive here.

        They have arrived when all workers have gone, for these wait for every shard's answer. A
        worker that is dead, or cannot reach us, is waited for no longer than its lease.
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
        """Report immediately; only `close` reports once more."""
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


#: After the end of the run. A constant: it is people who wait, and what is missed is a second's
#: figures of a shard whose network is cut.
_PATIENCE_SECONDS = 2.0


def figures_are_final(server: ShardServer) -> bool:
    """Return whether this (following) shard's figures will not change any more."""
    return server.core.stop_reason is not None and not server.connections.workers


def figures_are_awaited(server: ShardServer) -> bool:
    """Return whether connected shards have more figures to send (shard 0)."""
    ended_at = server.core.ended_at
    if ended_at is None or time.monotonic() - ended_at >= _PATIENCE_SECONDS:
        return False
    return any(
        not (shard.left or shard.stream.lost or is_last(_report_of(server, shard.id)))
        for shard in server.connections.with_role(pb.ROLE_SHARD)
    )


def _report_of(server: ShardServer, shard: int) -> str:
    return server.reports.get((pb.ROLE_SHARD, shard), "{}")
