"""Port of a PS shard that has no model yet and accepts the model that a worker offers (sends).

One worker at a time may offer its model: the worker sends a document that describes the model, and
the initial weights as payload. The shard holds the streams of the other workers for a few seconds
and then requests these workers to retry. The shard checks the document that describes an offered
model before it allocates memory for the weights. The shard's main thread gets a worker's offer from
`OfferStage.next_offer` and builds the model.

Source: design, section 10, "The PS runs no user code".
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import logging

from thinwire.ops.offer import Offer, read_offer
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto import versions
from thinwire.proto.framing import MIN_CHUNK_BYTES, Arriving, Malformed, MessageAssembler, frame
from thinwire.proto.grpc import GrpcServer, ServerStream, serve
from thinwire.proto.grpc.session import beat_seconds
from thinwire.proto.security.connection_guard import MessageRate
from thinwire.proto.security.credentials import claims_of, part_of
from thinwire.ps.flags import PsFlags
from thinwire.ps.scripts.initial_model import offered_bytes
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.handshake import check_hello, guard_of, identity, program_of
from thinwire.ps.service.leader_client import LeaderModel, find_model
from thinwire.ps.service.server import dscp_of
from thinwire.ps.service.stream_reader import check_address
from thinwire.runtime.run import fingerprint
from thinwire.runtime.run.program import Rows
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
_LONGEST_MESSAGE = 2000


class OfferRefused(Exception):
    """Error: the model that a worker offers is invalid. The worker that offered an invalid model
    receives the text of this error.
    """


class _SentAway(Exception):
    """Raised inside the module `offering` to end a client's stream."""


@dataclasses.dataclass(frozen=True)
class ReceivedOffer:
    """Model that a worker has offered: its checked description and its payload.

    Attributes:
        offer: Checked description of the model, from the worker's document.
        payload: Bytes of the shard's initial weights, then of moving statistics and optimizer
            slots, of the expected length.
        worker: Id of the worker that offered the model.
        stream: Stream of the worker that offered the model and waits for an answer.
        program: Rows that describe the script of the worker; empty if the worker has no script.
    """

    offer: Offer
    payload: memoryview
    worker: int
    stream: ServerStream
    program: Rows = ()


