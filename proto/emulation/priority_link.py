"""A model of one direction of an emulated link with classes of service.

The model of the emulated link has no threads and runs on the caller's clock. Urgent packets
overtake other packets on the link, so the arrival time of a message is unknown when the message is
sent. The caller of the link model first puts messages on the emulated link and then advances the
link's time. `PriorityLink` is the model of the emulated link; it uses `ClassQueue`, `Background`
and `draw_fates`.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.ops.types import BEST_EFFORT, ConfigurationError, Link
from thinwire.proto.emulation.link import (
    SEGMENT_BYTES,
    bytes_per_second,
    draw_losses,
    round_trip_seconds,
)

#: Number of bytes of a message that the link sends before it sends the next message of the class of
#: service, about one TCP window.
TURN_BYTES = 44 * SEGMENT_BYTES
#: Size of a packet of background traffic, in bytes.
BACKGROUND_PACKET_BYTES = 1500
#: Longest interval in seconds of background traffic that arrives as one burst.
_BACKGROUND_SECONDS = 1e-3
#: Smallest number of bursts of background traffic that fit into a bounded queue.
_LEAST_QUEUED_TURNS = 8


@dataclasses.dataclass(frozen=True)
class PacketArrival:
    """A message, or some datagrams of one size, that passed the emulated link."""

    at: float  # Time of the packet's arrival, in seconds on the link model's clock.
    item: Any  # The object that the sender passed with the message or the datagrams.
    bytes_on_wire: int  # Bytes of the message with retransmissions, or of the arrived datagrams.
    #: Indices [m] of the arrived datagrams within their train, duplicates twice; None for a
    #: message.
    indices: NDArray[np.int64] | None = None


@dataclasses.dataclass(slots=True)
class Transmission:
    """Bytes that pass the link in sequence: a message, consecutive datagrams, or background
    traffic.
    """

    priority: int
    #: Size of one packet in bytes. The link always finishes a packet that it has begun to send.
    unit: int
    left: int  # Number of bytes of the message or datagrams that have not passed the link yet.
    item: Any = None
    #: Pairs of extra delay in seconds and indices of the datagrams with this delay.
    parts: tuple[tuple[float, NDArray[np.int64] | None], ...] = ()
    total: int = 0  # Size of the whole message or of all datagrams together, in bytes.
    reliable: bool = False
    #: True for a message or datagrams, False for background traffic of other programs.
    own: bool = True


class ClassQueue:
    """Queue of one class of service on an emulated link, in first-come, first-served order.

    Attributes:
        queue: Messages, datagram trains and background bursts that wait for the link, in order of
            service.
        stream: Reliable messages that wait outside the queue, which holds one message at a time.
        has_message: True if a reliable message of this class is in the queue or passes the link
            now.
        num_own: Number of messages and datagram trains that wait for or pass the link now, without
            background traffic.
        bounded_bytes: Bytes of datagrams and background traffic that wait for or pass the link now.
        datagram_bytes: Bytes of datagrams that wait for or pass the link now.
        last_arrival: Arrival time of the newest message of this class, in seconds.
    """

    def __init__(self) -> None:
        self.queue: collections.deque[Transmission] = collections.deque()
        self.stream: collections.deque[Transmission] = collections.deque()
        self.has_message = False
        self.num_own = 0
        self.bounded_bytes = self.datagram_bytes = 0
        self.last_arrival = -math.inf

    def add(self, job: Transmission) -> None:
        """Add a message or datagrams to the end of the queue of their class of service."""
        self.num_own += job.own
        if not job.reliable:
            self.bounded_bytes += job.left
            self.datagram_bytes += job.left * job.own
        elif self.has_message:
            self.stream.append(job)
            return
        else:
            self.has_message = True
        self.queue.append(job)

    @property
    def first_turn_bytes(self) -> int:
        """Number of bytes that the first message or datagrams in the queue may send in one turn."""
        job = self.queue[0]
        return min(job.left, TURN_BYTES) if job.reliable and len(self.queue) > 1 else job.left

    def passed(self, job: Transmission, num_bytes: int) -> None:
        """Count bytes of the message or datagrams on the link as passed over the link."""
        job.left -= num_bytes
        if not job.reliable:
            self.bounded_bytes -= num_bytes
            self.datagram_bytes -= num_bytes * job.own

    def finished(self, job: Transmission) -> None:
        """Remove a message or datagrams that have passed the link; queue the next reliable
        message.
        """
        self.num_own -= job.own
        if job.reliable:
            self.has_message = bool(self.stream)
            if self.stream:
                self.queue.append(self.stream.popleft())


class Background:
    """Emulated traffic of other programs on a link: packets at a constant rate.

    Attributes:
        next_at: Time of the next burst of background packets, in seconds.
        turn_bytes: Size of one burst of background packets, in bytes.

    Args:
        link: Rates of the emulated link and of its background traffic.
        queue_bytes: Size in bytes of the queue of the background traffic's class.

    Raises:
        ConfigurationError: The background traffic takes the whole rate of the link.
    """

    def __init__(self, link: Link, queue_bytes: float) -> None:
        if link.background_mbps and not link.background_mbps < link.mbps:
            raise ConfigurationError(
                f"--link_background_mbps={link.background_mbps:g}: expected less than the rate of "
                f"the link (--link_mbps={link.mbps:g}); otherwise no traffic of a lower class "
                "passes."
            )
        self._bytes_per_second = link.background_mbps * 1e6 / 8
        turn = min(self._bytes_per_second * _BACKGROUND_SECONDS, queue_bytes / _LEAST_QUEUED_TURNS)
        self.turn_bytes = BACKGROUND_PACKET_BYTES * max(1, int(turn / BACKGROUND_PACKET_BYTES))
        self._begun_at: float | None = None
        self._number = 0  # Index of the next background burst.
        self.next_at = math.inf

    def begin(self, now: float) -> None:
        """Start the background traffic at time `now`, unless it has already started."""
        if self._begun_at is None and self._bytes_per_second:
            self._begun_at = self.next_at = now

    def skip(self, until: float) -> None:
        """Skip bursts of background traffic on an idle link before the time `until`, except the
        last.
        """
        if self._begun_at is None:
            return
        number = int((until - self._begun_at) * self._bytes_per_second / self.turn_bytes) - 1
        self._go_to(max(number, self._number))

    def take(self) -> int:
        """Return the size of the next burst of background traffic in bytes, and advance
        `next_at`.
        """
        self._go_to(self._number + 1)
        return self.turn_bytes

    def _go_to(self, number: int) -> None:
        self._number = number
        begun_at = self._begun_at or 0.0
        self.next_at = begun_at + number * self.turn_bytes / self._bytes_per_second


def draw_fates(
    random: np.random.Generator, link: Link, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw at random which datagrams of a train (consecutive datagrams of one size) are lost,
    duplicated or late.

    Args:
        random: NumPy generator of the random draws.
        link: Link with the probabilities of loss, duplication and delay.
        count: Number of datagrams in the train.

    Returns:
        (indices of datagrams that arrive in order, indices of late datagrams). The indices in both
        arrays ascend; a duplicated datagram appears twice.
    """
    indices = np.arange(count)
    if link.loss > 0:
        indices = indices[random.random(count) >= link.loss]
    if link.duplicate > 0:
        indices = np.repeat(indices, 1 + (random.random(len(indices)) < link.duplicate))
    if link.reorder <= 0:
        return indices, indices[:0]
    late = random.random(len(indices)) < link.reorder
    return indices[~late], indices[late]


