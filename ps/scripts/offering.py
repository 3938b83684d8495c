"""A shard that has no model yet listens, and takes the model that a worker offers.

One worker at a time may offer; the others are held for a moment and then sent away, to come again.
An offer is checked from its document before anything is allocated for its payload. Nothing of it is
built here: the main thread takes it from `OfferStage.next_offer`.

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

#: How long a client that cannot be served yet is held; then it shows, by coming again, that it is
#: still there.
_HELD_SECONDS = 5.0
#: The least time in which a worker must send its offer, or the next part of it.
_SILENCE_SECONDS = 10.0
#: Sent with REASON_STARTING: come again soon, for as long as this PS answers.
_RETRY_SECONDS = 0.02
_LOOK_SECONDS = 0.1
_LONGEST_MESSAGE = 2000


class OfferRefused(Exception):
    """An offer that is no good; the message goes to the worker."""


class _SentAway(Exception):
    """The stream is to be ended."""


@dataclasses.dataclass(frozen=True)
class ReceivedOffer:
    """An offer whose document is checked, with its payload.

    Attributes:
        offer: What the document holds.
        payload: Initial weights of this shard, then moving statistics; of the expected length.
        worker: Whose it is.
        stream: Where it waits.
        program: What that worker computes with.
    """

    offer: Offer
    payload: memoryview
    worker: int
    stream: ServerStream
    program: Rows = ()


class OfferStage:
    """The port of a shard until it has a model.

    Readers of streams call `claim`, `hold`, `receive` and `forget`; the main thread all others.

    Attributes:
        guard: Of the port.
        watch: For workers that are all refused.
        listening: The port, once `listen` was called.
        interrupted: Whether the shard is to end.
        phase: Of the script, whose model is taken.

    Args:
        run: The run's settings.
        own: This shard's.
        clock: For tests.
    """

    def __init__(self, run: Run, own: PsFlags, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self.own, self.clock, self.phase = run, own, clock, 0
        self.guard: ConnectionGuard = guard_of(run)
        self.watch = AdmissionWatch(own.start_timeout_seconds, lambda: self.guard.refused, clock)
        self.listening: GrpcServer | None = None
        self.interrupted = False
        self._lock = threading.RLock()
        self._held: dict[ServerStream, float] = {}  # when it came
        self._offering: OfferReader | None = None
        self._is_taken = False  # an offer is with the main thread
        self._has_model = False
        self._leader: LeaderModel | None = None  # of shards from 1 on, once it is known
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
        """Return the stage of a shard that serves one model, and takes that of another phase.

        Args:
            run: The run's settings.
            own: This shard's.
            phase: Of the script.
            run_id: The run's identity.
            guard: Of the port.
            on_offer: Called with an offer, in the thread that has read it.
        """
        stage = cls(run, own)
        stage.phase, stage.guard, stage._on_offer = phase, guard, on_offer
        stage.identity = dataclasses.replace(stage.identity, run_id=run_id, phase=phase)
        stage._begin_looking()
        return stage

    @property
    def num_waiting(self) -> int:
        """How many clients are held."""
        return len(self._held)

    # -- the main thread --------------------------------------------------------------------

    def listen(self) -> None:
        """Take the port; shards from 1 on look for shard 0 meanwhile.

        Raises:
            thinwire.proto.grpc.PortInUse: Somebody else has it.
        """
        run, own = self.run, self.own
        dscp = dscp_of(run.method.router, run.transport.dgt_dscp)
        self.listening = serve(own.bind, own.port, self.read, dscp=dscp, guard=self.guard)
        logging.info("PS %d listens on %s:%d", own.id_ps, own.bind, self.listening.port)
        logging.info("waiting for a worker that offers the model")
        self._begin_looking()

    def _begin_looking(self) -> None:
        if self.own.id_ps:
            threading.Thread(target=self._look_for_leader, name="leader", daemon=True).start()

    def next_offer(self) -> ReceivedOffer | None:
        """Wait for an offer; return None when this shard is to end first.

        Raises:
            Unreachable, RequestRejected: Shard 0 does not answer, or does not want this shard.
            NobodyAdmitted: Clients came and were all refused.
        """
        while not self.interrupted:
            try:
                came = self._came.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self.tick()
                if (why := self.watch.verdict()) is not None:
                    raise NobodyAdmitted(why) from None
                continue
            if isinstance(came, Exception):
                if self._closing.is_set():  # it is the end of the search for shard 0
                    break
                raise came
            if not came.stream.lost:
                return came
            self._is_taken = False  # of a worker that is gone, and cannot offer to other shards
        return None

    def taken(self) -> ReceivedOffer | None:
        """Return the offer that has come, if one has; does not wait."""
        with contextlib.suppress(queue.Empty):
            came = self._came.get_nowait()
            return came if isinstance(came, ReceivedOffer) else None
        return None

    def refuse(self, received: ReceivedOffer, why: str, reason: int = pb.REASON_OFFER) -> None:
        """Send an offer's worker away for good, and wait for that of another."""
        self._is_taken = False
        self.refuse_offer(received.stream, why, reason)
        received.stream.close()
        self.forget(received.stream)

    def interrupt(self) -> None:
        """End the wait (any thread)."""
        self.interrupted = True
        self._closing.set()

    def close(self, has_model: bool) -> None:
        """Send everybody away who waits: to come again if there is a model now, else for ever."""
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
        """Send signs of life, let held streams go, and give up a worker that sends nothing."""
        now = self.clock()
        with self._lock:
            old = [stream for stream, since in self._held.items() if now - since >= _HELD_SECONDS]
            for stream in old:
                del self._held[stream]
            offering = self._offering
        for stream in old:
            self.send_away(stream)
        if offering is None:
            return
        is_late = now - offering.progress_at > max(_SILENCE_SECONDS, self.run.lease_seconds)
        if is_late and not self._is_taken:
            text = f"worker {offering.worker} was to offer the model and sent nothing for too long"
            self.guard.record_refusal("silent", offering.stream.peer, text)
            offering.stream.close()
            self.forget(offering.stream)
        elif now - self._beat_at >= beat_seconds(self.run.lease_seconds):
            self._beat_at = now
            offering.stream.send((frame(pb.ToClient(waiting=pb.Waiting())),), counted=False)

    # -- readers of streams -----------------------------------------------------------------

    def read(self, stream: ServerStream) -> None:
        """Read one stream to its end."""
        OfferReader(self, stream).read()

    def claim(self, reader: OfferReader) -> bool:
        """Make this worker the one that offers; return False if it is another's turn."""
        with self._lock:
            knows_weights = self.own.id_ps == 0 or self._leader is not None
            is_busy = self._offering is not None or self._is_taken or self._has_model
            if is_busy or not knows_weights:
                return False
            self._offering = reader
            return True

    def hold(self, stream: ServerStream) -> bool:
        """Keep a client for a moment; return False if there is nothing to wait for any more."""
        with self._lock:
            if self._has_model:
                return False
            self._held[stream] = self.clock()
            return True

    def check_digest(self, offer: Offer) -> None:
        """Compare an offer with the weights that shard 0 has.

        Raises:
            OtherWeights: They are of another worker.
        """
        leader = self._leader
        if leader is not None and offer.weights_digest != leader.weights_digest:
            raise OtherWeights(
                "shard 0 has the initial weights of another worker; this PS waits for the rest of "
                "those. If that worker is gone, end the run and start it anew with --overwrite."
            )

    def receive(self, received: ReceivedOffer) -> None:
        """Hand an offer over to the main thread."""
        self._is_taken = True
        self._on_offer(received)

    def forget(self, stream: ServerStream) -> None:
        """Note that a stream has ended; whoever waits may offer now."""
        with self._lock:
            self._held.pop(stream, None)
            if self._offering is None or self._offering.stream is not stream:
                return
            self._offering = None
        self._let_all_go()

    def refuse_offer(self, stream: ServerStream, why: str, reason: int = pb.REASON_OFFER) -> None:
        """Send a worker that its offer is no good, and count it."""
        _refuse(stream, reason, why)
        self.guard.record_refusal("offer", stream.peer, why)

    def send_away(self, stream: ServerStream, retry_after_seconds: float = _RETRY_SECONDS) -> None:
        """Have a client come again soon; without a time, only for as long as it likes."""
        _refuse(stream, pb.REASON_STARTING, self._why_not_yet(), retry_after_seconds)
        stream.close()

    # -- parts of these ---------------------------------------------------------------------

    def _let_all_go(self) -> None:
        with self._lock:
            held = list(self._held)
            self._held.clear()
        for stream in held:
            self.send_away(stream)

    def _why_not_yet(self) -> str:
        if self._has_model:
            return "this PS has its model now; try again."
        offering = self._offering
        if offering is not None:
            return f"this PS takes the model of worker {offering.worker}; try again."
        return "this PS has no model yet and waits for a worker that offers it; try again."

    def _look_for_leader(self) -> None:
        """Learn of shard 0 which weights the run begins with; then workers may offer theirs."""
        try:
            found = find_model(self.run, self.identity, self._closing)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._came.put(error)
            if self.phase and not self._closing.is_set():
                logging.error("this shard gets no model of phase %d: %s", self.phase, error)
            return
        with self._lock:
            self._leader = found
            self.identity = dataclasses.replace(self.identity, run_id=found.run_id)
        self._let_all_go()


