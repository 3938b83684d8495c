"""What passes an emulated link with classes of service, and what waits for it."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.types import ConfigurationError, Link
from proto.channel_emulated import SEGMENT_BYTES

#: A message that shares its class passes in turns of so many bytes: about a window of TCP.
TURN_BYTES = 44 * SEGMENT_BYTES
#: Of background traffic.
BACKGROUND_PACKET_BYTES = 1500
_BACKGROUND_SECONDS = 1e-3  # packets of background traffic come this often together
_LEAST_QUEUED_TURNS = 8  # ... but in so small numbers that a queue has room for this many


@dataclasses.dataclass(frozen=True)
class Arrival:
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
class Job:
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
        self.queue: collections.deque[Job] = collections.deque()
        self.stream: collections.deque[Job] = collections.deque()
        self.has_message = False
        self.num_own = 0
        self.bounded_bytes = self.datagram_bytes = 0
        self.last_arrival = -math.inf
        self.counts = ClassCounts()

    def add(self, job: Job) -> None:
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

    def passed(self, job: Job, num_bytes: int) -> None:
        """Book what has passed of the job in service."""
        job.left -= num_bytes
        if not job.reliable:
            self.bounded_bytes -= num_bytes
            self.datagram_bytes -= num_bytes * job.own
        if job.own:
            self.counts.bytes_on_wire += num_bytes

    def finished(self, job: Job) -> None:
        """See the job in service off; the next message may enter the queue."""
        self.num_own -= job.own
        if job.reliable:
            self.has_message = bool(self.stream)
            if self.stream:
                self.queue.append(self.stream.popleft())

    def remove(self, jobs: list[Job]) -> None:
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
