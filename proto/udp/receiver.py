"""The shard's end of the datagram path: a thread that receives from all channels, and a timer.

`UdpReceiver` gathers the results of several receive calls into a `DatagramRun`, datagrams of one
size one after the other, and delivers runs to its `DatagramOwner`: an owner handles a hundred
datagrams together in much less time than one by one.
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

#: As much as one receive call can return.
_CALL_BYTES = 1 << 16


class DatagramRun:
    """Datagrams of one size, one after the other; only the last may be shorter.

    Args:
        num_bytes: A run that is shorter can be added to.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(num_bytes + _CALL_BYTES))
        self._fill = 0
        self.size = 0  # bytes of each datagram

    def __len__(self) -> int:
        return self._fill

    @property
    def free_space(self) -> memoryview:
        """Where the next receive call may write, whatever it returns."""
        return self._buffer[self._fill : self._fill + _CALL_BYTES]

    @property
    def data(self) -> memoryview:
        """What has been gathered; overwritten after the next `restart`."""
        return self._buffer[: self._fill]

    def fits(self, length: int, size: int) -> bool:
        """Whether what a call wrote, datagrams of ``size`` bytes, may be added to this run."""
        if not self._fill:
            return True
        if self._fill % self.size:  # the last one was shorter
            return False
        return size == self.size or length == size < self.size

    def add(self, length: int, size: int) -> None:
        """Take in what a call wrote, which `fits`."""
        if not self._fill:
            self.size = size
        self._fill += length

    def restart(self, length: int = 0) -> None:
        """Forget all but what a call wrote last, which begins a new run with `add`."""
        if length:
            self._buffer[:length] = self._buffer[self._fill : self._fill + length]
        self._fill = 0


#: Share of one core that datagrams nobody took may cost, all channels together ...
REJECTED_SHARE = 0.2
#: ... and each channel may spend so much of it in one go.
_REJECTED_BURST_SECONDS = 2e-3
_ROUND_BYTES = 192 << 10
_ROUND_CALLS = 64
#: A round that brings fewer datagrams is a small one. So many small ones are free, and then so many
#: per second: each costs 0.1 ms, be there one datagram or ten.
_SMALL_ROUND_DATAGRAMS = 16
_FREE_SMALL_ROUNDS = 32
_SMALL_ROUNDS_PER_SECOND = 1000
_ANCILLARY_BYTES = 64
_JOIN_SECONDS = 5.0


class DatagramOwner(Protocol):
    """Who is handed what arrives; all its methods run in the receiving thread."""

    def deliver(self, channel: int, data: memoryview, size: int) -> int:
        """Take datagrams of ``size`` bytes each, one after the other; the last may be shorter.

        ``data`` is overwritten as soon as this returns.

        Returns:
            How many were worth their time. Those that are foreign, broken or seen before are not;
            what is wanted but thrown away for a test's sake is.
        """

    def next_deadline(self) -> float | None:
        """Return when `tick` is due, on the receiver's clock; None: not at all."""

    def tick(self, now: float) -> None:
        """Do what was due; the deadline must have moved on afterwards."""


@dataclasses.dataclass
class ReceiverCounts:
    """What one channel has received since the socket was bound."""

    datagrams: int = 0
    num_bytes: int = 0  # of the datagrams, without IP and UDP headers
    num_empty: int = 0  # datagrams without a byte, which nobody is handed
    taken: int = 0  # datagrams that the owner took
    rests: int = 0  # times that rejected datagrams made the channel wait
    kernel_drops: int | None = None  # packets that `admit` or a full buffer kept out; one may be
    # several datagrams, joined; None: unknown here


class _Channel:
    """One socket, and its share of the time that rejected datagrams may cost."""

    def __init__(self, number: int, receiver: socket.socket, rejected: TokenBucket) -> None:
        self.number = number
        self.socket = receiver
        self.counts = ReceiverCounts()
        self.rejected = rejected
        self.rests_until: float | None = None


