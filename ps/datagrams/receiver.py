"""Datagrams of one shard's workers: which session they belong to, and when their push is complete.

A push reaches a shard as messages on the worker's stream and as datagrams. `DatagramReceiver` takes
both, has each session's reassembler (`thinwire.ops.routing.reassembler`) join them, and delivers
complete pushes. It is called by the threads that read streams, by the one that reads datagrams and
by the writer thread, which watches the deadlines; sockets and the core are elsewhere.
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
from thinwire.ops.routing.datagram_format import HEADER, MAGIC, VERSION, DatagramSession
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

#: No worker has this incarnation: the core refuses the push, and its worker sends Hello again.
_NO_INCARNATION = 0


class DatagramReceiver:
    """Sessions of one shard's workers; thread-safe.

    Attributes:
        on_closed: Called with (worker, step, counters) for each step that is closed.

    Args:
        decoder: Of the shard's pushes.
        sizes: Entries of each of its slots.
        router: The policy; its `uses_datagrams` is true.
        deliver: Called with each push that is complete.
        refuse: Called with (worker, step, message) where one is not finite.
        wake: Called when `next_deadline` has come nearer.
        entropy: Returns this many random bytes.
        clock: Seconds; monotone.

    Raises:
        ValueError: The router sends no datagrams.
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
            raise ValueError(f"{router} sends no datagrams that could be received")
        self._decoder = decoder
        self._deliver, self._refuse, self._wake = deliver, refuse, wake
        self._losses: InjectedLoss | None = None
        self._clock = clock
        self._lock = threading.RLock()  # `deliver` may call `outcome` or `counts`
        self._sessions = Sessions(lambda session: Reassembler(session, sizes, rules), entropy)
        self._dropped: collections.Counter[str] = collections.Counter()
        self.on_closed: Callable[[int, ReassembledStep, ReassemblyCounters], None] | None = None

    def configure(self, transport: Transport) -> None:
        """Inject losses and log steps as the run's settings demand."""
        self.inject_loss(transport.dgt_drop_rate, transport.dgt_drop_seed)
        self.on_closed = log_step if transport.dgt_info else None

    def inject_loss(self, rate: float, seed: int) -> None:
        """From now on drop this fraction of what `receive` gets."""
        self._losses = InjectedLoss(rate, seed) if rate else None

    # -- sessions ---------------------------------------------------------------------------

    def open_session(self, worker: int, incarnation: int) -> DatagramSession:
        """Return the session of an incarnation; that of an earlier one ends."""
        with self._lock:
            return self._sessions.open(worker, incarnation)

    def fill_welcome(
        self, worker: int, incarnation: int, ports: Iterable[int], welcome: pb.Welcome
    ) -> None:
        """Enter in a Welcome where an incarnation's datagrams go, and the key that signs them."""
        session, fields = self.open_session(worker, incarnation), welcome.datagrams
        fields.session, fields.key = session.id, session.key
        fields.ports.extend(ports)

    def session_ids(self) -> list[int]:
        """Return the ids of the open sessions."""
        with self._lock:
            return self._sessions.ids()

    def retain_members(self, members: Iterable[int]) -> None:
        """End the sessions of workers that were members and have left.

        A worker that has just joined keeps its session: it may become a member only later.

        Args:
            members: All of them, those included that enter with the next round.
        """
        with self._lock:
            for worker in self._sessions.leavers(members):
                self._end_session(worker)

    def end_all_sessions(self) -> None:
        """End all sessions; a worker that pushes next is refused and sends Hello again."""
        with self._lock:
            for session in self._sessions:
                self._end_session(session.worker)

    def _end_session(self, worker: int) -> None:
        """End a session, and have its pending push refused: it can never be complete."""
        session = self._sessions.of_worker(worker)
        self._sessions.close(worker)
        pending = session.pending if session is not None else None
        if pending is None or pending.push.more:
            return
        try:
            self._deliver_empty(worker, pending.push, pending.aux, _NO_INCARNATION)
        except NonFinite as error:
            self._refuse(worker, pending.push.step, str(error))

    # -- input ------------------------------------------------------------------------------

    def receive(self, data: memoryview, size: int) -> int:
        """Process datagrams of `size` bytes, one after the other; the last may be shorter.

        Their session is looked up before anything is spent on their contents.

        Returns:
            How many were useful: genuine and new; injected losses count as such.
        """
        if self._losses is None:
            return self.receive_from_stream(data, size)
        with self._lock:
            left, num_lost = self._losses.thin(data, size)
            self._dropped["on purpose"] += num_lost
        return num_lost + self.receive_from_stream(left, size)

    def receive_from_stream(self, data: memoryview, size: int) -> int:
        """Process datagrams like `receive`, but without injected losses: a stream loses none."""
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
                    num_useful += self._feed(session, data[start * size : stop * size], size)
        return num_useful

    def _feed(self, session: WorkerReassembly, data: memoryview, size: int) -> int:
        """Pass datagrams to their session; return how many were genuine and new."""
        counters, now = session.reassembler.counters, self._clock()
        before = counters.num_new
        session.reassembler.feed(data, size, now)
        num_useful = max(0, counters.num_new - before)  # below 0 where a step was forgotten
        self._deliver_closed(session, now)
        return num_useful

    def on_push(self, worker: int, push: pb.Push, payload: memoryview) -> None:
        """Process a message of a push, from the stream.

        Raises:
            Malformed: It does not fit.
            NonFinite: It holds NaN or infinity.
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
        """Have the core refuse a push of which nothing is here, lest it count as an empty one."""
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
        """Deliver a push once more that was complete already."""
        assembled = session.reassembler.find_closed(push.step)
        if assembled is None:
            # Older than the newest: it was answered.
            self._deliver_empty(session.worker, push, contents.aux, push.incarnation)
        elif not push.more:
            if session.refusal is not None:  # whatever it holds now, it was refused
                raise NonFinite(session.refusal)
            session.pending = PendingPush(push, contents.aux, contents.num_bytes, contents.change)
            self._deliver_push(session, assembled)

    # -- complete pushes --------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return when `poll` is due, if ever."""
        with self._lock:
            deadlines = [each.reassembler.next_deadline() for each in self._sessions]
        return min((when for when in deadlines if when is not None), default=None)

    def poll(self) -> None:
        """Deliver pushes that have waited long enough for their datagrams."""
        with self._lock:
            now = self._clock()
            for session in self._sessions:
                self._deliver_closed(session, now)

    def _deliver_closed(self, session: WorkerReassembly, now: float) -> None:
        assembled = session.reassembler.close(now)
        if assembled is not None:
            if self.on_closed is not None:
                self.on_closed(session.worker, assembled, session.reassembler.counters)
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
        """Use nothing more of a complete push that was refused: its late datagrams neither."""
        with self._lock:
            session = self._sessions.of_worker(worker)
            if session is not None:
                session.reassembler.on_refused(step)

    def outcome(self, worker: int, step: int) -> pb.DatagramOutcome | None:
        """Return what became of a push's datagrams, if it is the worker's newest complete one."""
        session = self._sessions.of_worker(worker)  # a single read: no lock
        if session is None or session.closed_step != step:
            return None
        return session.outcome

    # -- counters ---------------------------------------------------------------------------

    def counters(self) -> list[tuple[int, ReassemblyCounters]]:
        """Return (worker, counters) of all sessions."""
        with self._lock:
            return self._sessions.counters()

    def counts(self) -> DatagramCounts:
        """Return a copy of all counters, added up by worker."""
        with self._lock:
            return DatagramCounts.of_sessions(self.counters(), self._dropped)

    def restore(self, before: DatagramCounts) -> None:
        """Continue the counters of an earlier incarnation of the shard."""
        with self._lock:
            self._sessions.add_counters(before.workers.items())
            self._dropped.update(before.dropped)


