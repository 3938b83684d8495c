"""The worker's end of the datagram path to a shard: a thread that sends datagrams by priority.

`Outbox` holds the queued batches of datagrams in one queue per channel and returns them strictly by
priority. `Outbox` uses neither sockets nor a clock. `UdpSender` is the sending thread with the UDP
sockets.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from absl import logging

from thinwire.ops.routing.counters import SummableCounts
from thinwire.ops.routing.packetizer import SealedBatch
from thinwire.ops.types import ConfigurationError
from thinwire.proto.token_bucket import TokenBucket
from thinwire.proto.udp import sockets as udp_sockets
from thinwire.proto.udp.sockets import SOL_UDP, UDP_SEGMENT

#: Linux splits one buffer into at most 64 datagrams (newer versions: 128).
MAX_SEGMENTS = 64
#: A buffer that the kernel splits into datagrams has at most 65,535 bytes, with IPv6 and UDP
#: headers.
MAX_SEND_BYTES = 65_535 - 48


@dataclasses.dataclass
class ChannelCounts(SummableCounts):
    """Counters of one channel of a datagram sender, since the sender was created."""

    datagrams: int = 0  # number of datagrams passed to the kernel or to the emulated link
    bytes_on_wire: int = 0  # number of bytes of the sent datagrams, with IP and UDP headers
    outdated: int = 0  # number of datagrams dropped because newer steps were queued
    # Number of datagrams dropped because the kernel failed, or accepted none for too long.
    refused: int = 0
    # Number of datagrams dropped because they are too large for the network path.
    too_large: int = 0
    # Number of reports from the receiver's machine that the port has no open socket.
    unreachable: int = 0


class DatagramSender(Protocol):
    """Sends a worker's datagrams to one shard, over sockets or over an emulated link.

    All methods of a datagram sender are thread-safe. No method of a datagram sender raises an
    exception for a lost datagram.
    """

    @property
    def mtu(self) -> int:
        """Size in bytes of the largest datagram that the network path carries; the size may
        fall.
        """

    @property
    def failure(self) -> Exception | None:
        """Exception that ended the sending thread for good; None while the thread works."""

    def send(self, batches: Sequence[SealedBatch], step: int) -> None:
        """Queue batches of datagrams of one step after earlier batches of their channels; never
        block.

        The sender drops and counts queued batches of steps that are too far behind ``step``.
        """

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the channels' datagram counters, channel 1 first."""

    def close(self) -> None:
        """Drop queued datagrams, end the sending thread and close its sockets."""


@dataclasses.dataclass
class QueuedBatch:
    """A batch of datagrams in the queue of a worker's datagram sender. The first datagrams of a
    queued batch may already be sent.

    Attributes:
        batch: Datagrams of one size and one channel.
        step: Worker's training step that the datagrams belong to.
        num_taken: Number of the batch's datagrams that `Outbox.take` has returned.
        signed: True if the batch's datagrams are signed.
    """

    batch: SealedBatch
    step: int
    num_taken: int = 0
    signed: bool = False


@dataclasses.dataclass(frozen=True)
class SendBurst:
    """Consecutive datagrams of one batch, which are sent in one system call.

    Attributes:
        waiting: The queued batch that contains the datagrams.
        first: Index in the batch of the burst's first datagram.
        count: Number of datagrams in the burst.
    """

    waiting: QueuedBatch
    first: int
    count: int

    @property
    def data(self) -> memoryview:
        """View of the burst's datagrams within the buffer of their batch."""
        size = self.waiting.batch.size
        return self.waiting.batch.data[self.first * size : (self.first + self.count) * size]


class Outbox:
    """Datagram queues with strict priority: a channel waits until all more important channels are
    empty.

    Attributes:
        counts: Datagram counters of the channels, channel 1 first.

    Args:
        channels: Number of UDP datagram channels, which have different importance.
        max_late: Number of training steps; a queued batch is dropped if the step of a new batch is
            more than this number later.
    """

    def __init__(self, channels: int, max_late: int) -> None:
        self.counts = tuple(ChannelCounts() for _ in range(channels))
        self._queues: tuple[collections.deque[QueuedBatch], ...] = tuple(
            collections.deque() for _ in range(channels)
        )
        self._max_late = max_late

    def __bool__(self) -> bool:
        return any(self._queues)

    def put(self, batches: Sequence[SealedBatch], step: int) -> None:
        """Queue batches of datagrams of one step; drop queued batches of steps that are too old."""
        for queue, counts in zip(self._queues, self.counts, strict=True):
            while queue and step - queue[0].step > self._max_late:
                old = queue.popleft()
                counts.outdated += old.batch.count - old.num_taken
        for batch in batches:
            self._queues[batch.channel - 1].append(QueuedBatch(batch, step))

    def take(self, max_bytes: int) -> SendBurst | None:
        """Return the next datagrams to send, at least one, up to ``max_bytes``; None if none is
        queued.
        """
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
        """Return a burst's unsent datagrams to their queue; call this before the next `take`."""
        piece.waiting.num_taken = piece.first + num_sent
        queue = self._queues[piece.waiting.batch.channel - 1]
        if not queue or queue[0] is not piece.waiting:
            queue.appendleft(piece.waiting)

    def clear(self) -> None:
        """Remove all queued batches of datagrams, without a change of the counters."""
        for queue in self._queues:
            queue.clear()


