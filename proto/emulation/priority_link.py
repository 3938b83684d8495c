"""A model of one direction of an emulated link with classes of service.

It is a pure model on the caller's clock. Urgent packets overtake others, so the time at which a
message arrives is not known when it is sent: messages are offered, and time is advanced.
`PriorityLink` is the model; `ClassQueue`, `Background` and `draw_fates` are its parts.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable
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

#: A message that shares its class passes in turns of so many bytes: about a window of TCP.
TURN_BYTES = 44 * SEGMENT_BYTES
#: Of background traffic.
BACKGROUND_PACKET_BYTES = 1500
_BACKGROUND_SECONDS = 1e-3  # packets of background traffic come this often together
_LEAST_QUEUED_TURNS = 8  # ... but in such small numbers that a queue holds this many


@dataclasses.dataclass(frozen=True)
class PacketArrival:
    """What has come through."""

    at: float  # seconds on the model's clock
    item: Any  # as offered
    bytes_on_wire: int  # of a message with what was sent again, or of the datagrams here
    indices: NDArray[np.int64] | None = None  # [m] which datagrams; twice where duplicated


@dataclasses.dataclass
class ClassCounts:
    """What became of what was offered to one class."""

    bytes_on_wire: int = 0  # passed, with headers, resent segments and datagrams lost thereafter
    datagrams: int = 0  # offered
    overflowed: int = 0  # ... that found the queue full
    withdrawn: int = 0  # ... taken back by their sender
    lost: int = 0  # ... lost on the way
    reordered: int = 0  # ... that arrive behind later ones
    duplicated: int = 0  # ... that arrive twice


@dataclasses.dataclass(slots=True)
class Transmission:
    """Bytes that pass one after the other: a message, a train of datagrams, or background."""

    priority: int
    unit: int  # bytes of a packet; one that has begun is finished
    left: int  # bytes to pass
    item: Any = None
    parts: tuple[tuple[float, NDArray[np.int64] | None], ...] = ()  # (seconds late, indices)
    total: int = 0  # bytes at the start
    reliable: bool = False
    own: bool = True  # False: background

    @property
    def has_begun(self) -> bool:
        """Whether some of it has passed."""
        return self.left < self.total


class ClassQueue:
    """What waits for service in one class, first come, first served.

    Attributes:
        queue: In order of service.
        stream: Messages that wait outside: one at a time is in the queue.
        has_message: Whether one is in the queue, or in service.
        num_own: Messages and trains of ours, wherever they wait, with the one in service.
        bounded_bytes: Of datagrams and background, with what is in service.
        datagram_bytes: The datagrams' part of it.
        last_arrival: Of a message, in seconds.
        counts: What became of all that was offered.
    """

    def __init__(self) -> None:
        self.queue: collections.deque[Transmission] = collections.deque()
        self.stream: collections.deque[Transmission] = collections.deque()
        self.has_message = False
        self.num_own = 0
        self.bounded_bytes = self.datagram_bytes = 0
        self.last_arrival = -math.inf
        self.counts = ClassCounts()

    def add(self, job: Transmission) -> None:
        """Let a job wait."""
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
        """What the first job in the queue may pass at its turn."""
        job = self.queue[0]
        return min(job.left, TURN_BYTES) if job.reliable and len(self.queue) > 1 else job.left

    def passed(self, job: Transmission, num_bytes: int) -> None:
        """Book what has passed of the job in service."""
        job.left -= num_bytes
        if not job.reliable:
            self.bounded_bytes -= num_bytes
            self.datagram_bytes -= num_bytes * job.own
        if job.own:
            self.counts.bytes_on_wire += num_bytes

    def finished(self, job: Transmission) -> None:
        """See the job in service off; the next message may enter the queue."""
        self.num_own -= job.own
        if job.reliable:
            self.has_message = bool(self.stream)
            if self.stream:
                self.queue.append(self.stream.popleft())

    def remove(self, jobs: list[Transmission]) -> None:
        """Let trains that have not begun wait no longer."""
        numbers = {id(job) for job in jobs}
        self.queue = collections.deque(job for job in self.queue if id(job) not in numbers)
        self.num_own -= len(jobs)
        num_bytes = sum(job.left for job in jobs)
        self.bounded_bytes -= num_bytes
        self.datagram_bytes -= num_bytes


class Background:
    """Traffic of others: packets at a constant rate from the first offer on.

    Attributes:
        next_at: When the next packets come, in seconds.
        passed_bytes: Of all that have passed.
    """

    def __init__(self, link: Link, queue_bytes: float) -> None:
        """Not begun yet.

        Raises:
            ConfigurationError: It leaves nothing of the link to others.
        """
        if link.background_mbps and not link.background_mbps < link.mbps:
            raise ConfigurationError(
                f"--link_background_mbps={link.background_mbps:g}: expected less than the link has "
                f"(--link_mbps={link.mbps:g}), or nothing below its class ever passes."
            )
        self._bytes_per_second = link.background_mbps * 1e6 / 8
        turn = min(self._bytes_per_second * _BACKGROUND_SECONDS, queue_bytes / _LEAST_QUEUED_TURNS)
        self.turn_bytes = BACKGROUND_PACKET_BYTES * max(1, int(turn / BACKGROUND_PACKET_BYTES))
        self._begun_at: float | None = None
        self._number = 0  # of the next turn
        self.next_at = math.inf
        self.passed_bytes = 0

    def begin(self, now: float) -> None:
        """Come from now on, unless that has begun before."""
        if self._begun_at is None and self._bytes_per_second:
            self._begun_at = self.next_at = now

    def skip(self, until: float) -> None:
        """Let turns pass on an idle link; the last one up to `until` is still to come."""
        if self._begun_at is None:
            return
        number = int((until - self._begun_at) * self._bytes_per_second / self.turn_bytes) - 1
        if number > self._number:
            self.passed_bytes += (number - self._number) * self.turn_bytes
            self._go_to(number)

    def take(self) -> int:
        """Return the bytes that come now."""
        self._go_to(self._number + 1)
        return self.turn_bytes

    def _go_to(self, number: int) -> None:
        self._number = number
        begun_at = self._begun_at or 0.0
        self.next_at = begun_at + number * self.turn_bytes / self._bytes_per_second


def draw_fates(
    random: np.random.Generator, link: Link, count: int, counts: ClassCounts
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw what befalls datagrams on their way.

    Args:
        random: Source of the draws.
        link: With the probabilities.
        count: How many there are.
        counts: Where losses and the like are added.

    Returns:
        Numbers of those that arrive in order, and of those that come late; both ascending, twice
        where duplicated.
    """
    indices = np.arange(count)
    if link.loss > 0:
        indices = indices[random.random(count) >= link.loss]
        counts.lost += count - len(indices)
    if link.duplicate > 0:
        num_before = len(indices)
        indices = np.repeat(indices, 1 + (random.random(num_before) < link.duplicate))
        counts.duplicated += len(indices) - num_before
    if link.reorder <= 0:
        return indices, indices[:0]
    late = random.random(len(indices)) < link.reorder
    counts.reordered += int(late.sum())
    return indices[~late], indices[late]