class InjectedLoss:
    """Drops datagrams at random, for tests and experiments.

    Args:
        rate: Fraction that is dropped.
        seed: Decides which.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._random = rate, np.random.default_rng(seed)

    def thin(self, data: memoryview, size: int) -> tuple[memoryview, int]:
        """Return what is left of datagrams of `size` bytes in a row, and how many were dropped."""
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        survives = self._random.random(len(pieces)) >= self._rate
        left = [piece for piece, stays in zip(pieces, survives, strict=True) if stays]
        return memoryview(b"".join(left)), len(pieces) - len(left)


def headers_of(data: memoryview, size: int) -> NDArray[np.void]:
    """Return a view of the headers of datagrams in a row; a cut-off one at the end has none."""
    count = len(data) // size if size >= HEADER.itemsize else 0
    if size >= HEADER.itemsize and len(data) - count * size >= HEADER.itemsize:
        count += 1  # the last one, shorter
    return np.ndarray((count,), HEADER, data, strides=(size,)) if count else np.empty(0, HEADER)


def runs(heads: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """Return (first, behind the last, session id) of neighbours that belong to one session."""
    sessions = heads["session"]
    edges = np.flatnonzero(sessions[1:] != sessions[:-1]) + 1
    borders = [0, *edges.tolist(), len(heads)] if len(heads) else []
    return [(start, stop, int(sessions[start])) for start, stop in itertools.pairwise(borders)]


def num_ours(heads: NDArray[np.void]) -> int:
    """Return how many have this project's magic number and version."""
    return int(((heads["magic"] == MAGIC) & (heads["version"] == VERSION)).sum())