class NobodyAdmitted(Exception):
    """No worker was admitted in time, and some were refused. Exit code 4."""


class OtherWeights(Exception):
    """The offer is of another worker than the one that shard 0 has its weights from."""


class OfferReader:
    """Reads one stream of a shard without model to its end.

    Attributes:
        stream: Of the client.
        worker: Its id, once its Hello is accepted.
        progress_at: When it last sent a sign that it goes on.

    Args:
        stage: Of the shard.
        stream: To be read.
    """

    def __init__(self, stage: OfferStage, stream: ServerStream) -> None:
        self._stage, self.stream = stage, stream
        self.worker = 0
        self.progress_at = stage.clock()
        self._bytes = 0  # since then
        self._offer: Offer | None = None
        self._program: Rows = ()
        self._expects = "hello"  # or "offer", or "" where nothing is to come
        self._rate = MessageRate(stage.guard.limits)
        self._assembler = MessageAssembler(pb.ToServer, self._limit)

    def read(self) -> None:
        """Handle frames until the stream ends."""
        try:
            for data in self.stream.incoming():
                if not self.receive(data):
                    return
        finally:
            self.forget()

    def receive(self, data: bytes | Arriving) -> bool:
        """Handle one frame; return whether more are wanted."""
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
        """Note that the stream has ended."""
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
            raise Malformed(f"a {body} where {self._expects or 'nothing'} is expected")
        if body == "hello":
            self._hello(message.hello)
            return
        self._expects = ""
        if self._offer is not None:
            received = ReceivedOffer(self._offer, payload, self.worker, self.stream, self._program)
            self._stage.receive(received)

    def _note_progress(self, num_bytes: int) -> None:
        """Renew the time of a worker that goes on in pieces as large as every worker sends."""
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
        """Go on from a Hello whose sender is known; return whether more frames are wanted."""
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
            logging.info("%s ends this run, which has no model yet", self.stream.peer)
            _refuse(self.stream, pb.REASON_ENDS, "this PS had no model yet, and ends.")
            stage.interrupt()
            raise _SentAway
        self._expects, self.worker, self._program = "", hello.id, program_of(hello)
        self.progress_at = stage.clock()
        if is_worker and stage.claim(self):
            logging.info("worker %d is to offer the model", hello.id)
            self._expects = "offer"
            _refuse(self.stream, pb.REASON_NO_MODEL, "this PS has no model yet; offer it.")
        elif not hello.num_shards or not stage.hold(self.stream):  # without: it just looks
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
        """Check an offer's document; nothing is allocated for its payload before.

        Raises:
            OfferRefused, OtherWeights: The document is no good, or the payload's length.
        """
        if self._expects != "offer" or message.WhichOneof("body") != "offer":
            raise Malformed("a payload where none is expected")
        stage, given = self._stage, message.offer
        try:
            self._offer = read_offer(given.document, stage.own.max_model_bytes)
            expected = offered_bytes(stage.run, stage.own.id_ps, self._offer)
        except ConfigurationError as error:
            raise OfferRefused(str(error)) from error
        except Exception as error:
            raise OfferRefused(f"{type(error).__name__}: {error}") from error
        most = stage.own.max_model_bytes
        if expected > most:
            raise OfferRefused(
                f"the offer has {expected:,} bytes of weights, statistics and slots for this PS; "
                f"expected at most {most:,}. Give the PS a larger --max_model_bytes if that is "
                "right."
            )
        stage.check_digest(self._offer)
        if given.payload_bytes != expected:
            raise OfferRefused(
                f"the offer announces {given.payload_bytes} bytes; expected {expected}, by the "
                "sizes of its variables. Install the same Thinwire on all nodes."
            )
        return expected

    def _reject(self, why: str, refusal: tuple[int, str]) -> None:
        """End the stream; `why` is the name under which it is counted."""
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