#: IPv4 and UDP headers of a datagram. What lies below them is not counted, as on streams.
HEADER_BYTES = 28
#: Datagrams that wait in a class without a bounded queue before a sender does better to wait, too:
#: what Linux' sockets hold.
SEND_BUFFER_BYTES = 212_992
_TRAIN_SECONDS = 5e-3  # datagrams that are handed over together pass in no more
_LEAST_LATENESS_SECONDS = 10e-3  # of a datagram out of order


def class_of(dscp: int) -> int:
    """Return the class of service that a network gives a mark: 0 for CS7, 7 for no mark."""
    return BEST_EFFORT - (dscp >> 3)


class PriorityLink:
    """One direction of an emulated link, with strict priority by class.

    The first class that has something to send is served, packet by packet: what is urgent waits
    for one packet at most. Each class has a queue of ``link.queue_kb``; a datagram that does not
    fit into it is dropped. Messages of the reliable stream wait outside; one at a time is in the
    queue and goes back to its end after each 64 KB, if others wait there. A lost segment is sent
    again one round trip later and holds back the messages behind it, as in `LinkModel`, which this
    equals where all that comes is messages of one class.
    Datagrams are lost, are late (by one delay, at least 10 ms) or come twice with the link's
    probabilities. Background traffic comes at a constant rate, waits in the queue of its class like
    all others, and shares that class in order of coming.

    All is drawn when it is offered and happens at times of its own, so results do not depend on how
    often `advance` is called. Times given to the methods are in seconds; one before that of an
    earlier call counts as that one.

    Args:
        link: Rate, delay, loss, and what befalls datagrams.
        seed: Seeds the draws.

    Raises:
        ConfigurationError: Background traffic that leaves nothing to others.
    """

    def __init__(self, link: Link, seed: int = 0) -> None:
        self._link = link
        self._rate = bytes_per_second(link.mbps)
        self._delay = link.delay_ms / 1e3
        self._round_trip = round_trip_seconds(link)
        self._lateness = max(self._delay, _LEAST_LATENESS_SECONDS)
        self._queue_bytes = link.queue_kb * 1e3 if link.queue_kb > 0 else math.inf
        self._random = np.random.default_rng(seed)  # drawn from as LinkModel does
        self._fates = np.random.default_rng([seed, 1])
        self._classes = [ClassQueue() for _ in range(BEST_EFFORT + 1)]
        self._current: Transmission | None = None
        self._turn_bytes = 0  # that the current job may pass now
        self._started = self._ends = -math.inf  # of its turn
        self._free_at = -math.inf  # when the next job may begin
        self._now = -math.inf
        self._arrivals: list[tuple[float, int, PacketArrival]] = []
        self._numbers = itertools.count()
        self._background = Background(link, self._queue_bytes)
        self.num_trains = 0

    @property
    def counts(self) -> tuple[ClassCounts, ...]:
        """What became of what was offered, class 0 first."""
        return tuple(dataclasses.replace(one.counts) for one in self._classes)

    @property
    def background_bytes(self) -> int:
        """Bytes of background traffic that have passed since the first offer."""
        return self._background.passed_bytes

    def has_space(self, priority: int) -> bool:
        """Whether datagrams for a class had better be offered now than later.

        A bounded queue reports to nobody that it is full, so there it is always now.
        """
        waiting = self._classes[priority].datagram_bytes
        return math.isfinite(self._queue_bytes) or waiting < SEND_BUFFER_BYTES

    # -- what comes in ----------------------------------------------------------------------

    def offer(self, now: float, priority: int, num_bytes: int, item: Any) -> None:
        """Put a message of the reliable stream on the link.

        Args:
            now: When.
            priority: Class of service, 0 to 7.
            num_bytes: With framing.
            item: Handed back by `advance`.
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
        """Put datagrams of one size on the link, all together.

        Args:
            now: When.
            priority: Class of service, 0 to 7.
            size: UDP payload of each, in bytes.
            count: How many.
            item: Handed back by `advance`, with the numbers of those that have come through.

        Returns:
            How many fitted into the queue: the first ones.
        """
        self._background.begin(now)
        now = self._come_to(now)
        unit = size + HEADER_BYTES
        counts = self._classes[priority].counts
        fitting = self._fitting(priority, unit, count, now)
        counts.datagrams += count
        counts.overflowed += count - fitting
        fates = draw_fates(self._fates, self._link, fitting, counts)
        together = fitting
        if math.isfinite(self._rate):
            together = max(1, int(_TRAIN_SECONDS * self._rate / unit))
        for first in range(0, fitting, max(1, together)):
            stop = min(first + together, fitting)
            cuts = [indices[slice(*np.searchsorted(indices, (first, stop)))] for indices in fates]
            late = zip((0.0, self._lateness), cuts, strict=True)
            parts = tuple((extra, indices) for extra, indices in late if len(indices))
            num_bytes = unit * (stop - first)
            self.num_trains += 1
            self._add(Transmission(priority, unit, num_bytes, item, parts, num_bytes), now)
        return fitting

    def withdraw(self, now: float, unwanted: Callable[[Any], bool]) -> int:
        """Take back datagrams that still wait; return how many.

        Args:
            now: When.
            unwanted: Called with the item of each train of datagrams that has not begun.
        """
        self._come_to(now)
        num_datagrams = 0
        for one in self._classes:
            waiting = (job for job in one.queue if job.own and not job.reliable)
            gone = [job for job in waiting if not job.has_begun and unwanted(job.item)]
            if gone:
                one.remove(gone)
                number = sum(job.left // job.unit for job in gone)
                one.counts.withdrawn += number
                num_datagrams += number
                self.num_trains -= len(gone)
        return num_datagrams

    # -- what comes out ---------------------------------------------------------------------

    def next_event(self) -> float | None:
        """Return when to call `advance` next: nothing comes before; None: nothing ever will."""
        at = self._arrivals[0][0] if self._arrivals else math.inf
        current = self._current
        if current is not None and current.own:
            at = min(at, self._ends + self._delay)
        waiting = [one.first_turn_bytes for one in self._classes if one.num_own and one.queue]
        if waiting:
            free_at = self._free_at if current is None else self._ends
            at = min(at, free_at + min(waiting) / self._rate + self._delay)
        return at if math.isfinite(at) else None

    def advance(self, now: float) -> list[PacketArrival]:
        """Let time pass; return what has come through since the last call, in order."""
        now = self._come_to(now)
        found = []
        while self._arrivals and self._arrivals[0][0] <= now:
            arrival = heapq.heappop(self._arrivals)[2]
            self.num_trains -= arrival.indices is not None
            found.append(arrival)
        return found

    # -- what happens between -----------------------------------------------------------------

    def _come_to(self, until: float) -> float:
        """Do all that is due; return the time it is then."""
        self._now = until = max(until, self._now)
        background = self._background
        while background.next_at <= until:
            self._serve(background.next_at)
            if self._current is None and not any(one.queue for one in self._classes):
                background.skip(until)
            at, unit = background.next_at, BACKGROUND_PACKET_BYTES
            priority, num_packets = self._link.background_class, background.take() // unit
            size = unit * self._fitting(priority, unit, num_packets, at)
            if size:
                self._add(Transmission(priority, unit, size, total=size, own=False), at)
        self._serve(until)
        return until

    def _fitting(self, priority: int, unit: int, count: int, now: float) -> int:
        """Return how many packets fit into a queue; those on the wire need no space in it."""
        if math.isinf(self._queue_bytes):
            return count
        taken, current = self._classes[priority].bounded_bytes, self._current
        if current is not None and current.priority == priority and not current.reliable:
            taken -= min(self._turn_bytes, self._begun_bytes(current, now))
        return max(0, min(count, int((self._queue_bytes - taken) // unit)))

    def _begun_bytes(self, job: Transmission, now: float) -> int:
        """Bytes of the current job's packets that have begun."""
        return job.unit * math.ceil((now - self._started) * self._rate / job.unit)

    def _add(self, job: Transmission, now: float) -> None:
        current = self._current
        if current is None and not any(one.queue for one in self._classes):
            self._free_at = max(self._free_at, now)
        self._classes[job.priority].add(job)
        if current is not None:
            shares = job.priority == current.priority and not job.reliable
            ends_turn = shares and current.reliable and self._turn_bytes > TURN_BYTES
            if job.priority < current.priority or ends_turn:
                self._interrupt(current, now)
        self._serve(now)

    def _interrupt(self, job: Transmission, now: float) -> None:
        """Let the current job go on later, unless the last packet of its turn has begun."""
        num_bytes = self._begun_bytes(job, now)
        if num_bytes < self._turn_bytes:
            self._pass(job, num_bytes)
            self._classes[job.priority].queue.appendleft(job)
            self._current, self._free_at = None, self._started + num_bytes / self._rate

    def _serve(self, until: float) -> None:
        """Let pass what is there."""
        while True:
            if self._current is not None:
                if self._ends > until:
                    return
                self._end_turn(self._current)
            if self._free_at > until:
                return
            chosen = next((one for one in self._classes if one.queue), None)
            if chosen is None:
                return
            self._turn_bytes = chosen.first_turn_bytes
            self._current = chosen.queue.popleft()
            self._started = self._free_at
            self._ends = self._started + self._turn_bytes / self._rate

    def _pass(self, job: Transmission, num_bytes: int) -> None:
        self._classes[job.priority].passed(job, num_bytes)
        if not job.own:
            self._background.passed_bytes += num_bytes

    def _end_turn(self, job: Transmission) -> None:
        """Let the current job wait for its next turn, or send it on the rest of its way."""
        one = self._classes[job.priority]
        self._current, self._free_at = None, self._ends
        self._pass(job, self._turn_bytes)
        if job.left:
            one.queue.append(job)
            return
        one.finished(job)
        for extra, indices in job.parts:
            at, size = self._ends + self._delay + extra, job.total
            if indices is None:
                at = one.last_arrival = max(one.last_arrival, at)
            else:
                size = len(indices) * job.unit
            arrival = PacketArrival(at, job.item, size, indices)
            heapq.heappush(self._arrivals, (at, next(self._numbers), arrival))
        self.num_trains += sum(indices is not None for _, indices in job.parts)
        self.num_trains -= job.own and not job.reliable
