"""An emulated link with classes of service on the real clock, for a worker's streams and datagrams.

Whatever passes the model is sent on over real streams and sockets, at the time the model gives.
"""

from __future__ import annotations

import errno
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from thinwire.ops.types import BEST_EFFORT, Link
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.emulation.priority_link import (
    ClassCounts,
    PacketArrival,
    PriorityLink,
    class_of,
)
from thinwire.proto.udp import sockets as udp_sockets

_JOIN_SECONDS = 5.0
#: A class that holds enough takes datagrams this often nevertheless: a sender that is refused for
#: longer drops them.
_PATIENCE_SECONDS = 0.2


def class_of_channel(scheme: str, channel: int, channels: int) -> int:
    """Return the class of service that a channel's mark stands for.

    Args:
        scheme: See `thinwire.proto.udp.sockets.tos`.
        channel: 0 for the reliable stream.
        channels: Datagram channels.
    """
    tos = udp_sockets.tos(scheme, channel, channels)
    return BEST_EFFORT if tos is None else class_of(tos >> 2)


class RunningLink:
    """A thread that lets a model's time pass; thread-safe.

    Args:
        model: The link.
        clock: Seconds; monotone.
    """

    def __init__(self, model: PriorityLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._clock = model, clock
        self._changed = threading.Condition()
        self._tickets: set[_Ticket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="emulated link", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Seconds on the link's clock."""
        return self._clock()

    @property
    def counts(self) -> tuple[ClassCounts, ...]:
        """What became of what was offered, class 0 first."""
        with self._changed:
            return self._model.counts

    def offer(self, priority: int, sizes: Sequence[int], ready_at: float) -> list[_Ticket]:
        """Put messages of the reliable stream on the link; see `PriorityLink.offer`."""
        tickets = [_Ticket() for _ in sizes]
        with self._changed:
            for size, ticket in zip(sizes, tickets, strict=True):
                if self._closed:
                    ticket.arrived.set()
                    continue
                self._tickets.add(ticket)
                self._model.offer(ready_at, priority, size, functools.partial(self._stamp, ticket))
            self._changed.notify_all()
        return tickets

    def offer_datagrams(
        self, priority: int, size: int, count: int, deliver: Callable[[PacketArrival], None]
    ) -> None:
        """Put datagrams on the link; what comes through is handed over by the link's thread."""
        with self._changed:
            if not self._closed:
                self._model.offer_datagrams(self._clock(), priority, size, count, deliver)
                self._changed.notify_all()

    def has_space(self, priority: int) -> bool:
        """See `PriorityLink.has_space`."""
        with self._changed:
            return self._model.has_space(priority)

    def close(self) -> None:
        """Forget what is on its way, and let nobody wait any more; may be called twice."""
        with self._changed:
            self._closed = True
            for ticket in self._tickets:
                ticket.arrived.set()
            self._tickets.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _stamp(self, ticket: _Ticket, arrival: PacketArrival) -> None:
        ticket.bytes_on_wire = arrival.bytes_on_wire
        ticket.arrived.set()
        with self._changed:
            self._tickets.discard(ticket)

    def _work(self) -> None:
        try:
            while (arrivals := self._wait_for_arrivals()) is not None:
                for arrival in arrivals:
                    arrival.item(arrival)
        except Exception:  # noqa: BLE001 - those who wait must not wait for ever
            logging.exception("the emulated link carries nothing any more")
            self.close()

    def _wait_for_arrivals(self) -> list[PacketArrival] | None:
        """Return what has come through; None when the link is closed."""
        with self._changed:
            while not self._closed:
                if arrivals := self._model.advance(self._clock()):
                    return arrivals
                at = self._model.next_event()
                self._changed.wait(None if at is None else max(0.0, at - self._clock()))
            return None


class _Ticket:
    """Of one message on its way."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.bytes_on_wire = 0


class PrioritySender(EmulatedSender):
    """A worker's streams over a link that they share with its datagrams; thread-safe.

    Messages that are ready together are put on the link together, so that its delay is waited for
    once.

    Args:
        link: The link.
        priority: Class of service of all streams.
    """

    def __init__(self, link: RunningLink, priority: int) -> None:
        self._link, self._priority = link, priority

    def now(self) -> float:
        """Seconds on the link's clock."""
        return self._link.now()

    def carry(self, num_bytes: int, ready_at: float) -> int:
        """Wait until a message has passed the link; return its bytes on the wire."""
        return next(self.carry_all((num_bytes,), ready_at))

    def carry_all(self, sizes: Sequence[int], ready_at: float) -> Iterator[int]:
        """Let messages pass one after the other; see `EmulatedSender.carry_all`."""
        for ticket in self._link.offer(self._priority, sizes, ready_at):
            ticket.arrived.wait()
            yield ticket.bytes_on_wire


class EmulatedSocket:
    """A connected datagram socket at the far end of an emulated link; see `SendingSocket`.

    Refuses more than a socket's buffer holds, as the kernel does, where the link's queue has no
    bound; a bounded queue takes all and drops.

    Args:
        below: Sends what comes through; closed with this one.
        link: The link.
        priority: Class of service.
    """

    def __init__(self, below: socket.socket, link: RunningLink, priority: int) -> None:
        self._below, self._link, self._priority = below, link, priority
        self._taken_at = link.now()
        self._warned = False

    def send(self, data: Any, /) -> int:
        """Put one datagram on the link.

        Raises:
            BlockingIOError: The link holds enough; try again later.
        """
        return self._offer(bytes(data), len(data))

    def sendmsg(self, buffers: Any, ancillary: Any, /) -> int:
        """Put datagrams on the link, of the size that the one instruction, UDP_SEGMENT, has.

        Raises:
            BlockingIOError: The link holds enough; try again later.
        """
        (_, _, segment), *_ = ancillary
        return self._offer(b"".join(buffers), *struct.unpack("=H", segment))

    def close(self) -> None:
        """Close the socket below; what is on its way is lost."""
        self._below.close()

    def _offer(self, data: bytes, size: int) -> int:
        now = self._link.now()
        if not self._link.has_space(self._priority) and now - self._taken_at < _PATIENCE_SECONDS:
            raise BlockingIOError(errno.EAGAIN, "the emulated link holds enough")
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
            except OSError as error:  # lost, as datagrams may be
                if self._below.fileno() < 0:
                    return
                if not self._warned:
                    logging.warning("datagrams are lost behind the emulated link: %s", error)
                    self._warned = True


class EmulatedUplink:
    """One worker's emulated uplink, for its streams and its datagrams to all shards.

    Attributes:
        link: With its counters.
        sender: Paces the streams.

    Args:
        emulated: The link.
        seed: Of what befalls on it.
        dscp: The mark of the streams' packets; None: not marked.
    """

    def __init__(self, emulated: Link, seed: int, dscp: int | None) -> None:
        self.link = RunningLink(PriorityLink(emulated, seed))
        priority = BEST_EFFORT if dscp is None else class_of(dscp)
        self.sender = PrioritySender(self.link, priority)

    def over(self, scheme: str, channels: int) -> Callable[[socket.socket, int], EmulatedSocket]:
        """Return what puts the link before a channel's socket, for `thinwire.proto.udp.connect`.

        Args:
            scheme: How datagrams are marked; see `thinwire.proto.udp.sockets.tos`.
            channels: How many channels there are.
        """
        return lambda below, channel: EmulatedSocket(
            below, self.link, class_of_channel(scheme, channel, channels)
        )

    def close(self) -> None:
        """End; whoever waits goes on."""
        self.link.close()
