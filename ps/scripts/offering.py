"""Port of a PS shard that has no model yet and accepts the model that a worker offers (sends).

One worker at a time may offer its model: the worker sends a document that describes the model, and
the initial weights as payload. The shard holds the streams of the other workers for a few seconds
and then requests these workers to retry. The shard checks the document that describes an offered
model before it allocates memory for the weights. The shard's main thread gets a worker's offer from
`OfferStage.next_offer` and builds the model.

Source: design, section 10, "The PS runs no user code".
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.offer import Offer
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.proto.grpc import GrpcServer, ServerStream
from thinwire.proto.grpc.session import beat_seconds
from thinwire.ps.flags import PsFlags
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.dialogues.base import (
    Admission,
    Dialogue,
    EndOfStream,
    RemoteClient,
    send_refusal,
)
from thinwire.ps.service.dialogues.offer import (
    OfferDialogue,
    OtherWeights,
    ReceivedOffer,
    checked_offer,
)
from thinwire.ps.service.handshake import Identity, check_hello, guard_of
from thinwire.ps.service.leader_client import LeaderModel, find_model
from thinwire.ps.service.server import dscp_of
from thinwire.ps.service.stream_reader import StreamReader
from thinwire.runtime.run import fingerprint
from thinwire.runtime.run.settings import Run

if TYPE_CHECKING:
    from thinwire.proto.security.connection_guard import ConnectionGuard

#: Seconds for which the shard holds the stream of a client that it cannot serve yet. After this
#: time the client must retry, which shows that the client still runs.
_HELD_SECONDS = 5.0
#: Shortest time limit, in seconds, for a worker to send its offer or the next chunk of its offer.
_SILENCE_SECONDS = 10.0
#: Delay in seconds before a client's retry, which the shard sends with REASON_STARTING. The client
#: retries as long as the PS answers.
_RETRY_SECONDS = 0.02
_LOOK_SECONDS = 0.1


class OfferStage:
    """The network port of a shard until a worker has sent its model to the shard.

    Threads that read clients' streams call `claim`, `hold`, `receive` and `forget`; the main thread
    calls all other methods.

    Attributes:
        guard: Object that limits and counts the clients of the shard's network port.
        watch: Object that detects that the shard refuses all workers, so that it can end.
        listening: The open network port of the shard; None before `listen` is called.
        interrupted: True if the shard must end before it has a model.
        on_offer: Function called with each received model offer, in the thread that reads the
            offering worker's stream.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        clock: Function that returns monotonic time in seconds; tests replace the function.
        run_id: Random identifier of the training run; "" if the shard does not know it yet.
        phase: Number of the phase (model of the script) for which the stage accepts a model. A
            stage of phase 1 or later accepts it while the shard serves a model.
        guard: See the attribute; None for a guard of the shard's own.
    """

    def __init__(
        self,
        run: Run,
        own: PsFlags,
        clock: Callable[[], float] = time.monotonic,
        run_id: str = "",
        phase: int = 0,
        guard: ConnectionGuard | None = None,
    ) -> None:
        self.run, self.own, self.clock, self.phase = run, own, clock, phase
        self.guard: ConnectionGuard = guard or guard_of(run)
        self.watch = AdmissionWatch(own.start_timeout_seconds, lambda: self.guard.refused, clock)
        self.listening: GrpcServer | None = None
        self.interrupted = False
        self._lock = threading.RLock()
        # Client's stream -> time since which the shard holds the stream.
        self._held: dict[ServerStream, float] = {}
        self._offering: OfferDialogue | None = None
        self._is_taken = False  # True while the main thread builds an offered model
        self._has_model = False
        # identity of shard 0's model, for shards 1 and up; else None
        self._leader: LeaderModel | None = None
        self._closing = threading.Event()
        self._came: queue.SimpleQueue[ReceivedOffer | Exception] = queue.SimpleQueue()
        self._beat_at = clock()
        self.on_offer: Callable[[ReceivedOffer], None] = self._came.put
        rows = fingerprint.fingerprint(run)
        self.identity = Identity(run_id, own.id_ps, run.nb_ps, 0, rows, None, [], phase)

    # -- methods of the main thread ---------------------------------------------------------

    def listen(self) -> None:
        """Open the port. A shard with id 1 or higher starts to wait for shard 0's model, too.

        Raises:
            thinwire.proto.grpc.PortInUse: Another process already listens at the port.
        """
        run, flags = self.run, self.own
        dscp = dscp_of(run.method.router, run.transport.dgt_dscp)
        self.listening = GrpcServer(flags.bind, flags.port, self.read, dscp=dscp, guard=self.guard)
        logging.info("PS shard %d listens on %s:%d", flags.id_ps, flags.bind, self.listening.port)
        logging.info("waiting for a worker that sends the model of its script")
        self.begin_looking()

    def begin_looking(self) -> None:
        """Start to wait for shard 0's model on a shard with id 1 or higher."""
        if self.own.id_ps:
            threading.Thread(target=self._look_for_leader, name="leader", daemon=True).start()

    def next_offer(self) -> ReceivedOffer | None:
        """Wait for a worker's model offer; return None if the shard must end before an offer
        arrives.

        Raises:
            Unreachable, RequestRejected: Shard 0 does not answer this shard, or rejects it.
            NobodyAdmitted: The shard has refused all clients that connected.
        """
        while not self.interrupted:
            try:
                item = self._came.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self.tick()
                if (why := self.watch.verdict()) is not None:
                    raise NobodyAdmitted(why) from None
                continue
            if isinstance(item, Exception):
                # The method `close` has ended the wait for shard 0's model.
                if self._closing.is_set():
                    break
                raise item
            if not item.stream.lost:
                return item
            # Drop an offer whose worker has disconnected, because that worker cannot offer the same
            # weights to the other shards.
            self._is_taken = False
        return None

    def refuse(self, received: ReceivedOffer, why: str, reason: int = pb.REASON_OFFER) -> None:
        """Reject the model that a worker offers, end its stream, and wait for another worker's
        model.
        """
        self._is_taken = False
        self.refuse_offer(received.stream, why, reason)
        received.stream.close()
        self.forget(received.stream)

    def interrupt(self) -> None:
        """End the shard's wait for a worker's model; any thread may call this."""
        self.interrupted = True
        self._closing.set()

    def close(self, has_model: bool) -> None:
        """Refuse all clients that wait to offer a model, and close the port if the shard has no
        model.

        Args:
            has_model: True if the shard has received a model, so that its network port stays open.
        """
        with self._lock:
            self._has_model = True
            offering, self._offering = self._offering, None
        self._closing.set()
        self._let_go()
        if offering is not None:
            self.send_away(offering.stream)
        if not has_model and self.listening is not None:
            self.listening.stop(0.5)

    def tick(self) -> None:
        """Send heartbeats, end streams held too long, and drop a worker that stops sending its
        model.
        """
        self._let_go(_HELD_SECONDS)
        now, offering = self.clock(), self._offering
        if offering is None:
            return
        is_late = now - offering.progress_at > max(_SILENCE_SECONDS, self.run.lease_seconds)
        if is_late and not self._is_taken:
            text = f"worker {offering.worker} must send a model but sent nothing for too long"
            self.guard.record_refusal("silent", offering.stream.peer, text)
            offering.stream.close()
            self.forget(offering.stream)
        elif now - self._beat_at >= beat_seconds(self.run.lease_seconds):
            self._beat_at = now
            offering.stream.send((frame(pb.ToClient(waiting=pb.Waiting())),), counted=False)

    # -- methods of the threads that read streams -------------------------------------------

    def read(self, stream: ServerStream) -> None:
        """Read one client's stream until the stream ends."""
        self.reader_of(stream).read()

    def reader_of(self, stream: ServerStream) -> StreamReader:
        """Return a reader of the stream of a client that has sent no Hello yet."""
        # The stage queues nothing: a message is handled when its reader returns from it.
        return StreamReader(stream, self.guard, lambda call: call(), OfferAdmission(self))

    def claim(self, dialogue: OfferDialogue) -> bool:
        """Let this dialogue's worker offer its model; return False if no worker may offer now."""
        with self._lock:
            knows_weights = self.own.id_ps == 0 or self._leader is not None
            is_busy = self._offering is not None or self._is_taken or self._has_model
            if is_busy or not knows_weights:
                return False
            self._offering = dialogue
            return True

    def hold(self, stream: ServerStream) -> bool:
        """Let a client wait on its stream for some seconds; return False if the shard already has a
        model.
        """
        with self._lock:
            if self._has_model:
                return False
            self._held[stream] = self.clock()
            return True

    def check_digest(self, offer: Offer) -> None:
        """Check that the initial weights that a worker offers equal the initial weights of shard 0.

        Raises:
            OtherWeights: Shard 0 has got its initial weights from another worker.
        """
        leader = self._leader
        if leader is not None and offer.weights_digest != leader.weights_digest:
            raise OtherWeights(
                "shard 0 has the initial weights of another worker; this PS waits for the weights "
                "of that worker. If that worker has ended, end the run and start it again with "
                "--overwrite."
            )

    def receive(self, received: ReceivedOffer) -> None:
        """Pass a worker's offered model to the shard's main thread."""
        self._is_taken = True
        self.on_offer(received)

    def forget(self, stream: ServerStream) -> None:
        """Record that a client's stream has ended.

        If the client whose stream has ended was the offering worker, the shard requests the held
        workers to retry.
        """
        with self._lock:
            self._held.pop(stream, None)
            if self._offering is None or self._offering.stream is not stream:
                return
            self._offering = None
        self._let_go()

    def refuse_offer(self, stream: ServerStream, why: str, reason: int = pb.REASON_OFFER) -> None:
        """Send a worker the rejection of its offered model, and count the rejection."""
        send_refusal(stream, reason, why)
        self.guard.record_refusal("offer", stream.peer, why)

    def send_away(self, stream: ServerStream, retry_after_seconds: float = _RETRY_SECONDS) -> None:
        """Request a client to connect again soon, and end the client's stream.

        Args:
            stream: Stream of the client that must retry.
            retry_after_seconds: Delay in seconds before the client's retry; 0 lets the client
                choose the delay and the number of retries.
        """
        text = self._why_not_yet()
        send_refusal(stream, pb.REASON_STARTING, text, retry_after_seconds=retry_after_seconds)
        stream.close()

    # -- internal methods -------------------------------------------------------------------

    def _let_go(self, held_seconds: float = 0.0) -> None:
        """Request the clients that have waited for so many seconds to connect again."""
        with self._lock:
            now = self.clock()  # within the lock, so that no stream is held since a later time
            due = [stream for stream, since in self._held.items() if now - since >= held_seconds]
            for stream in due:
                del self._held[stream]
        for stream in due:
            self.send_away(stream)

    def _why_not_yet(self) -> str:
        if self._has_model:
            return "this PS has received its model now; try again."
        offering = self._offering
        if offering is not None:
            return f"this PS receives the model from worker {offering.worker}; try again."
        return "this PS has no model yet and waits for a worker that sends one; try again."

    def _look_for_leader(self) -> None:
        """Wait for shard 0's digest of its initial weights; then let workers offer a model."""
        try:
            leader = find_model(self.run, self.identity, self._closing)
        except Exception as error:  # noqa: BLE001 - the main thread raises the error
            self._came.put(error)
            if self.phase and not self._closing.is_set():
                logging.error("this PS shard receives no model for phase %d: %s", self.phase, error)
            return
        with self._lock:
            self._leader = leader
            self.identity = dataclasses.replace(self.identity, run_id=leader.run_id)
        self._let_go()


