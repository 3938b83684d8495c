"""The shard's end of the datagram path: a thread that receives from all datagram channels.

`UdpReceiver` collects the datagrams of several receive calls in a `DatagramRun`, a buffer of
consecutive datagrams of one size. `UdpReceiver` delivers whole `DatagramRun` buffers to its
`DatagramOwner`, because an owner handles a hundred datagrams together much faster than one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from absl import logging

from thinwire.proto.token_bucket import TokenBucket
from thinwire.proto.udp import packet_filter
from thinwire.proto.udp import sockets as udp_sockets

#: Maximum number of bytes that one receive call returns.
_CALL_BYTES = 1 << 16


class DatagramRun:
    """A buffer of consecutive received datagrams of one size; only the last one may be shorter.

    Attributes:
        size: Size of each datagram in the buffer, in bytes.

    Args:
        num_bytes: Capacity of the buffer in bytes: with fewer bytes in it, the buffer accepts
            another receive call.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(num_bytes + _CALL_BYTES))
        self._fill = 0
        self.size = 0

    def __len__(self) -> int:
        return self._fill

    @property
    def free_space(self) -> memoryview:
        """Writable memory for the next receive call, large enough for any received packet."""
        return self._buffer[self._fill : self._fill + _CALL_BYTES]

    @property
    def data(self) -> memoryview:
        """View of the collected datagrams, whose memory is overwritten after the next `restart`."""
        return self._buffer[: self._fill]

    def fits(self, length: int, size: int) -> bool:
        """Return True if the buffer has space for ``length`` bytes of datagrams of ``size`` bytes
        each.
        """
        if not self._fill:
            return True
        if self._fill % self.size:  # the buffer of datagrams ends with a shorter datagram
            return False
        return size == self.size or length == size < self.size

    def add(self, length: int, size: int) -> None:
        """Add the bytes of a receive call to the buffer of datagrams, after `fits` has returned
        True.
        """
        if not self._fill:
            self.size = size
        self._fill += length

    def restart(self, length: int = 0) -> None:
        """Empty the buffer of datagrams, but move the last received ``length`` bytes to its
        start.
        """
        if length:
            self._buffer[:length] = self._buffer[self._fill : self._fill + length]
        self._fill = 0


#: Share of one CPU core that the rejected datagrams of all channels may cost together.
REJECTED_SHARE = 0.2
#: Processor seconds that a channel without recent floods may spend on rejected datagrams at first.
_REJECTED_BURST_SECONDS = 2e-3
_ROUND_BYTES = 192 << 10
_ROUND_CALLS = 64
#: A receiving round with fewer datagrams than this number is small. A small round costs 0.1 ms of
#: processor time, for one as for ten datagrams, so the rate of small rounds is limited.
_SMALL_ROUND_DATAGRAMS = 16
#: Number of small receiving rounds in a burst before the limit per second applies.
_FREE_SMALL_ROUNDS = 32
_SMALL_ROUNDS_PER_SECOND = 1000
_ANCILLARY_BYTES = 64
_JOIN_SECONDS = 5.0


class DatagramOwner(Protocol):
    """Handler of received datagrams, whose methods the receiving thread calls."""

    def deliver(self, channel: int, data: memoryview, size: int) -> int:
        """Handle consecutive datagrams of ``size`` bytes each; the last one may be shorter.

        Args:
            channel: Number of the datagram channel; channel 1 is the most important one.
            data: The received datagrams, whose memory is overwritten after this call returns.
            size: Size of each datagram in the buffer, in bytes.

        Returns:
            Number of accepted datagrams. Foreign, broken and repeated datagrams count as rejected.
            A valid datagram that a test drops on purpose counts as accepted.
        """

    def next_deadline(self) -> float | None:
        """Return the time on the receiver's clock at which `tick` must be called; None: never."""

    def tick(self, now: float) -> None:
        """Do the work of the datagrams' owner that is due at the time ``now``, so that
        `next_deadline` becomes later.
        """


@dataclasses.dataclass
class ReceiverCounts:
    """Counters of one datagram channel at the receiver since the channel's socket was bound.

    Attributes:
        datagrams: Number of datagrams received on the channel.
        num_bytes: Bytes of the received datagrams, without IP and UDP headers.
        num_empty: Number of datagrams of 0 bytes, which are not delivered.
        taken: Number of received datagrams that the owner (the shard) accepted.
        rests: Number of times that the receiver paused reading the channel because of rejected
            datagrams.
        kernel_drops: Number of packets that the kernel's filter or a full buffer dropped; None if
            the system does not report the number. A packet may hold several joined datagrams.
    """

    datagrams: int = 0
    num_bytes: int = 0
    num_empty: int = 0
    taken: int = 0
    rests: int = 0
    kernel_drops: int | None = None


