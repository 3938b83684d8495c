"""Datagrams of one shard's workers: whose they are, and when the push they belong to is whole.

An `ops.routing` assembler puts each worker's pushes together. This directory of theirs hears the
stream's readers, whoever receives datagrams, and the clock of the writer thread.

Datagrams as they were received, many in a row: whose they claim to be, and losing some.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.routing.base import Manifest, Transport
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import HEADER, MAGIC, VERSION, DatagramSession
from thinwire.ops.routing.reassembler import ReassembledStep, Reassembler
from thinwire.ops.types import Update
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.datagrams import counters as datagrams_counters
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.datagrams.sessions import PendingPush, Sessions, WorkerReassembly
from thinwire.ps.wire.push_decoder import DecodedPush, NonFinite, PushDecoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32


def heads_of(data: memoryview, size: int) -> NDArray[np.void]:
    """Return the headers of whole enough datagrams of `size` bytes in a row, as a view."""
    count = len(data) // size if size >= HEADER.itemsize else 0
    if size >= HEADER.itemsize and len(data) - count * size >= HEADER.itemsize:
        count += 1  # the last one, shorter
    return np.ndarray((count,), HEADER, data, strides=(size,)) if count else np.empty(0, HEADER)


def runs(heads: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """Return (first, behind the last, session) of datagrams in a row with one session number."""
    sessions = heads["session"]
    edges = np.flatnonzero(sessions[1:] != sessions[:-1]) + 1
    borders = [0, *edges.tolist(), len(heads)] if len(heads) else []
    return [(start, stop, int(sessions[start])) for start, stop in itertools.pairwise(borders)]


def num_ours(heads: NDArray[np.void]) -> int:
    """Return how many look like datagrams of this project at all."""
    return int(((heads["magic"] == MAGIC) & (heads["version"] == VERSION)).sum())


class InjectedLoss:
    """Loses datagrams on purpose.

    Args:
        rate: This fraction of them.
        seed: Of which.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._random = rate, np.random.default_rng(seed)

    def thin(self, data: memoryview, size: int) -> tuple[memoryview, int]:
        """Return what is left of datagrams of `size` bytes in a row, and how many are not."""
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        lives = self._random.random(len(pieces)) >= self._rate
        left = [piece for piece, survives in zip(pieces, lives, strict=True) if survives]
        return memoryview(b"".join(left)), len(pieces) - len(left)


#: No life of a worker has this number. Who pushes without a session is to say Hello again.
_NO_LIFE = 0