class NobodyAdmitted(Exception):
    """Error: the parameter server admitted no worker in time, and refused some workers. The exit
    code of a parameter server that admitted no worker is 4.
    """


class OfferAdmission(Admission):
    """Admission of clients to a shard that waits for a model."""

    def __init__(self, stage: OfferStage) -> None:
        self._stage = stage

    def refusal_of(self, body: str) -> str:
        """Return why a message before the client's Hello is malformed."""
        return f"a client sent {body}; expected hello"

    def admit(self, hello: pb.Hello, client: RemoteClient) -> Dialogue:
        """Request the model of the first worker's script; hold the streams of other clients.

        Raises:
            EndOfStream: The Hello is refused, or the client must connect again; the client has got
                the refusal.
        """
        stage, stream = self._stage, client.stream
        is_worker = hello.role == pb.ROLE_WORKER
        if is_worker and (refusal := self._why_refused(hello)) is not None:
            client.reject("hello", refusal)
        if (full := client.guard.hello_received(stream)) is not None:
            client.reject(full[0], (pb.REASON_FULL, full[1]))
        if hello.role == pb.ROLE_SUPERVISOR and hello.halts:
            logging.info("client %s ends this run, which has no model yet", stream.peer)
            client.refuse(pb.REASON_ENDS, "this PS has not received a model yet, and ends.")
            stage.interrupt()
            raise EndOfStream
        check = functools.partial(
            checked_offer, run=stage.run, own=stage.own, check_digest=stage.check_digest
        )
        dialogue = OfferDialogue(
            *(client, hello, stage.clock, check),
            *(stage.receive, stage.refuse_offer, stage.forget),
        )
        if is_worker and stage.claim(dialogue):
            logging.info("this PS shard requests the script's model from worker %d", hello.id)
            dialogue.request()
        # a Supervisor with num_shards 0 only reads the run's status
        elif not hello.num_shards or not stage.hold(stream):
            stage.send_away(stream, _RETRY_SECONDS if hello.num_shards else 0.0)
            raise EndOfStream
        return dialogue

    def _why_refused(self, hello: pb.Hello) -> tuple[int, str] | None:
        refusal = check_hello(hello, self._stage.identity)
        nb_workers = self._stage.run.nb_workers
        if refusal is None and not 1 <= hello.id <= nb_workers:
            return pb.REASON_ID_RANGE, (
                f"id: worker {hello.id} is not in 1..{nb_workers}; give all nodes the same "
                "--nb_workers, and this one another --id_worker."
            )
        return refusal