class UdpReceiver:
    """Receives on one socket per channel, in one thread, which also runs the owner's timer.

    In one round each channel that has something, the most important one first, is read for about
    192 KiB or 64 calls at most; then the timer has its turn. So no channel starves the others.

    What comes in trickles is left to gather: rounds of fewer than 16 datagrams, once there have
    been 32 of them in a short time, are taken 1 ms apart; that delays datagrams, or the timer, by
    so much.

    **Floods.** The processor time that the thread spends on datagrams the owner does not take is
    charged to their channel. A channel that has used up its part leaves its socket alone until
    time has paid for it; the kernel meanwhile fills the socket's buffer and drops the rest. All
    channels together may so spend 0.2 of a core on rejected datagrams, an equal part each; a
    channel that was quiet may spend 2 ms in one go, and overdraws by one round at most. What is
    taken costs what it costs.

    The sockets are bound when this returns; nothing is read before `start`.

    Args:
        address: To bind; IPv4, IPv6 or a name.
        num_channels: 1..7.
        owner: See `DatagramOwner`.
        joining: Let the kernel join runs of datagrams into one buffer where it can.
        clock: Seconds; monotone.
        cpu_clock: Processor seconds of the calling thread.
        sleep: Waits so many seconds.

    Raises:
        ConfigurationError: The address is not of this machine.
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
        self.failure: Exception | None = None  # what ended the thread before its time
        share = REJECTED_SHARE / max(1, num_channels)
        sockets = udp_sockets.bind(address, num_channels)
        self._joining = joining and all([udp_sockets.join_received(each) for each in sockets])
        self._channels = [
            _Channel(number, each, TokenBucket(share, _REJECTED_BURST_SECONDS))
            for number, each in enumerate(sockets, 1)
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
        """Of the channels, channel 1 first."""
        return tuple(channel.socket.getsockname()[1] for channel in self._channels)

    def start(self) -> None:
        """Begin to receive; once."""
        self._thread.start()

    def admit(self, start: bytes, offset: int, numbers: Collection[bytes]) -> bool:
        """Let the kernel keep out what is not for anybody here; from any thread, at any time.

        Measured on loopback with a process that sent 7 million foreign datagrams a second to all
        ports: of honest ones 99 % still arrived, without it 5 to 14 %.

        Args:
            start: The 4 bytes that a datagram must begin with.
            offset: Where it must have one of the numbers.
            numbers: 8 bytes each; all that are known from now on.

        Returns:
            Whether it does; if not, everything is handed to the owner.
        """
        program = packet_filter.program(start, offset, numbers)
        return all([packet_filter.attach(channel.socket, program) for channel in self._channels])

    def wake(self) -> None:
        """Make the thread read the owner's deadline again; from any thread."""
        with contextlib.suppress(OSError):  # full of earlier wake-ups, or closed
            self._wake_sender.send(b"!")

    def counts(self) -> tuple[ReceiverCounts, ...]:
        """Return a copy of the counters, channel 1 first; after `close` the last ones."""
        for channel in self._channels:
            if channel.socket.fileno() >= 0:
                channel.counts.kernel_drops = udp_sockets.num_dropped(channel.socket)
        return tuple(dataclasses.replace(channel.counts) for channel in self._channels)

    def close(self) -> None:
        """End the thread and close the sockets; may be called twice."""
        self._closed = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        self.counts()
        self._selector.close()
        for each in (*(channel.socket for channel in self._channels), self._wake_receiver):
            each.close()
        self._wake_sender.close()

    def _work(self) -> None:
        try:
            while not self._closed:
                self._round()
        except Exception as error:  # noqa: BLE001 - the shard checks `failure`
            logging.exception("no more datagrams are received")
            self.failure = error

    def _round(self) -> None:
        ready = self._selector.select(self._timeout())
        channels = [key.data for key, _ in ready if key.data is not None]
        if len(channels) < len(ready):
            self._drain_wakes()
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

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _read(self, channel: _Channel) -> int:
        """Hand over a round's worth of a channel and charge what nobody took; return its number."""
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
                continue  # an error report that some system hands to an unconnected socket
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
        """Write behind the run; return the length of what came and of each datagram in it."""
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
        """Let a channel's rejected datagrams cost it their time, and rest when it is used up."""
        now = self._clock()
        channel.rejected.take(now, seconds)
        wait = channel.rejected.wait_seconds(now)
        if wait > 0:
            channel.rests_until = now + wait
            channel.counts.rests += 1
            self._selector.unregister(channel.socket)
