"""The worker's end of the datagram path to one shard: a thread that sends batches by priority.

`Outbox` holds the batches that wait, one queue per channel, emptied strictly by priority; it knows
no socket and no clock. `UdpSender` is the thread with the sockets.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from absl import logging

from thinwire.proto.token_bucket import TokenBucket
from thinwire.proto.udp.sockets import SOL_UDP, UDP_SEGMENT
from thinwire.proto.udp.types import ChannelCounts, DatagramBatch

#: Linux cuts one buffer into at most this many datagrams (newer versions: 128) ...
MAX_SEGMENTS = 64
#: ... and one packet, before it is cut, has at most 65,535 bytes with its IPv6 and UDP headers.
MAX_SEND_BYTES = 65_535 - 48


@dataclasses.dataclass
class QueuedBatch:
    """A batch of which some datagrams may have left already."""

    batch: DatagramBatch
    step: int
    num_taken: int = 0
    signed: bool = False


@dataclasses.dataclass(frozen=True)
class SendBurst:
    """Datagrams of one batch that are to leave in one system call."""

    waiting: QueuedBatch
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
        self._queues: tuple[collections.deque[QueuedBatch], ...] = tuple(
            collections.deque() for _ in range(channels)
        )
        self._max_late = max_late

    def __bool__(self) -> bool:
        return any(self._queues)

    def put(self, batches: Sequence[DatagramBatch], step: int) -> None:
        """Queue batches of one step and drop what they make outdated."""
        for queue, counts in zip(self._queues, self.counts, strict=True):
            while queue and step - queue[0].step > self._max_late:
                old = queue.popleft()
                counts.outdated += old.batch.count - old.num_taken
        for batch in batches:
            self._queues[batch.channel - 1].append(QueuedBatch(batch, step))

    def take(self, max_bytes: int) -> SendBurst | None:
        """Return the next datagrams, at least one and otherwise within ``max_bytes``."""
        queue = next(filter(None, self._queues), None)
        if queue is None:
            return None
        waiting = queue[0]
        size = waiting.batch.size
        most = max(1, min(MAX_SEGMENTS, min(max_bytes, MAX_SEND_BYTES) // max(1, size)))
        piece = SendBurst(
            waiting, waiting.num_taken, min(most, waiting.batch.count - waiting.num_taken)
        )
        waiting.num_taken += piece.count
        if waiting.num_taken == waiting.batch.count:
            queue.popleft()
        return piece

    def put_back(self, piece: SendBurst, num_sent: int) -> None:
        """Undo taking a piece but for its first ``num_sent`` datagrams; before the next take."""
        piece.waiting.num_taken = piece.first + num_sent
        queue = self._queues[piece.waiting.batch.channel - 1]
        if not queue or queue[0] is not piece.waiting:
            queue.appendleft(piece.waiting)

    def clear(self) -> None:
        """Forget all that waits."""
        for queue in self._queues:
            queue.clear()


#: Paced datagrams leave in pieces of this duration.
_PIECE_SECONDS = 1e-3
_SHORTEST_SLEEP_SECONDS = 5e-5  # as short as the system's timers are good for
_RETRY_SECONDS = 5e-4
_GIVE_UP_SECONDS = 0.25
_JOIN_SECONDS = 5.0
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)


class SendingSocket(Protocol):
    """What the sender needs of a connected, non-blocking `socket.socket`."""

    def send(self, data: Any, /) -> int:
        """Send one datagram."""

    def sendmsg(self, buffers: Any, ancillary: Any, /) -> int:
        """Send one buffer with instructions for the kernel."""

    def close(self) -> None:
        """Close it."""


@dataclasses.dataclass(frozen=True)
class UdpSettings:
    """How one worker sends to one shard."""

    key: bytes = dataclasses.field(repr=False)  # signs the datagrams
    mtu: int = 1472  # bytes of the largest datagram
    max_late: int = 5  # steps after which waiting datagrams are worth nothing
    scheme: str = "cs"  # see thinwire.proto.udp.sockets.tos
    segmentation: bool = True  # let the kernel cut buffers into datagrams where it can
    overhead_bytes: int = 28  # IP and UDP headers of one datagram


class UdpSender:
    """Sends through one socket per channel; see `DatagramSender`.

    One thread signs and sends, strictly by priority: before every system call it looks for the
    best channel that has something. With pacing it goes into debt by one piece of 1 ms at most,
    so that a burst never exceeds about 5 ms at the rate.

    A batch's buffer must not be written again before it is sent or dropped.

    Args:
        sockets: Channel 1 first; closed by the sender.
        sending: Key, sizes, switches.
        bucket: Paces, in bytes with IP and UDP headers; None: as fast as the kernel takes them.
        clock: Seconds; monotone.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        sockets: Sequence[SendingSocket],
        sending: UdpSettings,
        bucket: TokenBucket | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sockets = tuple(sockets)
        self._sending = sending
        self._bucket = bucket
        self._clock = clock
        self._sleep = sleep
        self._mtu = sending.mtu
        self._segmentation = sending.segmentation
        self._outbox = Outbox(len(self._sockets), sending.max_late)
        self._changed = threading.Condition()
        self._in_flight = False
        self._closed = False
        self._full_since: dict[int, float] = {}  # channel -> when the kernel began to refuse it
        self._warned = False
        self.failure: Exception | None = None  # what ended the thread before its time
        self._thread = threading.Thread(target=self._work, name="datagrams out", daemon=True)
        self._thread.start()

    @property
    def mtu(self) -> int:
        """Bytes of the largest datagram that passes; halved, once, if the path refuses it."""
        return self._mtu

    def send(self, batches: Sequence[DatagramBatch], step: int) -> None:
        """Queue batches of one step; see `DatagramSender.send`."""
        with self._changed:
            if not self._closed:
                self._outbox.put(batches, step)
                self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all has been handed to the kernel; return whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._outbox or self._in_flight), timeout_seconds
            )

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the counters, channel 1 first."""
        with self._changed:
            return tuple(dataclasses.replace(counts) for counts in self._outbox.counts)

    def close(self) -> None:
        """Drop what is queued, end the thread, close the sockets; may be called twice."""
        with self._changed:
            self._closed = True
            self._outbox.clear()
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)
        for each in self._sockets:
            each.close()

    def _work(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - the worker checks `failure`
            logging.exception("no more datagrams are sent")
            self.failure = error
            with self._changed:
                self._closed = True
                self._outbox.clear()

    def _run(self) -> None:
        while self._wait_for_work():
            wait = self._bucket.wait_seconds(self._clock()) if self._bucket else 0.0
            if wait > 0:
                self._sleep(max(wait, _SHORTEST_SLEEP_SECONDS))
                continue
            with self._changed:
                piece = self._outbox.take(self._piece_bytes())
                self._in_flight = piece is not None
            if piece is not None:
                self._carry(piece)

    def _wait_for_work(self) -> bool:
        """Wait for something to send; return False when the sender is to end."""
        with self._changed:
            if not self._outbox:
                self._changed.notify_all()  # for flush
            self._changed.wait_for(lambda: self._outbox or self._closed)
            return not self._closed

    def _piece_bytes(self) -> int:
        return MAX_SEND_BYTES if self._bucket is None else int(self._bucket.rate * _PIECE_SECONDS)

    def _carry(self, piece: SendBurst) -> None:
        """Send a piece, count it, put back or drop what the kernel did not take."""
        waiting = piece.waiting
        if not waiting.signed:
            waiting.batch.sign(self._sending.key)
            waiting.signed = True
        num_sent, error = self._transmit(piece)
        num_bytes = num_sent * (waiting.batch.size + self._sending.overhead_bytes)
        if self._bucket is not None:
            self._bucket.take(self._clock(), num_bytes)
        with self._changed:
            counts = self._outbox.counts[waiting.batch.channel - 1]
            counts.datagrams += num_sent
            counts.bytes_on_wire += num_bytes
            full = error is not None and self._settle(piece, num_sent, error, counts)
            if error is None:
                self._full_since.pop(waiting.batch.channel, None)
            self._in_flight = False
        if full:
            self._sleep(_RETRY_SECONDS)

    def _transmit(self, piece: SendBurst) -> tuple[int, OSError | None]:
        """Return how many datagrams went out, and what stopped the rest."""
        sender = self._sockets[piece.waiting.batch.channel - 1]
        size = piece.waiting.batch.size
        if self._segmentation and piece.count > 1:
            how = [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", size))]
            try:
                sender.sendmsg([piece.data], how)
                return piece.count, None
            except OSError as error:
                if error.errno in (*_FULL, errno.ECONNREFUSED, errno.EMSGSIZE):
                    return 0, error
        num_sent = 0
        data = piece.data
        try:
            while num_sent < piece.count:
                sender.send(data[num_sent * size : (num_sent + 1) * size])
                num_sent += 1
        except OSError as error:
            return num_sent, error
        if self._segmentation and piece.count > 1:  # one by one they pass: the path cannot cut them
            self._segmentation = False
            logging.warning("this path does not cut buffers into datagrams; they go one by one")
        return num_sent, None

    def _settle(
        self, piece: SendBurst, num_sent: int, error: OSError, counts: ChannelCounts
    ) -> bool:
        """Keep or drop what was not sent; return whether the kernel wants a pause."""
        channel = piece.waiting.batch.channel
        if error.errno == errno.ECONNREFUSED:  # about an earlier datagram; this one was not sent
            counts.unreachable += 1
            self._keep(piece, num_sent)
            return False
        if error.errno in _FULL:
            now = self._clock()
            since = now if num_sent else self._full_since.get(channel, now)
            self._full_since[channel] = since
            if now - since < _GIVE_UP_SECONDS:
                self._keep(piece, num_sent)
                return True
            del self._full_since[channel]
        if error.errno == errno.EMSGSIZE:
            counts.too_large += piece.count - num_sent
            self._halve(piece.waiting.batch.size)
            return False
        counts.refused += piece.count - num_sent
        self._warn(error)
        return False

    def _keep(self, piece: SendBurst, num_sent: int) -> None:
        if not self._closed:
            self._outbox.put_back(piece, num_sent)

    def _halve(self, size: int) -> None:
        if self._mtu < self._sending.mtu or size > self._mtu:
            return  # has been halved; what still waits has the old size
        self._mtu = self._sending.mtu // 2
        logging.warning(
            "the path does not carry datagrams of %d bytes; from the next step on they have %d",
            size,
            self._mtu,
        )

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logging.warning(
                "datagrams are dropped unsent: %s; more of this sort is only counted",
                error.strerror or error,
            )