class OfferStage:
    """The network port of a shard until a worker has sent its model to the shard.

    Threads that read clients' streams call `claim`, `hold`, `receive` and `forget`; the main thread
    calls all other methods.

    Attributes:
        guard: Object that limits and counts the clients of the shard's network port.
        watch: Object that detects that the shard refuses all workers, so that it can end.
        listening: The open network port of the shard; None before `listen` is called.
        interrupted: True if the shard must end before it has a model.
        phase: Number of the phase (model of the script) for which this stage accepts a model.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        clock: Function that returns monotonic time in seconds; tests replace the function.
    """

    def __init__(self, run: Run, own: PsFlags, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self.own, self.clock, self.phase = run, own, clock, 0
        self.guard: ConnectionGuard = guard_of(run)
        self.watch = AdmissionWatch(own.start_timeout_seconds, lambda: self.guard.refused, clock)
        self.listening: GrpcServer | None = None
        self.interrupted = False
        self._lock = threading.RLock()
        # Client's stream -> time since which the shard holds the stream.
        self._held: dict[ServerStream, float] = {}
        self._offering: OfferReader | None = None
        self._is_taken = False  # True while the main thread builds an offered model
        self._has_model = False
        # identity of shard 0's model, for shards 1 and up; else None
        self._leader: LeaderModel | None = None
        self._closing = threading.Event()
        self._came: queue.SimpleQueue[ReceivedOffer | Exception] = queue.SimpleQueue()
        self._beat_at = clock()
        self._on_offer: Callable[[ReceivedOffer], None] = self._came.put
        rows = fingerprint.fingerprint(run)
        self.identity = identity("", own.id_ps, run.nb_ps, 0, rows, None, [])

    @classmethod
    def of_phase(
        cls,
        run: Run,
        own: PsFlags,
        phase: int,
        run_id: str,
        guard: ConnectionGuard,
        on_offer: Callable[[ReceivedOffer], None],
    ) -> OfferStage:
        """Return the object that accepts the script's next model while the shard serves a model.

        Args:
            run: Settings of the training run.
            own: Settings of this PS shard from its command-line flags.
            phase: Number of the phase (model of the script) for which the stage accepts a model.
            run_id: Random identifier of the training run.
            guard: Object that limits and counts the clients of the shard's network port.
            on_offer: Function called with each received model offer, in the thread that reads the
                offering worker's stream.
        """
        stage = cls(run, own)
        stage.phase, stage.guard, stage._on_offer = phase, guard, on_offer
        stage.identity = dataclasses.replace(stage.identity, run_id=run_id, phase=phase)
        stage._begin_looking()
        return stage

    @property
    def num_waiting(self) -> int:
        """Number of clients whose streams the shard holds until a model is offered."""
        return len(self._held)

    # -- methods of the main thread ---------------------------------------------------------

    def listen(self) -> None:
        """Open the port. A shard with id 1 or higher starts to wait for shard 0's model, too.

        Raises:
            thinwire.proto.grpc.PortInUse: Another process already listens at the port.
        """
        run, flags = self.run, self.own
        dscp = dscp_of(run.method.router, run.transport.dgt_dscp)
        self.listening = serve(flags.bind, flags.port, self.read, dscp=dscp, guard=self.guard)
        logging.info("PS shard %d listens on %s:%d", flags.id_ps, flags.bind, self.listening.port)
        logging.info("waiting for a worker that sends the model of its script")
        self._begin_looking()

    def _begin_looking(self) -> None:
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

    def taken(self) -> ReceivedOffer | None:
        """Return the received offer of a model without waiting; None if no worker has sent one."""
        with contextlib.suppress(queue.Empty):
            item = self._came.get_nowait()
            return item if isinstance(item, ReceivedOffer) else None
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
            waiting = [*self._held, *([self._offering.stream] if self._offering else [])]
            self._held.clear()
            self._offering = None
        self._closing.set()
        for stream in waiting:
            self.send_away(stream)
        if not has_model and self.listening is not None:
            self.listening.stop(0.5)

    def tick(self) -> None:
        """Send heartbeats, end streams held too long, and drop a worker that stops sending its
        model.
        """
        now = self.clock()
        with self._lock:
            due = [stream for stream, since in self._held.items() if now - since >= _HELD_SECONDS]
            for stream in due:
                del self._held[stream]
            offering = self._offering
        for stream in due:
            self.send_away(stream)
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
        OfferReader(self, stream).read()

    def claim(self, reader: OfferReader) -> bool:
        """Let this reader's worker offer its model; return False if no worker may offer now."""
        with self._lock:
            knows_weights = self.own.id_ps == 0 or self._leader is not None
            is_busy = self._offering is not None or self._is_taken or self._has_model
            if is_busy or not knows_weights:
                return False
            self._offering = reader
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
        self._on_offer(received)

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
        self._let_all_go()

    def refuse_offer(self, stream: ServerStream, why: str, reason: int = pb.REASON_OFFER) -> None:
        """Send a worker the rejection of its offered model, and count the rejection."""
        _refuse(stream, reason, why)
        self.guard.record_refusal("offer", stream.peer, why)

    def send_away(self, stream: ServerStream, retry_after_seconds: float = _RETRY_SECONDS) -> None:
        """Request a client to connect again soon, and end the client's stream.

        Args:
            stream: Stream of the client that must retry.
            retry_after_seconds: Delay in seconds before the client's retry; 0 lets the client
                choose the delay and the number of retries.
        """
        _refuse(stream, pb.REASON_STARTING, self._why_not_yet(), retry_after_seconds)
        stream.close()

    # -- internal methods -------------------------------------------------------------------

    def _let_all_go(self) -> None:
        with self._lock:
            held = list(self._held)
            self._held.clear()
        for stream in held:
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
        self._let_all_go()


class NobodyAdmitted(Exception):
    """Error: the parameter server admitted no worker in time, and refused some workers. The exit
    code of a parameter server that admitted no worker is 4.
    """


class OtherWeights(Exception):
    """Error: offered initial weights differ from those that another worker has offered to shard
    0.
    """


class OfferReader:
    """Reader of one client's stream to a shard that waits for its model.

    Attributes:
        stream: Message stream of the client.
        worker: Worker id of the client; 0 before the client's Hello message is accepted.
        progress_at: Time at which the client last sent enough bytes, in seconds of the stage's
            clock.

    Args:
        stage: Object of the shard that accepts the model that a worker offers.
        stream: Stream of the client that this object reads.
    """

    def __init__(self, stage: OfferStage, stream: ServerStream) -> None:
        self._stage, self.stream = stage, stream
        self.worker = 0
        self.progress_at = stage.clock()
        self._bytes = 0  # bytes received from the client since the time `progress_at`
        self._offer: Offer | None = None
        self._program: Rows = ()
        # message that the client must send next: "hello" or "offer"; "" if it must send nothing
        self._expects = "hello"
        self._rate = MessageRate(stage.guard.limits)
        self._assembler = MessageAssembler(pb.ToServer, self._limit)

    def read(self) -> None:
        """Handle the frames of the client's stream until the stream ends."""
        try:
            for data in self.stream.incoming():
                if not self.receive(data):
                    return
        finally:
            self.forget()

    def receive(self, data: bytes | Arriving) -> bool:
        """Process one received frame of a client's stream; return True if the stream continues."""
        try:
            self._take(data)
            return True
        except _SentAway:
            return False
        except OfferRefused as error:
            self._stage.refuse_offer(self.stream, str(error))
        except MemoryError:
            self._stage.refuse_offer(self.stream, "this PS has too little memory for the model.")
        except OtherWeights as error:
            _refuse(self.stream, pb.REASON_STARTING, str(error))
        except Malformed as error:
            text = f"malformed message: {error}"
            _refuse(self.stream, pb.REASON_MALFORMED, text)
            self._stage.guard.record_refusal("malformed", self.stream.peer, text)
        return False

    def forget(self) -> None:
        """Notify the `OfferStage` that the stream of this client has ended."""
        self._stage.forget(self.stream)

    def _take(self, data: bytes | Arriving) -> None:
        if (beyond := self._rate.exceeded()) is not None:
            self._reject("rate", (pb.REASON_LIMIT, beyond))
        complete = self._assembler.feed(data)
        self._note_progress(len(data))
        if complete is None:
            return
        message, payload = complete
        body = message.WhichOneof("body")
        if body != self._expects:
            raise Malformed(f"a client sent {body}; expected {self._expects or 'nothing'}")
        if body == "hello":
            self._hello(message.hello)
            return
        self._expects = ""
        if self._offer is not None:
            received = ReceivedOffer(self._offer, payload, self.worker, self.stream, self._program)
            self._stage.receive(received)

    def _note_progress(self, num_bytes: int) -> None:
        """Extend an offering worker's time limit each time the worker has sent MIN_CHUNK_BYTES
        more.
        """
        self._bytes += num_bytes
        if self._bytes >= MIN_CHUNK_BYTES:
            self._bytes, self.progress_at = 0, self._stage.clock()

    def _hello(self, hello: pb.Hello) -> None:
        guard = self._stage.guard
        if (other := versions.refusal(hello)) is not None:
            self._reject("hello", other)
        stranger = guard.authenticate(self.stream, part_of(hello), hello.proof, claims_of(hello))
        if stranger is not None:
            _refuse(self.stream, *stranger)
            raise _SentAway
        self._admit(hello)

    def admit(self, hello: pb.Hello) -> bool:
        """Handle an authenticated client's Hello message; return True if the stream continues."""
        try:
            self._admit(hello)
            return True
        except _SentAway:
            return False

    def _admit(self, hello: pb.Hello) -> None:
        check_address(hello.peer_address)
        stage, guard = self._stage, self._stage.guard
        is_worker = hello.role == pb.ROLE_WORKER
        if is_worker and (refusal := self._why_refused(hello)) is not None:
            self._reject("hello", refusal)
        if (full := guard.hello_received(self.stream)) is not None:
            self._reject(full[0], (pb.REASON_FULL, full[1]))
        if hello.role == pb.ROLE_SUPERVISOR and hello.halts:
            logging.info("client %s ends this run, which has no model yet", self.stream.peer)
            _refuse(self.stream, pb.REASON_ENDS, "this PS has not received a model yet, and ends.")
            stage.interrupt()
            raise _SentAway
        self._expects, self.worker, self._program = "", hello.id, program_of(hello)
        self.progress_at = stage.clock()
        if is_worker and stage.claim(self):
            logging.info("this PS shard requests the script's model from worker %d", hello.id)
            self._expects = "offer"
            _refuse(self.stream, pb.REASON_NO_MODEL, "this PS has no model yet; send one.")
        # a Supervisor with num_shards 0 only reads the run's status
        elif not hello.num_shards or not stage.hold(self.stream):
            stage.send_away(self.stream, _RETRY_SECONDS if hello.num_shards else 0.0)
            raise _SentAway

    def _why_refused(self, hello: pb.Hello) -> tuple[int, str] | None:
        refusal = check_hello(hello, self._stage.identity)
        nb_workers = self._stage.run.nb_workers
        if refusal is None and not 1 <= hello.id <= nb_workers:
            return pb.REASON_ID_RANGE, (
                f"id: worker {hello.id} is not in 1..{nb_workers}; give all nodes the same "
                "--nb_workers, and this one another --id_worker."
            )
        return refusal

    def _limit(self, message: pb.ToServer) -> int:
        """Check the document that describes an offered model; return the payload's length in bytes.

        The assembler of a worker's messages calls `_limit` before it allocates memory for an
        offered model.

        Raises:
            OfferRefused, OtherWeights: The document that describes an offered model, or the length
                of the offer's payload, is invalid.
        """
        if self._expects != "offer" or message.WhichOneof("body") != "offer":
            raise Malformed("a message has a payload, but no payload is expected")
        stage, announced = self._stage, message.offer
        try:
            self._offer = read_offer(announced.document, stage.own.max_model_bytes)
            expected = offered_bytes(stage.run, stage.own.id_ps, self._offer)
        except ConfigurationError as error:
            raise OfferRefused(str(error)) from error
        except Exception as error:
            raise OfferRefused(f"{type(error).__name__}: {error}") from error
        most = stage.own.max_model_bytes
        if expected > most:
            raise OfferRefused(
                f"the offer has {expected:,} bytes of weights, statistics and slots for this PS; "
                f"expected at most {most:,} bytes. Give the PS a larger --max_model_bytes if this "
                "size is intended."
            )
        stage.check_digest(self._offer)
        if announced.payload_bytes != expected:
            raise OfferRefused(
                f"the offer announces {announced.payload_bytes} bytes; expected {expected}, by the "
                "sizes of its variables. Install the same Thinwire on all nodes."
            )
        return expected

    def _reject(self, why: str, refusal: tuple[int, str]) -> None:
        """Send a client a refusal and end the client's stream. The connection guard of the port
        counts the refusal under the name `why`.
        """
        _refuse(self.stream, *refusal)
        self._stage.guard.record_refusal(why, self.stream.peer, refusal[1])
        raise _SentAway


def _refuse(
    stream: ServerStream, reason: int, message: str, retry_after_seconds: float = 0.0
) -> None:
    refusal: Any = pb.Refusal(
        reason=reason,  # type: ignore[arg-type]
        message=message[:_LONGEST_MESSAGE],
        retry_after_seconds=retry_after_seconds,
    )
    stream.send((frame(pb.ToClient(refusal=refusal)),), counted=False)
