"""Datagrams of one shard's workers: whose they are, and when the push they belong to is whole.

An `ops.routing` assembler puts each worker's pushes together. This directory of theirs hears the
stream's readers, whoever receives datagrams, and the clock of the writer thread.
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

from ops.routing.assembler import Assembled, Assembler
from ops.routing.books import Books
from ops.routing.datagram_format import HEADER, MAGIC, VERSION, Session
from ops.routing.routed import Manifest
from ops.routing.transport import Transport
from ops.types import Update
from proto import manifests
from proto import thinwire_pb2 as pb
from proto.framing import Malformed
from ps import datagram_accounts, events
from ps.datagram_accounts import Received
from ps.pushes import Contents, NonFinite, PushDecoder

if TYPE_CHECKING:
    from ops.types import Float32

_SESSION_BYTES, _KEY_BYTES = 8, 32
#: No life of a worker has this number. Who pushes without a session is to say Hello again.
_NO_LIFE = 0


@dataclasses.dataclass
class _Head:
    """What the stream has brought of the push that is being put together."""

    push: pb.Push  # the newest message of it
    aux: Float32 | None
    num_bytes: int


@dataclasses.dataclass
class _Reception:
    """One life of one worker."""

    worker: int
    incarnation: int
    session: Session
    assembler: Assembler
    head: _Head | None = None
    closed_step: int = 0  # of the newest whole push
    refusal: str | None = None  # why that was not finite
    outcome: pb.Reception | None = None  # of its datagrams
    bytes_before: int = 0  # of datagrams, when it was whole
    late_before: int = 0  # datagrams that had come late then
    was_kept: bool = False  # once, as a member's


class Receptions:
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
        self._decoder, self._sizes, self._router = decoder, sizes, router
        self._deliver, self._refuse, self._wake = deliver, refuse, wake
        self._drop_rate, self._random = 0.0, np.random.default_rng(0)
        self._entropy, self._clock = entropy, clock
        self._lock = threading.RLock()  # whom pushes are delivered to may ask back
        self._by_worker: dict[int, _Reception] = {}
        self._by_session: dict[int, _Reception] = {}
        self._dropped: collections.Counter[str] = collections.Counter()
        self._closed: list[tuple[int, Books]] = []  # of sessions that have ended, by worker
        self.on_closed: Callable[[int, Assembled, Books], None] | None = None

    def obey(self, transport: Transport) -> None:
        """Lose and tell what a run's settings ask for."""
        self.lose(transport.dgt_drop_rate, transport.dgt_drop_seed)
        self.on_closed = datagram_accounts.tell if transport.dgt_info else None

    def lose(self, rate: float, seed: int) -> None:
        """Lose this fraction of what `take` gets on purpose from now on."""
        self._drop_rate, self._random = rate, np.random.default_rng(seed)

    # -- sessions ---------------------------------------------------------------------------

    def open(self, worker: int, incarnation: int) -> Session:
        """Return the session of a life of a worker; an earlier life's ends."""
        with self._lock:
            found = self._by_worker.get(worker)
            if found is not None and found.incarnation == incarnation:
                return found.session
            self._close(worker)
            number = int.from_bytes(self._entropy(_SESSION_BYTES), "little")
            session = Session(number, self._entropy(_KEY_BYTES), worker)
            assembler = Assembler(session, self._sizes, self._router)
            reception = _Reception(worker, incarnation, session, assembler)
            self._by_worker[worker] = self._by_session[number] = reception
            return session

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
            return list(self._by_session)

    def keep(self, workers: Iterable[int]) -> None:
        """End the sessions of members that are none any more.

        Who has just said Hello may not be a member yet: news of that may come later.

        Args:
            workers: All members, those included that enter with the next round.
        """
        members = set(workers)
        with self._lock:
            for worker, reception in list(self._by_worker.items()):
                if worker in members:
                    reception.was_kept = True
                elif reception.was_kept:
                    self._end(worker)

    def end_all(self) -> None:
        """End all sessions; whoever pushes next is told to say Hello again."""
        with self._lock:
            for worker in list(self._by_worker):
                self._end(worker)

    def _end(self, worker: int) -> None:
        """End a session; a push that is being put together will never be whole: refuse it."""
        head = self._by_worker[worker].head
        self._close(worker)
        if head is None or head.push.more:
            return
        try:
            self._pass_on(worker, head.push, head.aux, _NO_LIFE)
        except NonFinite as error:
            self._refuse(worker, head.push.step, str(error))

    def _close(self, worker: int) -> None:
        reception = self._by_worker.pop(worker, None)
        if reception is not None:
            del self._by_session[reception.session.id]
            self._closed.append((worker, reception.assembler.books))

    # -- coming in --------------------------------------------------------------------------

    def take(self, data: memoryview, size: int) -> int:
        """Take in datagrams of `size` bytes, one after the other; the last may be shorter.

        Whose they are is looked up before anything is spent on their contents.

        Returns:
            How many were worth it: genuine and not here before; or lost on purpose.
        """
        if not self._drop_rate:
            return self.take_from_stream(data, size)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        with self._lock:
            lives = self._random.random(len(pieces)) >= self._drop_rate
            num_lost = int(len(pieces) - lives.sum())
            self._dropped["on purpose"] += num_lost
        left = [piece for piece, survives in zip(pieces, lives, strict=True) if survives]
        return num_lost + self.take_from_stream(memoryview(b"".join(left)), size)

    def take_from_stream(self, data: memoryview, size: int) -> int:
        """Take in datagrams that came where nothing is lost, on purpose neither; as `take`."""
        heads = _heads(data, size)
        taken = 0
        with self._lock:
            self._dropped["truncated"] += -(-len(data) // size) - len(heads)
            for start, stop, number in _runs(heads):
                reception = self._by_session.get(number)
                if reception is None:
                    self._count_strangers(heads[start:stop])
                else:
                    taken += self._feed(reception, data[start * size : stop * size], size)
        return taken

    def _count_strangers(self, heads: np.ndarray) -> None:
        ours = int(((heads["magic"] == MAGIC) & (heads["version"] == VERSION)).sum())
        self._dropped["unknown session"] += ours
        self._dropped["not Thinwire's"] += len(heads) - ours

    def _feed(self, reception: _Reception, data: memoryview, size: int) -> int:
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
        manifest = manifests.from_message(push.manifest)
        with self._lock:
            reception = self._by_worker.get(worker)
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
        self, reception: _Reception, push: pb.Push, contents: Contents, manifest: Manifest
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
                reception.head = _Head(push, contents.aux, contents.num_bytes)
                self._finish(reception, again)
            return
        before = reception.head
        going_on = before is not None and before.push.step == push.step and before.push.more
        total = contents.num_bytes + (before.num_bytes if before and going_on else 0)
        reception.head = _Head(push, contents.aux, total)
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
            deadlines = [each.assembler.next_deadline() for each in self._by_worker.values()]
        return min((when for when in deadlines if when is not None), default=None)

    def tick(self) -> None:
        """Hand over what has waited long enough."""
        with self._lock:
            now = self._clock()
            for reception in self._by_worker.values():
                self._settle(reception, now)

    def _settle(self, reception: _Reception, now: float) -> None:
        assembled = reception.assembler.close(now)
        if assembled is not None:
            if self.on_closed is not None:
                self.on_closed(reception.worker, assembled, reception.assembler.books)
            self._finish(reception, assembled)

    def _finish(self, reception: _Reception, assembled: Assembled) -> None:
        head = reception.head
        if head is None:
            return
        reception.head = reception.refusal = None
        late = sum(reception.assembler.books.num_late)
        came_late, reception.late_before = late - reception.late_before, late
        reception.closed_step = assembled.step
        reception.outcome = _outcome(assembled, came_late)
        if assembled.flat is not None:
            update = Update(None, assembled.flat)
        else:
            update = self._decoder.flatten(list(assembled.blocks))
        num_bytes = sum(reception.assembler.books.num_bytes)
        beside, reception.bytes_before = num_bytes - reception.bytes_before, num_bytes
        try:
            event = self._decoder.event(
                reception.worker, head.push, update, head.aux, head.num_bytes + beside
            )
        except NonFinite as error:
            reception.refusal = str(error)
            reception.assembler.refuse(assembled.step)
            self._refuse(reception.worker, head.push.step, str(error))
            return
        self._deliver(event)

    def drop(self, worker: int, step: int) -> None:
        """Hear that a whole push was refused: what of it comes late is not used either."""
        with self._lock:
            reception = self._by_worker.get(worker)
            if reception is not None:
                reception.assembler.refuse(step)

    def outcome(self, worker: int, step: int) -> pb.Reception | None:
        """Return what became of a push's datagrams, if it is the worker's newest whole one."""
        reception = self._by_worker.get(worker)  # one look: no lock
        if reception is None or reception.closed_step != step:
            return None
        return reception.outcome

    # -- books ------------------------------------------------------------------------------

    def books(self) -> list[tuple[int, Books]]:
        """Return the books of all sessions, by worker."""
        with self._lock:
            opened = [(who, each.assembler.books) for who, each in self._by_worker.items()]
            return [*self._closed, *opened]

    def received(self) -> Received:
        """Return a copy of all that was counted."""
        with self._lock:
            return datagram_accounts.received(self.books(), self._dropped)

    def restore(self, before: Received) -> None:
        """Go on counting from an earlier life of the shard."""
        with self._lock:
            self._closed.extend(before.workers.items())
            self._dropped.update(before.dropped)


def _heads(data: memoryview, size: int) -> np.ndarray:
    """Return the headers of whole enough datagrams, as a view."""
    count = len(data) // size if size >= HEADER.itemsize else 0
    if size >= HEADER.itemsize and len(data) - count * size >= HEADER.itemsize:
        count += 1  # the last one, shorter
    return np.ndarray((count,), HEADER, data, strides=(size,)) if count else np.empty(0, HEADER)


def _runs(heads: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first, behind the last, session) of datagrams in a row with one session number."""
    sessions = heads["session"]
    edges = np.flatnonzero(sessions[1:] != sessions[:-1]) + 1
    borders = [0, *edges.tolist(), len(heads)] if len(heads) else []
    return [(start, stop, int(sessions[start])) for start, stop in itertools.pairwise(borders)]


def _outcome(assembled: Assembled, came_late: int) -> pb.Reception:
    return pb.Reception(
        announced=assembled.announced,
        arrived=assembled.arrived,
        late=assembled.num_late,
        came_late=came_late,
        fresh=assembled.fresh,
        filled=assembled.fill,
        bitmap=assembled.bitmap or b"",
    )
