"""Assigns a shard's UDP datagrams to the workers' sessions, and delivers complete pushes.

A worker's push reaches a shard as messages on the worker's gRPC stream and as datagrams.
`DatagramReceiver` passes the stream messages and the datagrams of a push to the reassembler of the
worker's session (`thinwire.ops.routing.reassembler`), which joins them, and then delivers the
complete push. Three kinds of threads call `DatagramReceiver`: the threads that read streams, the
thread that reads datagrams, and the writer thread, which watches the deadlines of incomplete
pushes. The module `receiver` of the datagram path uses neither sockets nor the shard's state
machine.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.routing.base import Manifest, Router, Transport
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import HEADER, MAGIC, VERSION
from thinwire.ops.routing.reassembler import ReassembledStep, Reassembler
from thinwire.ops.types import Update
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.datagrams.counters import DatagramCounts, log_step
from thinwire.ps.datagrams.sessions import PendingPush, Sessions, WorkerReassembly
from thinwire.ps.wire.push_decoder import DecodedPush, NonFinite, PushDecoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32

#: Incarnation that no worker's process has. The core rejects a push with this incarnation, and the
#: worker then sends Hello again.
_NO_INCARNATION = 0


class DatagramReceiver:
    """Joins the datagrams and stream messages of one shard's workers into pushes; thread-safe.

    Args:
        decoder: Decoder of the pushes that the shard receives.
        sizes: Number of values in each slot (slice of a variable) of the shard.
        router: Routing policy of the training method; its `uses_datagrams` must be true.
        deliver: Function called with the `Push` event of each complete push.
        refuse: Function called with (worker id, step, message) for a push that holds NaN or
            infinity.
        wake: Function called when the time that `next_deadline` returns has become earlier.
        entropy: Function that returns the given number of random bytes, for session ids and signing
            keys.
        clock: Function that returns monotonic time in seconds.

    Raises:
        ValueError: The training method's router sends no datagrams.
    """

    def __init__(
        self,
        decoder: PushDecoder,
        sizes: list[int],
        router: Router,
        deliver: Callable[[events.Event], None],
        refuse: Callable[[int, int, str], None],
        wake: Callable[[], None],
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = router.reassembly_rules
        if rules is None:
            raise ValueError(f"router {router} sends no datagrams that a PS shard could receive")
        self._decoder = decoder
        self._deliver, self._refuse, self._wake = deliver, refuse, wake
        self._losses: InjectedLoss | None = None
        self._clock = clock
        # The lock is reentrant, as `deliver` may call `outcome` or `counts`.
        self._lock = threading.RLock()
        self._sessions = Sessions(lambda session: Reassembler(session, sizes, rules), entropy)
        self._dropped: collections.Counter[str] = collections.Counter()
        self._logs_steps = False

    def configure(self, transport: Transport) -> None:
        """Turn on injected datagram losses and the log of completed steps if the flags request
        them.
        """
        self.inject_loss(transport.dgt_drop_rate, transport.dgt_drop_seed)
        self._logs_steps = transport.dgt_info

    def inject_loss(self, rate: float, seed: int) -> None:
        """Drop the fraction `rate` (0 to 1) of the datagrams that are passed to `receive`."""
        self._losses = InjectedLoss(rate, seed) if rate else None

    # -- datagram sessions ------------------------------------------------------------------

    def fill_welcome(
        self, worker: int, incarnation: int, ports: Iterable[int], welcome: pb.Welcome
    ) -> None:
        """Add the UDP ports, session id and signing key to a worker's Welcome message.

        When a new process of a worker opens a datagram session, the session of its earlier process
        ends.
        """
        with self._lock:
            session = self._sessions.open(worker, incarnation)
        fields = welcome.datagrams
        fields.session, fields.key = session.id, session.key
        fields.ports.extend(ports)

    def session_ids(self) -> list[int]:
        """Return the ids of the open datagram sessions."""
        with self._lock:
            return self._sessions.ids()

    def retain_members(self, members: Iterable[int]) -> None:
        """End the datagram sessions of workers that were members of the run and have left.

        A worker that has joined but is not a member yet keeps its datagram session.

        Args:
            members: Ids of the workers that are members of the run or become members with the next
                round.
        """
        with self._lock:
            for worker in self._sessions.leavers(members):
                self._end_session(worker)

    def end_all_sessions(self) -> None:
        """End the datagram sessions of all workers.

        After the end of all datagram sessions, the shard rejects each worker's next push, and the
        worker sends Hello again.
        """
        with self._lock:
            for session in self._sessions:
                self._end_session(session.worker)

    def _end_session(self, worker: int) -> None:
        """End a worker's datagram session. The shard rejects an incomplete push of a session that
        ends, because the push can never be complete.
        """
        session = self._sessions.of_worker(worker)
        self._sessions.close(worker)
        pending = session.pending if session is not None else None
        if pending is None or pending.push.more:
            return
        try:
            self._deliver_empty(worker, pending.push, pending.aux, _NO_INCARNATION)
        except NonFinite as error:
            self._refuse(worker, pending.push.step, str(error))

    # -- received messages and datagrams ----------------------------------------------------

    def receive(self, data: memoryview, size: int) -> int:
        """Process a buffer of datagrams of `size` bytes each; the last datagram may be shorter.

        The session of a datagram is looked up before the datagram's contents are checked, so that
        datagrams of an unknown session cost little time.

        Returns:
            The number of datagrams that are genuine (correctly signed) and were not received
            before, including those dropped by injected losses.
        """
        if self._losses is None:
            return self.receive_from_stream(data, size)
        with self._lock:
            surviving, num_lost = self._losses.thin(data, size)
            self._dropped["on purpose"] += num_lost
        return num_lost + self.receive_from_stream(surviving, size)

    def receive_from_stream(self, data: memoryview, size: int) -> int:
        """Process datagrams from a gRPC stream as `receive` does, but without injected losses."""
        heads = headers_of(data, size)
        num_useful = 0
        with self._lock:
            self._dropped["truncated"] += -(-len(data) // size) - len(heads)
            for start, stop, session_id in runs(heads):
                session = self._sessions.with_id(session_id)
                if session is None:
                    ours = num_ours(heads[start:stop])
                    self._dropped["unknown session"] += ours
                    self._dropped["not Thinwire's"] += stop - start - ours
                else:
                    now = self._clock()
                    num_useful += session.feed(data[start * size : stop * size], size, now)
                    self._deliver_closed(session, now)
        return num_useful

    def on_push(self, worker: int, push: pb.Push, payload: memoryview) -> None:
        """Process one message of a worker's push that arrived on the gRPC stream.

        Raises:
            Malformed: The push message does not fit the shard's variables.
            NonFinite: The worker's push holds NaN or infinity.
        """
        contents = self._decoder.read(push, payload, parts=True)
        manifest = messages.manifest_from_message(push.manifest)
        with self._lock:
            session = self._sessions.of_worker(worker)
            if session is None or session.incarnation != push.incarnation:
                self._deliver_empty(worker, push, contents.aux, _NO_INCARNATION)
            else:
                self._add_message(session, push, contents, manifest)

    def _deliver_empty(
        self, worker: int, push: pb.Push, aux: Float32 | None, incarnation: int
    ) -> None:
        """Deliver a push without gradient values to the shard's state machine, which replies to the
        worker.

        Args:
            worker: Id of the worker, from 1.
            push: Wire message of the worker's push.
            aux: Values of the push that shard 0 averages over workers (for example moving
                statistics), or None.
            incarnation: Incarnation (process number) of the worker to write into the push;
                `_NO_INCARNATION` makes the shard's state machine reject the push.
        """
        update = self._decoder.flatten([])
        if not push.more:
            event = self._decoder.event(worker, push, update, aux, 0)
            self._deliver(dataclasses.replace(event, incarnation=incarnation))

    def _add_message(
        self, session: WorkerReassembly, push: pb.Push, contents: DecodedPush, manifest: Manifest
    ) -> None:
        now = self._clock()
        if push.step <= session.closed_step:
            self._repeat(session, push, contents)
            return
        session.add_message(push, contents)
        try:
            session.reassembler.add_reliable(push.step, contents.blocks, manifest, now)
            if not push.more:
                session.reassembler.end_step(push.step, now)
        except ValueError as error:
            raise Malformed(str(error)) from error
        self._deliver_closed(session, now)
        if session.pending is not None and not push.more:
            self._wake()

    def _repeat(self, session: WorkerReassembly, push: pb.Push, contents: DecodedPush) -> None:
        """Deliver a complete push's update again, because the worker repeated a message of the
        push.
        """
        assembled = session.reassembler.find_closed(push.step)
        if assembled is None:
            # If the step is older than the newest complete step, the core has already replied to
            # that step and handles the repeated push as a duplicate. The values of the repeated
            # push therefore do not matter.
            self._deliver_empty(session.worker, push, contents.aux, push.incarnation)
        elif not push.more:
            # A repeated push gets the rejection that the first push got.
            if session.refusal is not None:
                raise NonFinite(session.refusal)
            session.pending = PendingPush(push, contents.aux, contents.num_bytes, contents.change)
            self._deliver_push(session, assembled)

    # -- delivery of complete pushes --------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return when `poll` must deliver an incomplete push; None if no push waits for
        datagrams.
        """
        with self._lock:
            deadlines = [session.reassembler.next_deadline() for session in self._sessions]
        return min((when for when in deadlines if when is not None), default=None)

    def poll(self) -> None:
        """Deliver the pushes that have waited long enough for their missing datagrams."""
        with self._lock:
            now = self._clock()
            for session in self._sessions:
                self._deliver_closed(session, now)

    def _deliver_closed(self, session: WorkerReassembly, now: float) -> None:
        assembled = session.reassembler.close(now)
        if assembled is not None:
            if self._logs_steps:
                log_step(session.worker, assembled, session.reassembler.counters)
            self._deliver_push(session, assembled)

    def _deliver_push(self, session: WorkerReassembly, assembled: ReassembledStep) -> None:
        pending = session.pending
        if pending is None:
            return
        num_bytes = pending.num_bytes + session.on_complete(assembled)
        if assembled.flat is not None:
            update = Update(None, assembled.flat)
        else:
            update = self._decoder.flatten(list(assembled.blocks))
        try:
            event = self._decoder.event(
                session.worker, pending.push, update, pending.aux, num_bytes, pending.change
            )
        except NonFinite as error:
            session.refusal = str(error)
            session.reassembler.on_refused(assembled.step)
            self._refuse(session.worker, pending.push.step, str(error))
            return
        self._deliver(event)

    def on_push_refused(self, worker: int, step: int) -> None:
        """Discard a complete push that the shard's state machine rejected, and drop the push's late
        datagrams.
        """
        with self._lock:
            session = self._sessions.of_worker(worker)
            if session is not None:
                session.reassembler.on_refused(step)

    def outcome(self, worker: int, step: int) -> pb.DatagramOutcome | None:
        """Return the counts of a push's datagrams; None if a newer push of the worker is
        complete.
        """
        session = self._sessions.of_worker(worker)  # reading one entry of a dict needs no lock
        if session is None or session.closed_step != step:
            return None
        return session.outcome

    # -- datagram counters ------------------------------------------------------------------

    def counters(self) -> list[tuple[int, ReassemblyCounters]]:
        """Return (worker id, counters) pairs of the open and ended datagram sessions."""
        with self._lock:
            return self._sessions.counters()

    def counts(self) -> DatagramCounts:
        """Return a copy of all datagram counters, added up by worker."""
        with self._lock:
            return DatagramCounts.of_sessions(self.counters(), self._dropped)

    def restore(self, before: DatagramCounts) -> None:
        """Continue from the datagram counts that the shard saved before a restart."""
        with self._lock:
            self._sessions.add_counters(before.workers.items())
            self._dropped.update(before.dropped)


