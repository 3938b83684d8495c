"""A worker's datagrams to one shard on the virtual clock."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from cluster.simulator.clock import Clock
from cluster.simulator.pipes import ClassPipe
from proto.channel_priority import class_of_channel
from proto.link_traffic import Arrival
from proto.priority_link import HEADER_BYTES
from proto.token_bucket import TokenBucket
from proto.udp_outbox import MAX_SEND_BYTES, Outbox, Piece
from proto.udp_sender import Sending
from proto.udp_types import Batch, ChannelCounts

#: Takes datagrams of one size that arrive together: the bytes, the size of each, the channel.
Deliver = Callable[[memoryview, int, int], None]
_PIECE_SECONDS = 1e-3  # of paced datagrams that leave together
_SHORTEST_WAIT_SECONDS = 5e-5


class SimulatedSender:
    """What `UdpSender` over an emulated link is to a real worker; see `DatagramSender`.

    The same queues by channel, pacing and link, without a thread.

    Args:
        clock: Virtual time.
        pipe: The worker's way up.
        sending: Key, sizes, marks.
        channels: How many there are.
        deliver: Hears of what comes through.
        bucket: Paces all senders of the worker; None: what the link takes.
    """

    failure: Exception | None = None  # there is no thread that could fail

    def __init__(
        self,
        clock: Clock,
        pipe: ClassPipe,
        sending: Sending,
        channels: int,
        deliver: Deliver,
        bucket: TokenBucket | None = None,
    ) -> None:
        self._clock, self._pipe, self._sending = clock, pipe, sending
        self._deliver, self._bucket = deliver, bucket
        self._outbox = Outbox(channels, sending.max_late)
        self._classes = [
            class_of_channel(sending.scheme, channel, channels) for channel in range(channels + 1)
        ]
        self._piece_bytes = MAX_SEND_BYTES if bucket is None else int(bucket.rate * _PIECE_SECONDS)
        self._waits = self._closed = False
        pipe.on_room.append(self._run)

    @property
    def mtu(self) -> int:
        """Bytes of the largest datagram that passes."""
        return self._sending.mtu

    def send(self, batches: Sequence[Batch], step: int) -> None:
        """Queue batches of one step; see `DatagramSender.send`."""
        if not self._closed:
            self._outbox.put(batches, step)
            self._run()

    def flush(self, timeout_seconds: float) -> bool:
        """Return whether nothing is queued; virtual time cannot pass meanwhile."""
        del timeout_seconds
        return not self._outbox

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the counters, channel 1 first."""
        return tuple(dataclasses.replace(counts) for counts in self._outbox.counts)

    def close(self) -> None:
        """Drop what is queued, and deliver nothing any more; may be called twice."""
        self._closed = True
        self._outbox.clear()
        if self._run in self._pipe.on_room:
            self._pipe.on_room.remove(self._run)

    def _run(self) -> None:
        """Send what pace and link allow now."""
        while self._outbox and not self._waits:
            wait = self._bucket.wait_seconds(self._clock.now) if self._bucket else 0.0
            if wait > 0:
                self._waits = True
                when = self._clock.now + max(wait, _SHORTEST_WAIT_SECONDS)
                self._clock.at(when, self._resume)
                return
            piece = self._outbox.take(self._piece_bytes)
            if piece is None:
                return
            if not self._pipe.has_room(self._classes[piece.waiting.batch.channel]):
                self._outbox.put_back(piece, 0)
                return
            self._carry(piece)

    def _resume(self) -> None:
        self._waits = False
        self._run()

    def _carry(self, piece: Piece) -> None:
        waiting = piece.waiting
        batch = waiting.batch
        if not waiting.signed:
            batch.sign(self._sending.key)
            waiting.signed = True
        num_bytes = piece.count * (batch.size + HEADER_BYTES)
        counts = self._outbox.counts[batch.channel - 1]
        counts.datagrams += piece.count
        counts.bytes_on_wire += num_bytes
        if self._bucket is not None:
            self._bucket.take(self._clock.now, num_bytes)
        # Copied, because a batch's buffer may be used again once it has left.
        arrived = functools.partial(self._arrived, bytes(piece.data), batch.size, batch.channel)
        self._pipe.offer_datagrams(self._classes[batch.channel], batch.size, piece.count, arrived)

    def _arrived(self, data: bytes, size: int, channel: int, arrival: Arrival) -> None:
        if self._closed or arrival.indices is None:
            return
        parts = [data[at : at + size] for at in (size * arrival.indices).tolist()]
        self._deliver(memoryview(b"".join(parts)), size, channel)
