"""The open UDP datagram sessions of one PS shard. A datagram session assigns received datagrams to
one worker process.

`Sessions` also stores the counters of ended datagram sessions, added up by worker.
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
    """The part of a worker's push that has arrived on the gRPC stream, before its completion."""

    push: pb.Push  # newest gRPC message of the push
    aux: Float32 | None
    num_bytes: int  # encoded size of the push's blocks, in bytes
    # change that the worker's script made to the weights outside its optimizer; None without a
    # change
    change: Update | None = None


@dataclasses.dataclass
class WorkerReassembly:
    """The datagram session of one incarnation (process start) of a worker, with its reassembler."""

    worker: int
    incarnation: int
    session: DatagramSession
    reassembler: Reassembler
    pending: PendingPush | None = None
    closed_step: int = 0  # step of the worker's newest complete push
    # error text if the worker's newest complete push holds NaN or infinity; else None
    refusal: str | None = None
    # datagram counts of the worker's newest complete push; None before the first push
    outcome: pb.DatagramOutcome | None = None
    # Bytes received in the worker's datagrams until the newest push was complete.
    bytes_before: int = 0
    # Number of late datagrams received until the worker's newest push was complete.
    late_before: int = 0
    was_member: bool = False  # True if the worker has ever been a member of the run

    def feed(self, data: memoryview, size: int, now: float) -> int:
        """Pass datagrams to the session's reassembler; return how many were genuine and new."""
        before = self.reassembler.counters.num_new
        self.reassembler.feed(data, size, now)
        # the difference of the counts is negative if a step was discarded
        return max(0, self.reassembler.counters.num_new - before)

    def add_message(self, push: pb.Push, contents: DecodedPush) -> None:
        """Record one gRPC stream message of a push; a push may consist of several messages."""
        before = self.pending
        continues = before is not None and before.push.step == push.step and before.push.more
        total = contents.num_bytes + (before.num_bytes if before and continues else 0)
        self.pending = PendingPush(push, contents.aux, total, contents.change)

    def on_complete(self, assembled: ReassembledStep) -> int:
        """Record that the pending push of the worker is complete.

        Returns:
            The bytes received in datagrams since the previous push was complete.
        """
        self.pending = self.refusal = None
        counters = self.reassembler.counters
        late, num_bytes = sum(counters.num_late), sum(counters.num_bytes)
        num_late, self.late_before = late - self.late_before, late
        self.closed_step = assembled.step
        self.outcome = messages.outcome_to_message(assembled, num_late)
        in_datagrams, self.bytes_before = num_bytes - self.bytes_before, num_bytes
        return in_datagrams


class Sessions:
    """A shard's open datagram sessions, by worker id and by session id; a caller must hold a lock.

    Args:
        new_reassembler: Function that creates the reassembler (of stream messages and datagrams) of
            a new session.
        entropy: Function that returns the given number of random bytes, for session ids and signing
            keys.
    """

    def __init__(
        self,
        new_reassembler: Callable[[DatagramSession], Reassembler],
        entropy: Callable[[int], bytes],
    ) -> None:
        self._new_reassembler, self._entropy = new_reassembler, entropy
        self._by_worker: dict[int, WorkerReassembly] = {}
        self._by_id: dict[int, WorkerReassembly] = {}
        # Worker id -> sum of the counters of all ended sessions of the worker.
        self._ended: dict[int, ReassemblyCounters] = {}

    def __iter__(self) -> Iterator[WorkerReassembly]:
        """Iterate over a copy of the open datagram sessions, so that the caller may close
        sessions.
        """
        return iter(list(self._by_worker.values()))

    def of_worker(self, worker: int) -> WorkerReassembly | None:
        """Return the open datagram session of a worker's newest or earlier process, or None."""
        return self._by_worker.get(worker)

    def with_id(self, session_id: int) -> WorkerReassembly | None:
        """Return the open datagram session with this id; None if no open session has the id."""
        return self._by_id.get(session_id)

    def ids(self) -> list[int]:
        """Return the ids of all open datagram sessions."""
        return list(self._by_id)

    def open(self, worker: int, incarnation: int) -> DatagramSession:
        """Return the datagram session of a worker's incarnation (process).

        When a new process of a worker opens a datagram session, the session of its earlier process
        ends.
        """
        current = self._by_worker.get(worker)
        if current is not None and current.incarnation == incarnation:
            return current.session
        self.close(worker)
        session_id = int.from_bytes(self._entropy(_SESSION_BYTES), "little")
        session = DatagramSession(session_id, self._entropy(_KEY_BYTES), worker)
        opened = WorkerReassembly(worker, incarnation, session, self._new_reassembler(session))
        self._by_worker[worker] = self._by_id[session_id] = opened
        return session

    def close(self, worker: int) -> None:
        """End a worker's datagram session, if open, and add its counters to the worker's sum."""
        ended = self._by_worker.pop(worker, None)
        if ended is not None:
            del self._by_id[ended.session.id]
            self.add_counters([(worker, ended.reassembler.counters)])

    def leavers(self, members: Iterable[int]) -> list[int]:
        """Return the workers that have left the run but still have open datagram sessions."""
        staying, leaving = set(members), []
        for session in self:
            if session.worker in staying:
                session.was_member = True
            elif session.was_member:
                leaving.append(session.worker)
        return leaving

    def counters(self) -> list[tuple[int, ReassemblyCounters]]:
        """Return (worker id, counters) pairs of open sessions, and of each worker's ended
        sessions.
        """
        return [
            *self._ended.items(),
            *((session.worker, session.reassembler.counters) for session in self),
        ]

    def add_counters(self, ended: Iterable[tuple[int, ReassemblyCounters]]) -> None:
        """Add (worker id, counters) pairs of ended datagram sessions to the workers' sums."""
        for worker, counters in ended:
            before = self._ended.get(worker)
            self._ended[worker] = counters if before is None else before.plus(counters)