class DatagramReceiver:
    """Sessions of one shard's workers; thread-safe.

    Attributes:
        on_closed: Hears (worker, step, books) of each step that is closed.

    Args:
        decoder: Of the shard's pushes.
        sizes: Entries of each of its slots.
        router: The policy; its `uses_datagrams` is true.
        deliver: Takes each push that is whole.
        refuse: Takes (worker, step, message) of one that is not finite.
        wake: Called when `next_deadline` has come nearer.
        entropy: Makes so many random bytes.
        clock: Seconds; monotone.
    """

    def __init__(
        self,
        decoder: PushDecoder,
        sizes: list[int],
        router: Any,
        deliver: Callable[[events.Event], None],
        refuse: Callable[[int, int, str], None],
        wake: Callable[[], None],
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = decoder
        self._deliver, self._refuse, self._wake = deliver, refuse, wake
        self._losses: InjectedLoss | None = None
        self._clock = clock
        self._lock = threading.RLock()  # whom pushes are delivered to may ask back
        self._sessions = Sessions(lambda session: Reassembler(session, sizes, router), entropy)
        self._dropped: collections.Counter[str] = collections.Counter()
        self.on_closed: Callable[[int, ReassembledStep, ReassemblyCounters], None] | None = None

    def obey(self, transport: Transport) -> None:
        """Lose and tell what a run's settings ask for."""
        self.lose(transport.dgt_drop_rate, transport.dgt_drop_seed)
        self.on_closed = datagrams_counters.tell if transport.dgt_info else None

    def lose(self, rate: float, seed: int) -> None:
        """Lose this fraction of what `take` gets on purpose from now on."""
        self._losses = InjectedLoss(rate, seed) if rate else None

    # -- sessions ---------------------------------------------------------------------------

    def open(self, worker: int, incarnation: int) -> DatagramSession:
        """Return the session of a life of a worker; an earlier life's ends."""
        with self._lock:
            return self._sessions.open(worker, incarnation)

    def introduce(
        self, worker: int, incarnation: int, ports: Iterable[int], welcome: pb.Welcome
    ) -> None:
        """Tell a life of a worker where its datagrams go, and what signs them."""
        session, said = self.open(worker, incarnation), welcome.datagrams
        said.session, said.key = session.id, session.key
        said.ports.extend(ports)

    def numbers(self) -> list[int]:
        """Return the numbers of the open sessions."""
        with self._lock:
            return self._sessions.numbers()

    def keep(self, workers: Iterable[int]) -> None:
        """End the sessions of members that are none any more.

        Who has just said Hello may not be a member yet: news of that may come later.

        Args:
            workers: All members, those included that enter with the next round.
        """
        with self._lock:
            for worker in self._sessions.leavers(workers):
                self._end(worker)

    def end_all(self) -> None:
        """End all sessions; whoever pushes next is told to say Hello again."""
        with self._lock:
            for reception in self._sessions:
                self._end(reception.worker)

    def _end(self, worker: int) -> None:
        """End a session; a push that is being put together will never be whole: refuse it."""
        reception = self._sessions.of_worker(worker)
        self._sessions.close(worker)
        head = reception.head if reception is not None else None
        if head is None or head.push.more:
            return
        try:
            self._pass_on(worker, head.push, head.aux, _NO_LIFE)
        except NonFinite as error:
            self._refuse(worker, head.push.step, str(error))

    # -- coming in --------------------------------------------------------------------------

    def take(self, data: memoryview, size: int) -> int:
        """Take in datagrams of `size` bytes, one after the other; the last may be shorter.

        Whose they are is looked up before anything is spent on their contents.

        Returns:
            How many were worth it: genuine and not here before; or lost on purpose.
        """
        if self._losses is None:
            return self.take_from_stream(data, size)
        with self._lock:
            left, num_lost = self._losses.thin(data, size)
            self._dropped["on purpose"] += num_lost
        return num_lost + self.take_from_stream(left, size)

    def take_from_stream(self, data: memoryview, size: int) -> int:
        """Take in datagrams that came where nothing is lost, on purpose neither; as `take`."""
        heads = heads_of(data, size)
        taken = 0
        with self._lock:
            self._dropped["truncated"] += -(-len(data) // size) - len(heads)
            for start, stop, number in runs(heads):
                reception = self._sessions.of_number(number)
                if reception is None:
                    ours = num_ours(heads[start:stop])
                    self._dropped["unknown session"] += ours
                    self._dropped["not Thinwire's"] += stop - start - ours
                else:
                    taken += self._feed(reception, data[start * size : stop * size], size)
        return taken

    def _feed(self, reception: WorkerReassembly, data: memoryview, size: int) -> int:
        """Hand datagrams of a session on; return how many were genuine and not here before."""
        books, now = reception.assembler.books, self._clock()
        before = books.num_new
        reception.assembler.feed(data, size, now)
        taken = max(0, books.num_new - before)  # below 0 where a step was forgotten
        self._settle(reception, now)
        return taken

    def mark(self, worker: int, push: pb.Push, payload: memoryview) -> None:
        """Take in what the stream brings of a push.

        Raises:
            Malformed: It does not fit.
            NonFinite: It holds NaN or infinity.
        """
        contents = self._decoder.read(push, payload, parts=True)
        manifest = messages.manifest_from_message(push.manifest)
        with self._lock:
            reception = self._sessions.of_worker(worker)
            if reception is None or reception.incarnation != push.incarnation:
                self._pass_on(worker, push, contents.aux, _NO_LIFE)
                return
            self._mark(reception, push, contents, manifest)

    def _pass_on(self, worker: int, push: pb.Push, aux: Float32 | None, incarnation: int) -> None:
        """Let the core say no to a push of which nothing is here; it must not take it for empty."""
        update = self._decoder.flatten([])
        if not push.more:
            event = self._decoder.event(worker, push, update, aux, 0)
            self._deliver(dataclasses.replace(event, incarnation=incarnation))

    def _mark(
        self, reception: WorkerReassembly, push: pb.Push, contents: DecodedPush, manifest: Manifest
    ) -> None:
        now = self._clock()
        assembler = reception.assembler
        if push.step <= reception.closed_step:
            again = assembler.again(push.step)
            if again is None:
                # Older still: it was answered.
                self._pass_on(reception.worker, push, contents.aux, push.incarnation)
            elif not push.more:
                if reception.refusal is not None:  # whatever it says now, it was refused
                    raise NonFinite(reception.refusal)
                reception.head = PendingPush(push, contents.aux, contents.num_bytes)
                self._finish(reception, again)
            return
        reception.hear(push, contents.aux, contents.num_bytes)
        try:
            assembler.mark(push.step, contents.blocks, manifest, now)
            if not push.more:
                assembler.end(push.step, now)
        except ValueError as error:
            raise Malformed(str(error)) from error
        self._settle(reception, now)
        if reception.head is not None and not push.more:
            self._wake()

    # -- whole pushes -----------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return when `tick` is due, if ever."""
        with self._lock:
            deadlines = [each.assembler.next_deadline() for each in self._sessions]
        return min((when for when in deadlines if when is not None), default=None)

    def tick(self) -> None:
        """Hand over what has waited long enough."""
        with self._lock:
            now = self._clock()
            for reception in self._sessions:
                self._settle(reception, now)

    def _settle(self, reception: WorkerReassembly, now: float) -> None:
        assembled = reception.assembler.close(now)
        if assembled is not None:
            if self.on_closed is not None:
                self.on_closed(reception.worker, assembled, reception.assembler.books)
            self._finish(reception, assembled)

    def _finish(self, reception: WorkerReassembly, assembled: ReassembledStep) -> None:
        head = reception.head
        if head is None:
            return
        num_bytes = head.num_bytes + reception.end(assembled)
        if assembled.flat is not None:
            update = Update(None, assembled.flat)
        else:
            update = self._decoder.flatten(list(assembled.blocks))
        try:
            event = self._decoder.event(reception.worker, head.push, update, head.aux, num_bytes)
        except NonFinite as error:
            reception.refusal = str(error)
            reception.assembler.refuse(assembled.step)
            self._refuse(reception.worker, head.push.step, str(error))
            return
        self._deliver(event)

    def drop(self, worker: int, step: int) -> None:
        """Hear that a whole push was refused: what of it comes late is not used either."""
        with self._lock:
            reception = self._sessions.of_worker(worker)
            if reception is not None:
                reception.assembler.refuse(step)

    def outcome(self, worker: int, step: int) -> pb.DatagramOutcome | None:
        """Return what became of a push's datagrams, if it is the worker's newest whole one."""
        reception = self._sessions.of_worker(worker)  # one look: no lock
        if reception is None or reception.closed_step != step:
            return None
        return reception.outcome

    # -- books ------------------------------------------------------------------------------

    def books(self) -> list[tuple[int, ReassemblyCounters]]:
        """Return the books of all sessions, by worker."""
        with self._lock:
            return self._sessions.books()

    def received(self) -> DatagramCounts:
        """Return a copy of all that was counted."""
        with self._lock:
            return datagrams_counters.received(self.books(), self._dropped)

    def restore(self, before: DatagramCounts) -> None:
        """Go on counting from an earlier life of the shard."""
        with self._lock:
            self._sessions.add_books(before.workers.items())
            self._dropped.update(before.dropped)
