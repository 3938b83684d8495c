"""Which life of which worker a datagram is of: the open sessions of one shard, and closed books."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.routing.reassembler import ReassembledStep, Reassembler
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_SESSION_BYTES, _KEY_BYTES = 8, 32


@dataclasses.dataclass
class PendingPush:
    """What the stream has brought of the push that is being put together."""

    push: pb.Push  # the newest message of it
    aux: Float32 | None
    num_bytes: int


@dataclasses.dataclass
class WorkerReassembly:
    """One life of one worker."""

    worker: int
    incarnation: int
    session: DatagramSession
    assembler: Reassembler
    head: PendingPush | None = None
    closed_step: int = 0  # of the newest whole push
    refusal: str | None = None  # why that was not finite
    outcome: pb.DatagramOutcome | None = None  # of its datagrams
    bytes_before: int = 0  # of datagrams, when it was whole
    late_before: int = 0  # datagrams that had come late then
    was_kept: bool = False  # once, as a member's

    def hear(self, push: pb.Push, aux: Float32 | None, num_bytes: int) -> None:
        """Take in what the stream brings of a push; it may be one of several messages."""
        before = self.head
        goes_on = before is not None and before.push.step == push.step and before.push.more
        total = num_bytes + (before.num_bytes if before and goes_on else 0)
        self.head = PendingPush(push, aux, total)

    def end(self, assembled: ReassembledStep) -> int:
        """Hear that the push is whole; return how many bytes came in datagrams since the last."""
        self.head = self.refusal = None
        books = self.assembler.books
        late, num_bytes = sum(books.num_late), sum(books.num_bytes)
        came_late, self.late_before = late - self.late_before, late
        self.closed_step = assembled.step
        self.outcome = messages.outcome_to_message(assembled, came_late)
        beside, self.bytes_before = num_bytes - self.bytes_before, num_bytes
        return beside


class Sessions:
    """The open ones, by worker and by number; whoever calls holds a lock.

    Args:
        assemble: Makes the assembler of a session.
        entropy: Makes so many random bytes.
    """

    def __init__(
        self, assemble: Callable[[DatagramSession], Reassembler], entropy: Callable[[int], bytes]
    ) -> None:
        self._assemble, self._entropy = assemble, entropy
        self._by_worker: dict[int, WorkerReassembly] = {}
        self._by_number: dict[int, WorkerReassembly] = {}
        self._closed: dict[
            int, ReassemblyCounters
        ] = {}  # worker -> of all its sessions that have ended

    def __iter__(self) -> Iterator[WorkerReassembly]:
        """Go through the open ones."""
        return iter(list(self._by_worker.values()))

    def of_worker(self, worker: int) -> WorkerReassembly | None:
        """Return a worker's; it may be of an earlier life."""
        return self._by_worker.get(worker)

    def of_number(self, number: int) -> WorkerReassembly | None:
        """Return the one that datagrams with this number belong to."""
        return self._by_number.get(number)

    def numbers(self) -> list[int]:
        """Return the numbers of all."""
        return list(self._by_number)

    def open(self, worker: int, incarnation: int) -> DatagramSession:
        """Return the session of a life of a worker; an earlier life's ends."""
        found = self._by_worker.get(worker)
        if found is not None and found.incarnation == incarnation:
            return found.session
        self.close(worker)
        number = int.from_bytes(self._entropy(_SESSION_BYTES), "little")
        session = DatagramSession(number, self._entropy(_KEY_BYTES), worker)
        opened = WorkerReassembly(worker, incarnation, session, self._assemble(session))
        self._by_worker[worker] = self._by_number[number] = opened
        return session

    def close(self, worker: int) -> None:
        """End a worker's; its books stay."""
        reception = self._by_worker.pop(worker, None)
        if reception is not None:
            del self._by_number[reception.session.id]
            self.add_books([(worker, reception.assembler.books)])

    def leavers(self, members: Iterable[int]) -> list[int]:
        """Return whose sessions are to end: those who were members and are none any more."""
        staying, found = set(members), []
        for reception in self:
            if reception.worker in staying:
                reception.was_kept = True
            elif reception.was_kept:
                found.append(reception.worker)
        return found

    def books(self) -> list[tuple[int, ReassemblyCounters]]:
        """Return the books of all, by worker: the open ones', and those of closed ones in one."""
        return [*self._closed.items(), *((each.worker, each.assembler.books) for each in self)]

    def add_books(self, books: Iterable[tuple[int, ReassemblyCounters]]) -> None:
        """Count those of closed sessions; they are added up, for there may be any number."""
        for worker, each in books:
            before = self._closed.get(worker)
            self._closed[worker] = each if before is None else before.plus(each)
