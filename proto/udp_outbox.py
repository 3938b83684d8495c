"""What waits to be sent: a queue per channel, emptied strictly by priority; no socket, no clock."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from proto.udp_types import Batch, ChannelCounts

#: Linux cuts one buffer into at most this many datagrams (newer versions: 128) ...
MAX_SEGMENTS = 64
#: ... and one packet, before it is cut, has at most 65,535 bytes with its IPv6 and UDP headers.
MAX_SEND_BYTES = 65_535 - 48


@dataclasses.dataclass
class Waiting:
    """A batch of which some datagrams may have left already."""

    batch: Batch
    step: int
    num_taken: int = 0
    signed: bool = False


@dataclasses.dataclass(frozen=True)
class Piece:
    """Datagrams of one batch that are to leave in one system call."""

    waiting: Waiting
    first: int
    count: int

    @property
    def data(self) -> memoryview:
        """Its datagrams, one after the other."""
        size = self.waiting.batch.size
        return self.waiting.batch.data[self.first * size : (self.first + self.count) * size]


class Outbox:
    """Strict priority: a channel's datagrams go only when all better channels have none.

    Args:
        channels: 1..channels.
        max_late: A batch is outdated when one more than this many steps newer is put.
    """

    def __init__(self, channels: int, max_late: int) -> None:
        self.counts = tuple(ChannelCounts() for _ in range(channels))
        self._queues: tuple[collections.deque[Waiting], ...] = tuple(
            collections.deque() for _ in range(channels)
        )
        self._max_late = max_late

    def __bool__(self) -> bool:
        return any(self._queues)

    def put(self, batches: Sequence[Batch], step: int) -> None:
        """Queue batches of one step and drop what they make outdated."""
        for queue, counts in zip(self._queues, self.counts, strict=True):
            while queue and step - queue[0].step > self._max_late:
                old = queue.popleft()
                counts.outdated += old.batch.count - old.num_taken
        for batch in batches:
            self._queues[batch.channel - 1].append(Waiting(batch, step))

    def take(self, max_bytes: int) -> Piece | None:
        """Return the next datagrams, at least one and otherwise within ``max_bytes``."""
        queue = next(filter(None, self._queues), None)
        if queue is None:
            return None
        waiting = queue[0]
        size = waiting.batch.size
        room = max(1, min(MAX_SEGMENTS, min(max_bytes, MAX_SEND_BYTES) // max(1, size)))
        piece = Piece(
            waiting, waiting.num_taken, min(room, waiting.batch.count - waiting.num_taken)
        )
        waiting.num_taken += piece.count
        if waiting.num_taken == waiting.batch.count:
            queue.popleft()
        return piece

    def put_back(self, piece: Piece, num_sent: int) -> None:
        """Undo taking a piece but for its first ``num_sent`` datagrams; before the next take."""
        piece.waiting.num_taken = piece.first + num_sent
        queue = self._queues[piece.waiting.batch.channel - 1]
        if not queue or queue[0] is not piece.waiting:
            queue.appendleft(piece.waiting)

    def clear(self) -> None:
        """Forget all that waits."""
        for queue in self._queues:
            queue.clear()