class InjectedLoss:
    """Drops received datagrams at random, for tests and experiments.

    Args:
        rate: Fraction of the received datagrams to drop, from 0 to 1.
        seed: Seed of the random choice of the datagrams to drop.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._random = rate, np.random.default_rng(seed)

    def thin(self, data: memoryview, size: int) -> tuple[memoryview, int]:
        """Drop datagrams of a buffer at random; return the other datagrams, joined, and the drop
        count.
        """
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        survives = self._random.random(len(pieces)) >= self._rate
        surviving = [piece for piece, stays in zip(pieces, survives, strict=True) if stays]
        return memoryview(b"".join(surviving)), len(pieces) - len(surviving)


def headers_of(data: memoryview, size: int) -> NDArray[np.void]:
    """Return a view of the headers of consecutive datagrams.

    The view of datagram headers omits an incomplete header at the buffer's end.

    Args:
        data: Buffer of consecutive UDP datagrams, each with a header.
        size: Size in bytes of every datagram except the last, which may be shorter.
    """
    count = len(data) // size if size >= HEADER.itemsize else 0
    if size >= HEADER.itemsize and len(data) - count * size >= HEADER.itemsize:
        count += 1  # the last datagram is shorter than `size` bytes but has a whole header
    return np.ndarray((count,), HEADER, data, strides=(size,)) if count else np.empty(0, HEADER)


def runs(heads: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """Return (start, stop, session id) for each range of consecutive datagram headers of one
    session.
    """
    sessions = heads["session"]
    edges = np.flatnonzero(sessions[1:] != sessions[:-1]) + 1
    borders = [0, *edges.tolist(), len(heads)] if len(heads) else []
    return [(start, stop, int(sessions[start])) for start, stop in itertools.pairwise(borders)]


def num_ours(heads: NDArray[np.void]) -> int:
    """Return how many of the datagram headers have Thinwire's magic number and version."""
    return int(((heads["magic"] == MAGIC) & (heads["version"] == VERSION)).sum())
