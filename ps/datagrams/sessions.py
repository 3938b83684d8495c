"""Which incarnation of which worker a datagram belongs to: the open sessions of one shard.

Counters of sessions that have ended are kept here too, added up by worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.routing.reassembler import ReassembledStep, Reassembler
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.wire.push_decoder import DecodedPush

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Update

_SESSION_BYTES, _KEY_BYTES = 8, 32


@dataclasses.dataclass
class PendingPush:
    """The stream's part of the push that is being reassembled."""

    push: pb.Push  # the newest message of it
    aux: Float32 | None
    num_bytes: int
    change: Update | None = None  # of the weights, by the script itself


@dataclasses.dataclass
class WorkerReassembly:
    """The session of one incarnation of one worker."""

    worker: int
    incarnation: int
    session: DatagramSession
    reassembler: Reassembler
    pending: PendingPush | None = None
    closed_step: int = 0  # of the newest complete push
    refusal: str | None = None  # why that was not finite
    outcome: pb.DatagramOutcome | None = None  # of its datagrams
    bytes_before: int = 0  # of datagrams, when it was complete
    late_before: int = 0  # datagrams that had come late then
    was_member: bool = False  # at some time

    def add_message(self, push: pb.Push, contents: DecodedPush) -> None:
        """Record a message of a push; there may be several of one push."""
        before = self.pending
        goes_on = before is not None and before.push.step == push.step and before.push.more
        total = contents.num_bytes + (before.num_bytes if before and goes_on else 0)
        self.pending = PendingPush(push, contents.aux, total, contents.change)

    def on_complete(self, assembled: ReassembledStep) -> int:
        """Record that the push is complete.

        Returns:
            How many bytes came in datagrams since the last one was.
        """
        self.pending = self.refusal = None
        counters = self.reassembler.counters
        late, num_bytes = sum(counters.num_late), sum(counters.num_bytes)
        came_late, self.late_before = late - self.late_before, late
        self.closed_step = assembled.step
        self.outcome = messages.outcome_to_message(assembled, came_late)
        in_datagrams, self.bytes_before = num_bytes - self.bytes_before, num_bytes
        return in_datagrams


class Sessions:
    """The open sessions, by worker and by id; the caller holds a lock.

    Args:
        new_reassembler: Makes the reassembler of a session.
        entropy: Returns this many random bytes.
    """

    def __init__(
        self,
        new_reassembler: Callable[[DatagramSession], Reassembler],
        entropy: Callable[[int], bytes],
    ) -> None:
        self._new_reassembler, self._entropy = new_reassembler, entropy
        self._by_worker: dict[int, WorkerReassembly] = {}
        self._by_id: dict[int, WorkerReassembly] = {}
        # Worker -> the sum over all its sessions that have ended.
        self._ended: dict[int, ReassemblyCounters] = {}

    def __iter__(self) -> Iterator[WorkerReassembly]:
        """Iterate over the open sessions; they may be closed meanwhile."""
        return iter(list(self._by_worker.values()))

    def of_worker(self, worker: int) -> WorkerReassembly | None:
        """Return a worker's session; it may belong to an earlier incarnation."""
        return self._by_worker.get(worker)

    def with_id(self, session_id: int) -> WorkerReassembly | None:
        """Return the session that datagrams with this id belong to."""
        return self._by_id.get(session_id)

    def ids(self) -> list[int]:
        """Return the ids of all open sessions."""
        return list(self._by_id)

    def open(self, worker: int, incarnation: int) -> DatagramSession:
        """Return the session of an incarnation; that of an earlier one ends."""
        found = self._by_worker.get(worker)
        if found is not None and found.incarnation == incarnation:
            return found.session
        self.close(worker)
        session_id = int.from_bytes(self._entropy(_SESSION_BYTES), "little")
        session = DatagramSession(session_id, self._entropy(_KEY_BYTES), worker)
        opened = WorkerReassembly(worker, incarnation, session, self._new_reassembler(session))
        self._by_worker[worker] = self._by_id[session_id] = opened
        return session

    def close(self, worker: int) -> None:
        """End a worker's session, if it has one; its counters stay."""
        ended = self._by_worker.pop(worker, None)
        if ended is not None:
            del self._by_id[ended.session.id]
            self.add_counters([(worker, ended.reassembler.counters)])

    def leavers(self, members: Iterable[int]) -> list[int]:
        """Return the workers whose sessions are to end: they were members and are no longer."""
        staying, found = set(members), []
        for each in self:
            if each.worker in staying:
                each.was_member = True
            elif each.was_member:
                found.append(each.worker)
        return found

    def counters(self) -> list[tuple[int, ReassemblyCounters]]:
        """Return (worker, counters) of all ended sessions together, and of each open one."""
        return [*self._ended.items(), *((each.worker, each.reassembler.counters) for each in self)]

    def add_counters(self, ended: Iterable[tuple[int, ReassemblyCounters]]) -> None:
        """Add (worker, counters) of ended sessions to the sums: there may be any number of them."""
        for worker, counters in ended:
            before = self._ended.get(worker)
            self._ended[worker] = counters if before is None else before.plus(counters)