@dataclasses.dataclass
class _Channel:
    """One UDP socket, its counters, and its budget of processor time for rejected datagrams."""

    number: int
    socket: socket.socket
    rejected: TokenBucket
    counts: ReceiverCounts = dataclasses.field(default_factory=ReceiverCounts)
    rests_until: float | None = None


class UdpReceiver:
    """Receives datagrams on one socket per channel, in a thread that also runs the owner's timer.

    In each round, the receiver reads the UDP channels with waiting datagrams in the order of their
    importance, at most about 192 KiB or 64 receive calls from each channel. After each round of
    reading the UDP channels, the timer of the datagrams' owner runs. Because a round reads a
    limited amount, no datagram channel starves another channel.

    After 32 rounds of reading with fewer than 16 datagrams each in a short time, the receiving
    thread pauses 1 ms after each small round, so that more datagrams collect. The receiving
    thread's pause after small rounds delays datagrams and the owner's timer by 1 ms.

    The receiving thread charges the processor time that it spends on rejected datagrams to the
    datagrams' channel. When a channel has used up its budget of processor time, the thread does not
    read the channel's socket until the budget recovers. While a channel's socket is not read, the
    kernel fills the socket's buffer and drops further datagrams. All datagram channels together may
    spend 0.2 of a core on rejected datagrams, and each channel has an equal share of that budget. A
    datagram channel without recent floods may spend 2 ms on rejected datagrams without a pause, and
    exceeds its budget by one round of reading at most. The processor time for accepted datagrams is
    not charged to a channel's budget.

    The constructor of `UdpReceiver` binds the sockets, and `start` begins to read them.

    Attributes:
        failure: Exception that ended the receiving thread. None while the thread works.

    Args:
        address: Address to listen on: IPv4, IPv6 or a host name.
        num_channels: Number of UDP datagram channels, 1..7.
        owner: Object that handles the received datagrams, and whose timer the receiving thread
            runs.
        joining: True to let the kernel join datagrams of one size into one buffer, if it can.
        clock: Function that returns a monotonic time, in seconds.
        cpu_clock: Function that returns the processor time of the calling thread, in seconds.
        sleep: Function that sleeps for a number of seconds.

    Raises:
        ConfigurationError: The address to listen on is not an address of this machine.
    """

    def __init__(
        self,
        address: str,
        num_channels: int,
        owner: DatagramOwner,
        joining: bool = True,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._owner = owner
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sleep = sleep
        self._closed = False
        self.failure: Exception | None = None
        share = REJECTED_SHARE / max(1, num_channels)
        sockets = udp_sockets.bind(address, num_channels)
        self._joining = joining and all([udp_sockets.join_received(sock) for sock in sockets])
        self._channels = [
            _Channel(number, sock, TokenBucket(share, _REJECTED_BURST_SECONDS))
            for number, sock in enumerate(sockets, 1)
        ]
        self._run = DatagramRun(_ROUND_BYTES)
        self._small_rounds = TokenBucket(_SMALL_ROUNDS_PER_SECOND, _FREE_SMALL_ROUNDS)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        for channel in self._channels:
            self._selector.register(channel.socket, selectors.EVENT_READ, channel)
        self._thread = threading.Thread(target=self._work, name="datagrams in", daemon=True)

    @property
    def ports(self) -> tuple[int, ...]:
        """UDP port of each datagram channel, channel 1 first."""
        return tuple(channel.socket.getsockname()[1] for channel in self._channels)

    def start(self) -> None:
        """Start the thread that receives datagrams; call `start` once."""
        self._thread.start()

    def admit(self, start: bytes, offset: int, numbers: Collection[bytes]) -> bool:
        """Let the kernel drop all datagrams without a valid start and session id; thread-safe.

        While a process sent 7 million foreign datagrams per second to all ports on loopback, 99 %
        of the honest datagrams arrived with the kernel's filter, and 5 to 14 % without it.

        Args:
            start: First 4 bytes of a valid datagram.
            offset: Offset of the session id in a datagram, in bytes.
            numbers: All valid session ids, 8 bytes each, which replace an earlier set.

        Returns:
            True if the kernel filters. False if all datagrams are delivered to the owner.
        """
        # The argument of `all` is a list, not a generator, because `all` must not stop before every
        # channel's socket has a filter.
        program = packet_filter.program(start, offset, numbers)
        return all([packet_filter.attach(channel.socket, program) for channel in self._channels])

    def wake(self) -> None:
        """Make the receiving thread check the deadline of the datagrams' owner again;
        thread-safe.
        """
        with contextlib.suppress(OSError):  # the wake-up pipe holds unread bytes, or is closed
            self._wake_sender.send(b"!")

    def counts(self) -> tuple[ReceiverCounts, ...]:
        """Return a copy of all channels' datagram counters, channel 1 first, even after `close`."""
        for channel in self._channels:
            if channel.socket.fileno() >= 0:
                channel.counts.kernel_drops = udp_sockets.num_dropped(channel.socket)
        return tuple(dataclasses.replace(channel.counts) for channel in self._channels)

    def close(self) -> None:
        """End the receiving thread and close its sockets; the method may be called twice."""
        self._closed = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        self.counts()
        self._selector.close()
        for sock in (*(channel.socket for channel in self._channels), self._wake_receiver):
            sock.close()
        self._wake_sender.close()

    def _work(self) -> None:
        try:
            while not self._closed:
                self._round()
        except Exception as error:  # noqa: BLE001 - the shard checks `failure`
            logging.exception("the datagram receiver failed: no more datagrams are received")
            self.failure = error

    def _round(self) -> None:
        ready = self._selector.select(self._timeout())
        channels = [key.data for key, _ in ready if key.data is not None]
        if len(channels) < len(ready):
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
        channels.sort(key=lambda channel: channel.number)
        num_datagrams = sum([self._read(channel) for channel in channels])
        now = self._clock()
        for channel in self._channels:
            if channel.rests_until is not None and now >= channel.rests_until:
                channel.rests_until = None
                self._selector.register(channel.socket, selectors.EVENT_READ, channel)
        deadline = self._owner.next_deadline()
        if deadline is not None and now >= deadline:
            self._owner.tick(now)
        if 0 < num_datagrams < _SMALL_ROUND_DATAGRAMS:
            self._small_rounds.take(now, 1)
            if (pause := self._small_rounds.wait_seconds(now)) > 0:
                self._sleep(pause)

    def _timeout(self) -> float | None:
        times = [c.rests_until for c in self._channels if c.rests_until is not None]
        deadline = self._owner.next_deadline()
        if deadline is not None:
            times.append(deadline)
        return max(0.0, min(times) - self._clock()) if times else None

    def _read(self, channel: _Channel) -> int:
        """Deliver a channel's waiting datagrams, charge the time for rejected datagrams; return the
        number of datagrams.
        """
        started = self._cpu_clock()
        counts, run = channel.counts, self._run
        datagrams_before, taken_before = counts.datagrams, counts.taken
        enough_bytes = counts.num_bytes + _ROUND_BYTES
        for _ in range(_ROUND_CALLS):
            try:
                length, size = self._receive(channel.socket)
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # some systems report ICMP errors on an unconnected socket
            counts.datagrams += -(-length // size) if length else 1
            counts.num_bytes += length
            counts.num_empty += not length
            if not run.fits(length, size):
                self._hand_over(channel)
                run.restart(length)
            run.add(length, size)
            if counts.num_bytes >= enough_bytes:
                break
        self._hand_over(channel)
        run.restart()
        num_datagrams = counts.datagrams - datagrams_before
        num_rejected = num_datagrams - (counts.taken - taken_before)
        if num_rejected > 0:
            share = num_rejected / num_datagrams
            self._charge(channel, share * (self._cpu_clock() - started))
        return num_datagrams

    def _hand_over(self, channel: _Channel) -> None:
        if len(self._run):
            channel.counts.taken += self._owner.deliver(
                channel.number, self._run.data, self._run.size
            )

    def _receive(self, receiver: socket.socket) -> tuple[int, int]:
        """Receive datagrams into the buffer's free space; return their total length and the size of
        each.
        """
        if not self._joining:
            length = receiver.recv_into(self._run.free_space)
            return length, length
        space = [self._run.free_space]
        length, ancillary, _, _ = receiver.recvmsg_into(space, _ANCILLARY_BYTES)
        for level, kind, value in ancillary:
            if level == udp_sockets.SOL_UDP and kind == udp_sockets.UDP_GRO:
                return length, struct.unpack("=i", value)[0]
        return length, length

    def _charge(self, channel: _Channel, seconds: float) -> None:
        """Charge processor time of rejected datagrams to a channel; pause it if its budget is
        spent.
        """
        now = self._clock()
        channel.rejected.take(now, seconds)
        wait = channel.rejected.wait_seconds(now)
        if wait > 0:
            channel.rests_until = now + wait
            channel.counts.rests += 1
            self._selector.unregister(channel.socket)