#: Duration in seconds of one burst of datagrams at the limited rate.
_PIECE_SECONDS = 1e-3
_SHORTEST_SLEEP_SECONDS = 5e-5  # precision of the system's timers, in seconds
_RETRY_SECONDS = 5e-4  # pause in seconds of the sender after the kernel's send buffer was full
_GIVE_UP_SECONDS = 0.25  # time in seconds with a full send buffer after which datagrams are dropped
_JOIN_SECONDS = 5.0
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)


class SendingSocket(Protocol):
    """The methods of a connected, non-blocking `socket.socket` that the sender uses."""

    def send(self, data: Any, /) -> int:
        """Send one datagram to the connected shard."""

    def sendmsg(self, buffers: Any, ancillary: Any, /) -> int:
        """Send one buffer of datagrams, with control messages for the kernel."""

    def close(self) -> None:
        """Close the UDP socket of the datagram channel."""


@dataclasses.dataclass(frozen=True)
class UdpSettings:
    """Settings of the datagrams from one worker to one shard.

    Attributes:
        key: Secret key with which the worker signs its datagrams.
        mtu: Size of the largest datagram, in bytes.
        max_late: Number of training steps after which queued datagrams are dropped.
        scheme: Scheme that marks packets with classes of service, one of
            `thinwire.proto.udp.sockets.SCHEMES`.
        segmentation: True to let the kernel split buffers into datagrams, if the kernel supports
            it.
        overhead_bytes: Bytes of one datagram's IP and UDP headers.
    """

    key: bytes = dataclasses.field(repr=False)
    mtu: int = 1472
    max_late: int = 5
    scheme: str = "cs"
    segmentation: bool = True
    overhead_bytes: int = 28


