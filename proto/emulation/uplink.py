"""An emulated link with classes of service on the real clock, for a worker's streams and datagrams.

Real streams and sockets send each message or datagram at the time that the link model computes.
"""

from __future__ import annotations

import errno
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from absl import logging

from thinwire.ops.types import BEST_EFFORT, Link
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.emulation.priority_link import PacketArrival, PriorityLink
from thinwire.proto.udp import sockets as udp_sockets

_JOIN_SECONDS = 5.0
#: Interval at which a class of service with a full queue still accepts datagrams, in seconds. A
#: sender that the link rejects for a longer time drops its datagrams.
_PATIENCE_SECONDS = 0.2


def class_of_channel(scheme: str, channel: int, channels: int) -> int:
    """Return the class of service of the packets of a datagram channel.

    Args:
        scheme: Scheme that marks packets with classes of service, one of
            `thinwire.proto.udp.sockets.SCHEMES`.
        channel: Index of the datagram channel, from 1; 0 for the reliable stream.
        channels: Number of UDP datagram channels, which have different importance; 0 if the
            packets of the stream are not marked.
    """
    tos = udp_sockets.tos(scheme, channel, channels)
    return BEST_EFFORT - (tos >> 5) if tos is not None and channels else BEST_EFFORT


class RunningLink:
    """A thread that runs the model of a worker's emulated uplink on the real clock. Thread-safe.

    Args:
        emulated: Rate, delay, loss and queue size of the link.
        seed: Seed of the link's random draws.
    """

    def __init__(self, emulated: Link, seed: int) -> None:
        self._model = PriorityLink(emulated, seed)
        self._changed = threading.Condition()
        # Result of each message on the link: its bytes on the wire, after its arrival.
        self._passing: set[Future[int]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="emulated link", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Return the time on the emulated link's clock, in seconds."""
        return time.monotonic()

    def offer(self, priority: int, sizes: Sequence[int], ready_at: float) -> list[Future[int]]:
        """Put messages of the reliable gRPC stream on the emulated link.

        Args:
            priority: Class of service, 0 (most urgent) to 7.
            sizes: Size of each message with framing, in bytes.
            ready_at: Earliest time at which the messages could have been sent, in seconds.

        Returns:
            For each message, the future of its number of bytes on the wire, which is known on the
            message's arrival; 0 if the link is closed before.
        """
        futures: list[Future[int]] = [Future() for _ in sizes]
        with self._changed:
            for size, future in zip(sizes, futures, strict=True):
                if self._closed:
                    future.set_result(0)
                    continue
                self._passing.add(future)
                self._model.offer(ready_at, priority, size, functools.partial(self._arrive, future))
            self._changed.notify_all()
        return futures

    def offer_datagrams(
        self, priority: int, size: int, count: int, deliver: Callable[[PacketArrival], None]
    ) -> None:
        """Put a worker's datagrams, which all have one size, on the emulated link.

        Args:
            priority: Class of service, 0 (most urgent) to 7.
            size: UDP payload of one datagram, in bytes.
            count: Number of datagrams to put on the link.
            deliver: Function called by the link's thread with each arrival of these datagrams.
        """
        with self._changed:
            if not self._closed:
                self._model.offer_datagrams(self.now(), priority, size, count, deliver)
                self._changed.notify_all()

    def has_space(self, priority: int) -> bool:
        """Return True if a sender may put datagrams of a class on the link now, False if it must
        wait.
        """
        with self._changed:
            return self._model.has_space(priority)

    def close(self) -> None:
        """Drop all messages on the emulated link and wake the waiting threads. The emulated link
        may be closed twice.
        """
        with self._changed:
            self._closed = True
            for future in self._passing:
                future.set_result(0)
            self._passing.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def over(self, scheme: str, channels: int) -> Callable[[socket.socket, int], EmulatedSocket]:
        """Return a function that puts the emulated link before the socket of a datagram channel.

        `thinwire.proto.udp.sender.connect` calls the returned function with a socket and the index
        of its channel.

        Args:
            scheme: Scheme that marks packets with classes of service, one of
                `thinwire.proto.udp.sockets.SCHEMES`.
            channels: Number of UDP datagram channels, which have different importance.
        """
        return lambda below, channel: EmulatedSocket(
            below, self, class_of_channel(scheme, channel, channels)
        )

    def _arrive(self, future: Future[int], arrival: PacketArrival) -> None:
        with self._changed:
            if future in self._passing:
                self._passing.remove(future)
                future.set_result(arrival.bytes_on_wire)

    def _work(self) -> None:
        try:
            while (arrivals := self._wait_for_arrivals()) is not None:
                for arrival in arrivals:
                    arrival.item(arrival)
        except Exception:  # noqa: BLE001 - waiting threads must not wait for ever
            logging.exception("the emulated link failed and is closed")
            self.close()

    def _wait_for_arrivals(self) -> list[PacketArrival] | None:
        """Wait for the emulated link's next arrivals and return them; None if the link is
        closed.
        """
        with self._changed:
            while not self._closed:
                if arrivals := self._model.advance(self.now()):
                    return arrivals
                at = self._model.next_event()
                self._changed.wait(None if at is None else max(0.0, at - self.now()))
            return None


class PrioritySender(EmulatedSender):
    """Delays messages of a worker's streams on an emulated link that also carries the worker's
    datagrams. Thread-safe.

    The sender puts messages that are ready together on the emulated link together, so that it waits
    for the link's delay only once.

    Args:
        link: Running emulated link that carries the worker's gRPC streams.
        priority: Class of service of all gRPC streams of the worker, 0 (most urgent) to 7.
    """

    def __init__(self, link: RunningLink, priority: int) -> None:
        self._link, self._priority = link, priority

    def carry(self, num_bytes: int, ready_at: float) -> int:
        """Wait until a message has passed the emulated link; return its size on the wire in
        bytes.
        """
        return next(self.carry_all((num_bytes,), ready_at))

    def carry_all(self, sizes: Sequence[int], ready_at: float) -> Iterator[int]:
        """Wait until messages have passed the link in sequence; yield the wire bytes of each
        message.
        """
        for future in self._link.offer(self._priority, sizes, ready_at):
            yield future.result()


class EmulatedSocket:
    """A connected datagram socket behind an emulated link, with the methods of `SendingSocket`.

    If the emulated link's queue is unbounded, the socket rejects datagrams beyond the size of a
    send buffer, as the kernel does. A bounded queue of an emulated link accepts all datagrams and
    drops those that do not fit.

    Args:
        below: Real socket that sends the datagrams that have passed the emulated link; `close`
            closes this socket.
        link: Running emulated link that carries the datagrams.
        priority: Class of service of the datagrams, 0 (most urgent) to 7.
    """

    def __init__(self, below: socket.socket, link: RunningLink, priority: int) -> None:
        self._below, self._link, self._priority = below, link, priority
        self._taken_at = link.now()
        self._warned = False

    def send(self, data: Any, /) -> int:
        """Put one datagram on the emulated link.

        Raises:
            BlockingIOError: The emulated send buffer is full; the caller can try again later.
        """
        return self._offer(bytes(data), len(data))

    def sendmsg(self, buffers: Any, ancillary: Any, /) -> int:
        """Put several datagrams of equal size on the emulated link.

        Args:
            buffers: Bytes of all datagrams to send, one datagram after the other.
            ancillary: One control message, UDP_SEGMENT, with the size of a datagram in bytes.

        Raises:
            BlockingIOError: The emulated send buffer is full; the caller can try again later.
        """
        (_, _, segment), *_ = ancillary
        return self._offer(b"".join(buffers), *struct.unpack("=H", segment))

    def close(self) -> None:
        """Close the real UDP socket behind the emulated link. At the close, datagrams that are
        still on the emulated link are lost.
        """
        self._below.close()

    def _offer(self, data: bytes, size: int) -> int:
        now = self._link.now()
        if not self._link.has_space(self._priority) and now - self._taken_at < _PATIENCE_SECONDS:
            raise BlockingIOError(errno.EAGAIN, "the send buffer of the emulated link is full")
        self._taken_at = now
        deliver = functools.partial(self._deliver, memoryview(data), size)
        self._link.offer_datagrams(self._priority, size, len(data) // max(1, size), deliver)
        return len(data)

    def _deliver(self, data: memoryview, size: int, arrival: PacketArrival) -> None:
        if arrival.indices is None:
            return
        for index in arrival.indices.tolist():
            try:
                self._below.send(data[index * size : (index + 1) * size])
            # The datagram is lost, which the protocol permits for datagrams.
            except OSError as error:
                if self._below.fileno() < 0:
                    return
                if not self._warned:
                    logging.warning("an emulated link's real socket drops datagrams: %s", error)
                    self._warned = True