#: Size of the IPv4 and UDP headers of a datagram, in bytes. Lower layers are not counted, neither
#: for datagrams nor for streams.
HEADER_BYTES = 28
#: Waiting datagram bytes of a class without a bounded queue above which a sender should wait: the
#: default send buffer of a Linux socket.
SEND_BUFFER_BYTES = 212_992
#: Longest transmission time of one train (consecutive datagrams of one size), in seconds.
_TRAIN_SECONDS = 5e-3
_LEAST_LATENESS_SECONDS = 10e-3  # Shortest extra delay of a reordered datagram, in seconds.


class PriorityLink:
    """Model of one direction of an emulated link, with strict priority by class of service.

    The emulated link serves the most urgent class that has packets, so that an urgent packet waits
    for at most one less urgent packet. Each class of service has a queue of ``link.queue_kb`` on
    the emulated link. A datagram that does not fit into its class's queue on the emulated link is
    dropped. Messages of the reliable gRPC stream wait outside the queue of their class of service.
    The queue of a class of service holds one reliable message (of a gRPC stream) at a time. A
    reliable message moves to the end of its queue after each 64 KB if other traffic waits. On an
    emulated link, a lost TCP segment of a message is sent again one round trip later and delays all
    later messages, as in `LinkModel`. With messages of a single class of service only,
    `PriorityLink` and `LinkModel` compute equal times. The emulated link loses, delays (by one link
    delay, at least 10 ms) or duplicates datagrams with given probabilities. Background traffic
    arrives at the emulated link at a constant rate and waits in the queue of its class, in order of
    arrival.

    All random numbers of a message are drawn when the caller puts it on the emulated link, and
    every event on the link has an exact time. The arrival times on the emulated link do not depend
    on how often `advance` is called. The methods of the link model take times in seconds. If a
    caller passes a time before the time of its previous call, the link uses the previous call's
    time.

    Args:
        link: Rate, delay, loss, queue size, background traffic and datagram probabilities.
        seed: Seed of the link's random draws.

    Raises:
        ConfigurationError: The background traffic takes the whole rate of the link.
    """

    def __init__(self, link: Link, seed: int = 0) -> None:
        self._link = link
        self._rate = bytes_per_second(link.mbps)
        self._delay = link.delay_ms / 1e3
        self._round_trip = round_trip_seconds(link)
        self._lateness = max(self._delay, _LEAST_LATENESS_SECONDS)
        self._queue_bytes = link.queue_kb * 1e3 if link.queue_kb > 0 else math.inf
        #: Generator of random losses, whose draws have the order of the draws in LinkModel.
        self._random = np.random.default_rng(seed)
        self._fates = np.random.default_rng([seed, 1])
        self._classes = [ClassQueue() for _ in range(BEST_EFFORT + 1)]
        self._current: Transmission | None = None
        #: Number of bytes that the current message or datagrams may send in their turn.
        self._turn_bytes = 0
        #: Start and end of the current turn on the link, in seconds.
        self._started = self._ends = -math.inf
        #: Time at which the link may begin to send the next message or datagrams, in seconds.
        self._free_at = -math.inf
        self._now = -math.inf
        self._arrivals: list[tuple[float, int, PacketArrival]] = []
        self._numbers = itertools.count()
        self._background = Background(link, self._queue_bytes)

    def has_space(self, priority: int) -> bool:
        """Return True if a sender may put datagrams of a class on the link now, False if it must
        wait.

        With a bounded queue, `has_space` is always True, because the queue drops datagrams without
        a report to the sender.
        """
        waiting = self._classes[priority].datagram_bytes
        return math.isfinite(self._queue_bytes) or waiting < SEND_BUFFER_BYTES

    # -- input ------------------------------------------------------------------------------

    def offer(self, now: float, priority: int, num_bytes: int, item: Any) -> None:
        """Put a message of the reliable gRPC stream on the emulated link.

        Args:
            now: Current time on the caller's clock, in seconds.
            priority: Class of service, 0 (most urgent) to 7.
            num_bytes: Size of the message with framing, in bytes.
            item: Any object, which the `PacketArrival` of the message contains.
        """
        self._background.begin(now)
        now = self._come_to(now)
        resent, rounds = draw_losses(self._random, self._link.loss, num_bytes)
        parts = ((rounds * self._round_trip, None),)
        size = num_bytes + resent
        self._add(
            Transmission(priority, SEGMENT_BYTES, size, item, parts, size, reliable=True), now
        )

    def offer_datagrams(self, now: float, priority: int, size: int, count: int, item: Any) -> int:
        """Put several datagrams of one size on the emulated link together.

        Args:
            now: Current time on the caller's clock, in seconds.
            priority: Class of service, 0 (most urgent) to 7.
            size: UDP payload of one datagram, in bytes.
            count: Number of datagrams to put on the link.
            item: Any object, which every `PacketArrival` of the datagrams contains.

        Returns:
            Number of datagrams that fit into the queue, counted from the first one.
        """
        self._background.begin(now)
        now = self._come_to(now)
        unit = size + HEADER_BYTES
        fitting = self._fitting(priority, unit, count, now)
        fates = draw_fates(self._fates, self._link, fitting)
        together = fitting
        if math.isfinite(self._rate):
            together = max(1, int(_TRAIN_SECONDS * self._rate / unit))
        for first in range(0, fitting, max(1, together)):
            stop = min(first + together, fitting)
            cuts = [indices[slice(*np.searchsorted(indices, (first, stop)))] for indices in fates]
            late = zip((0.0, self._lateness), cuts, strict=True)
            parts = tuple((extra, indices) for extra, indices in late if len(indices))
            num_bytes = unit * (stop - first)
            self._add(Transmission(priority, unit, num_bytes, item, parts, num_bytes), now)
        return fitting

    # -- output -----------------------------------------------------------------------------

    def next_event(self) -> float | None:
        """Return the time at which `advance` must be called next; None if no arrival is pending.

        No message or datagram arrives before the time that `next_event` returns.
        """
        at = self._arrivals[0][0] if self._arrivals else math.inf
        current = self._current
        if current is not None and current.own:
            at = min(at, self._ends + self._delay)
        waiting = [
            queue.first_turn_bytes for queue in self._classes if queue.num_own and queue.queue
        ]
        if waiting:
            free_at = self._free_at if current is None else self._ends
            at = min(at, free_at + min(waiting) / self._rate + self._delay)
        return at if math.isfinite(at) else None

    def advance(self, now: float) -> list[PacketArrival]:
        """Advance the emulated link's time to `now`; return all arrivals since the last call, in
        order.
        """
        now = self._come_to(now)
        arrivals = []
        while self._arrivals and self._arrivals[0][0] <= now:
            arrivals.append(heapq.heappop(self._arrivals)[2])
        return arrivals

    # -- the passage of time --------------------------------------------------------------------

    def _come_to(self, until: float) -> float:
        """Process all events on the emulated link up to the time `until`; return the link's new
        time in seconds.
        """
        self._now = until = max(until, self._now)
        background = self._background
        while background.next_at <= until:
            self._serve(background.next_at)
            # On an idle link, background bursts delay no other traffic. Skipping these bursts
            # bounds the work of the model after a long pause.
            if self._current is None and not any(queue.queue for queue in self._classes):
                background.skip(until)
            at, unit = background.next_at, BACKGROUND_PACKET_BYTES
            priority, num_packets = self._link.background_class, background.take() // unit
            size = unit * self._fitting(priority, unit, num_packets, at)
            if size:
                self._add(Transmission(priority, unit, size, total=size, own=False), at)
        self._serve(until)
        return until

    def _fitting(self, priority: int, unit: int, count: int, now: float) -> int:
        """Return how many of `count` packets fit into the queue of a class of service."""
        if math.isinf(self._queue_bytes):
            return count
        # bounded_bytes includes the datagrams that pass the link now, but the packets among them
        # that have started need no space in the queue.
        taken, current = self._classes[priority].bounded_bytes, self._current
        if current is not None and current.priority == priority and not current.reliable:
            taken -= min(self._turn_bytes, self._begun_bytes(current, now))
        return max(0, min(count, int((self._queue_bytes - taken) // unit)))

    def _begun_bytes(self, job: Transmission, now: float) -> int:
        """Return the bytes of the current message's packets that the link began to send before
        `now`.
        """
        return job.unit * math.ceil((now - self._started) * self._rate / job.unit)

    def _add(self, job: Transmission, now: float) -> None:
        current = self._current
        if current is None and not any(queue.queue for queue in self._classes):
            self._free_at = max(self._free_at, now)
        self._classes[job.priority].add(job)
        if current is not None:
            # A message that is alone in its class of service has one turn for all of its bytes. New
            # datagrams or background traffic of that class end the turn, after which the message
            # passes in turns of TURN_BYTES.
            shares = job.priority == current.priority and not job.reliable
            ends_turn = shares and current.reliable and self._turn_bytes > TURN_BYTES
            if job.priority < current.priority or ends_turn:
                self._interrupt(current, now)
        self._serve(now)

    def _interrupt(self, job: Transmission, now: float) -> None:
        """Interrupt a message on the link and queue it again, unless its last packet is being
        sent.
        """
        num_bytes = self._begun_bytes(job, now)
        if num_bytes < self._turn_bytes:
            queue = self._classes[job.priority]
            queue.passed(job, num_bytes)
            queue.queue.appendleft(job)
            self._current, self._free_at = None, self._started + num_bytes / self._rate

    def _serve(self, until: float) -> None:
        """Let waiting messages and datagrams pass the link up to the time `until`, the most urgent
        first.
        """
        while True:
            if self._current is not None:
                if self._ends > until:
                    return
                self._end_turn(self._current)
            if self._free_at > until:
                return
            chosen = next((queue for queue in self._classes if queue.queue), None)
            if chosen is None:
                return
            self._turn_bytes = chosen.first_turn_bytes
            self._current = chosen.queue.popleft()
            self._started = self._free_at
            self._ends = self._started + self._turn_bytes / self._rate

    def _end_turn(self, job: Transmission) -> None:
        """Queue the current message for its next turn, or schedule its arrival if it is
        complete.
        """
        queue = self._classes[job.priority]
        self._current, self._free_at = None, self._ends
        queue.passed(job, self._turn_bytes)
        if job.left:
            queue.queue.append(job)
            return
        queue.finished(job)
        for extra, indices in job.parts:
            at, size = self._ends + self._delay + extra, job.total
            if indices is None:
                # A message with retransmissions delays the later messages of its class, because a
                # stream delivers messages in order.
                at = queue.last_arrival = max(queue.last_arrival, at)
            else:
                size = len(indices) * job.unit
            arrival = PacketArrival(at, job.item, size, indices)
            heapq.heappush(self._arrivals, (at, next(self._numbers), arrival))