class UdpSender:
    """Sends datagrams through one UDP socket per channel; implements `DatagramSender`.

    One thread signs and sends datagrams strictly by priority: before every system call it chooses
    the most important channel with queued datagrams. With a rate limit, the sending thread exceeds
    the rate by one burst of 1 ms at most, so that datagrams are never sent faster than the rate for
    more than about 5 ms.

    The caller must not overwrite the buffer of a batch of datagrams before the batch is sent or
    dropped.

    Attributes:
        mtu: Size of the largest datagram in bytes, which is halved once if the network path rejects
            it.
        failure: Exception that ended the sending thread. None while the thread works.

    Args:
        sockets: Socket of each channel, channel 1 first; `close` closes the sockets.
        sending: Signing key, datagram size and options of the sender.
        bucket: Token bucket that limits the rate of bytes, including IP and UDP headers; None for
            no limit.
        clock: Function that returns a monotonic time, in seconds.
        sleep: Function that sleeps for a number of seconds.
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
        self.mtu = sending.mtu
        self._segmentation = sending.segmentation
        self._outbox = Outbox(len(self._sockets), sending.max_late)
        self._changed = threading.Condition()
        self._closed = False
        # Datagram channel -> time since which the channel's send buffer is full.
        self._full_since: dict[int, float] = {}
        self._warned = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="datagrams out", daemon=True)
        self._thread.start()

    def send(self, batches: Sequence[SealedBatch], step: int) -> None:
        """Queue batches of datagrams of one step; drop queued batches that are too old; never
        block.
        """
        with self._changed:
            if not self._closed:
                self._outbox.put(batches, step)
                self._changed.notify_all()

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the channels' datagram counters, channel 1 first."""
        with self._changed:
            return tuple(dataclasses.replace(counts) for counts in self._outbox.counts)

    def close(self) -> None:
        """Drop queued datagrams, end the sending thread and close its sockets."""
        with self._changed:
            self._closed = True
            self._outbox.clear()
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)
        for sock in self._sockets:
            sock.close()

    def _work(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - the worker checks `failure`
            logging.exception("the datagram sender failed: no more datagrams are sent")
            self.failure = error
            with self._changed:
                self._closed = True
                self._outbox.clear()

    def _run(self) -> None:
        bucket, most = self._bucket, MAX_SEND_BYTES
        if bucket is not None:
            most = int(bucket.rate * _PIECE_SECONDS)
        while self._wait_for_work():
            wait = bucket.wait_seconds(self._clock()) if bucket else 0.0
            if wait > 0:
                self._sleep(max(wait, _SHORTEST_SLEEP_SECONDS))
                continue
            with self._changed:
                piece = self._outbox.take(most)
            if piece is not None:
                self._carry(piece)

    def _wait_for_work(self) -> bool:
        """Wait until a datagram is queued; return False if the sender is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closed)
            return not self._closed

    def _carry(self, piece: SendBurst) -> None:
        """Send a burst of datagrams and count them; queue unsent datagrams again, or drop them."""
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
            needs_pause = error is not None and self._settle(piece, num_sent, error, counts)
            if error is None:
                self._full_since.pop(waiting.batch.channel, None)
        if needs_pause:
            self._sleep(_RETRY_SECONDS)

    def _transmit(self, piece: SendBurst) -> tuple[int, OSError | None]:
        """Send a burst of datagrams; return the number of sent datagrams and any error."""
        sender = self._sockets[piece.waiting.batch.channel - 1]
        size = piece.waiting.batch.size
        if self._segmentation and piece.count > 1:
            control_messages = [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", size))]
            try:
                sender.sendmsg([piece.data], control_messages)
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
        # `sendmsg` failed, but the datagrams could be sent one by one, so the kernel's segmentation
        # of buffers has failed.
        if self._segmentation and piece.count > 1:
            self._segmentation = False
            logging.warning(
                "the kernel cannot split buffers on this network path; sending datagrams singly"
            )
        return num_sent, None

    def _settle(
        self, piece: SendBurst, num_sent: int, error: OSError, counts: ChannelCounts
    ) -> bool:
        """Queue unsent datagrams again or drop them; return True if the kernel needs a pause."""
        channel = piece.waiting.batch.channel
        # The error ECONNREFUSED concerns an earlier datagram; the present datagram was not sent.
        if error.errno == errno.ECONNREFUSED:
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
        if not self._warned:
            self._warned = True
            logging.warning(
                "dropping unsent datagrams: %s; further drops are counted but not logged",
                error.strerror or error,
            )
        return False

    def _keep(self, piece: SendBurst, num_sent: int) -> None:
        if not self._closed:
            self._outbox.put_back(piece, num_sent)

    def _halve(self, size: int) -> None:
        if self.mtu < self._sending.mtu or size > self.mtu:
            # The datagram size `mtu` is halved already, but queued datagrams may still have the old
            # size.
            return
        self.mtu = self._sending.mtu // 2
        logging.warning(
            "the network path does not carry datagrams of %d bytes; the next steps use %d bytes",
            size,
            self.mtu,
        )


#: Largest burst of a rate-limited datagram sender, in seconds at its rate. After a late wake-up,
#: the sender sends at most this burst faster than its rate.
_BURST_SECONDS = 4e-3

#: Function that wraps a channel's socket into a `SendingSocket`, which closes the socket.
Over = Callable[[socket.socket, int], SendingSocket]


def pacing(mbps: float) -> TokenBucket | None:
    """Return a token bucket (rate limiter) of a worker's senders for a rate in Mbit/s; None for
    0.
    """
    rate = mbps * 1e6 / 8
    return TokenBucket(rate, rate * _BURST_SECONDS) if mbps > 0 else None


def connect(
    host: str,
    ports: Sequence[int],
    sending: UdpSettings,
    bucket: TokenBucket | None = None,
    over: Over | None = None,
) -> UdpSender:
    """Return a sender of datagrams from a worker to a shard.

    If the route to the shard is known to carry only datagrams smaller than ``sending.mtu``, the
    datagram size is the route's limit, but at least half of ``sending.mtu``.

    Args:
        host: Host name or address of the shard.
        ports: UDP port of each channel, channel 1 first.
        sending: Signing key, datagram size and options of the sender.
        bucket: Token bucket that limits the rate of the datagrams; None for no limit.
        over: Function that puts an emulated link before each socket; None for no emulated link.

    Raises:
        ConfigurationError: The host cannot be reached, or half of ``sending.mtu`` is still too
            large for the route.
    """
    sockets = udp_sockets.connect(host, ports, sending.scheme)
    limit = udp_sockets.path_limit(sockets[0]) if sockets else None
    mtu = sending.mtu if limit is None else min(sending.mtu, limit)
    if mtu < sending.mtu // 2:
        for udp_socket in sockets:
            udp_socket.close()
        raise ConfigurationError(
            f"the route to {host} carries datagrams of {mtu} bytes, less than half of "
            f"--dgt_mtu={sending.mtu}; set --dgt_mtu={mtu} or less"
        )
    if mtu < sending.mtu:
        logging.info(
            "--dgt_mtu=%d is too large for the route to %s: sending datagrams of %d bytes",
            sending.mtu,
            host,
            mtu,
        )
    family = sockets[0].family if sockets else socket.AF_INET
    sending = dataclasses.replace(
        sending,
        mtu=mtu,
        segmentation=sending.segmentation and all(map(udp_sockets.splits_sent, sockets)),
        overhead_bytes=udp_sockets.overhead_bytes(family),
    )
    senders = sockets if over is None else [over(sock, i) for i, sock in enumerate(sockets, 1)]
    return UdpSender(senders, sending, bucket)
