"""Links on the virtual clock: the emulated channels' own models, without their sleeping."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from cluster.simulator.clock import Clock
from ops.types import BEST_EFFORT, Link
from proto.channel_emulated import LinkModel
from proto.grpc_common import wire_bytes
from proto.link_traffic import Arrival
from proto.priority_link import PriorityLink


class Pipe:
    """One direction of a link.

    Attributes:
        num_bytes: Training bytes that its sender has put on it, with what was sent again.
        free_at: When the last byte of all that was sent is through, in seconds.
    """

    def __init__(self, link: Link, seed: int = 0) -> None:
        """Start idle; `seed` seeds the losses."""
        self._model = LinkModel(link, seed)
        self.num_bytes = 0
        self.free_at = 0.0

    def pass_on(
        self,
        clock: Clock,
        sizes: Sequence[int],
        counted: bool,
        calls: Sequence[Callable[[], None] | None],
    ) -> None:
        """Put messages on the link one after the other; call what belongs to each as it arrives.

        Args:
            clock: Virtual time.
            sizes: Bytes of each.
            counted: Whether they are training bytes.
            calls: One for each.
        """
        for size, call in zip(sizes, calls, strict=True):
            arrival = self.send(clock.now, size, counted)
            if call is not None:
                clock.at(arrival, call)

    def send(self, now: float, size: int, counted: bool) -> float:
        """Put `size` bytes on the link; return when they have arrived."""
        delivery = self._model.send(now, size)
        self.num_bytes += delivery.bytes_on_wire if counted else 0
        self.free_at = delivery.delivered_at
        return delivery.delivered_at


class ClassPipe:
    """A worker's way up where it has classes of service: its streams and its datagrams.

    Attributes:
        num_bytes: Training bytes of its streams that have arrived, with what was sent again.
        free_at: When the last message of a stream arrived, in seconds.
        on_room: Called whenever something has passed, so that there may be room.
    """

    def __init__(
        self, clock: Clock, link: Link, seed: int = 0, priority: int = BEST_EFFORT
    ) -> None:
        """Start idle.

        Args:
            clock: Virtual time.
            link: Rate, delay, loss, and what befalls datagrams.
            seed: Seeds the draws.
            priority: Class of service of the streams.
        """
        self.model = PriorityLink(link, seed)
        self._clock, self._priority = clock, priority
        self._alarm: float | None = None
        self.num_bytes = 0
        self.free_at = 0.0
        self.on_room: list[Callable[[], None]] = []

    def pass_on(
        self,
        clock: Clock,
        sizes: Sequence[int],
        counted: bool,
        calls: Sequence[Callable[[], None] | None],
    ) -> None:
        """Put messages on the link; see `Pipe.pass_on`."""
        for size, call in zip(sizes, calls, strict=True):
            arrived = functools.partial(self._arrived, counted, call)
            self.model.offer(clock.now, self._priority, size, arrived)
        self._set_alarm()

    def offer_datagrams(
        self, priority: int, size: int, count: int, deliver: Callable[[Arrival], None]
    ) -> None:
        """Put datagrams on the link; `deliver` hears of those that come through, as they do."""
        self.model.offer_datagrams(self._clock.now, priority, size, count, deliver)
        self._set_alarm()

    def has_room(self, priority: int) -> bool:
        """See `PriorityLink.has_room`."""
        return self.model.has_room(priority)

    def _arrived(self, counted: bool, call: Callable[[], None] | None, arrival: Arrival) -> None:
        self.num_bytes += arrival.bytes_on_wire if counted else 0
        self.free_at = arrival.at
        if call is not None:
            call()

    def _set_alarm(self) -> None:
        """See to it that time is advanced when the model wants it."""
        at = self.model.next_event()
        if at is not None and (self._alarm is None or at < self._alarm):
            self._alarm = at
            self._clock.at(at, functools.partial(self._run, at))

    def _run(self, when: float) -> None:
        if when != self._alarm:  # an earlier one has taken its place
            return
        self._alarm = None
        for arrival in self.model.advance(self._clock.now):
            arrival.item(arrival)
        for call in self.on_room:
            call()
        self._set_alarm()


def way_up(
    clock: Clock, link: Link, seed: int, datagrams: bool = False, priority: int = BEST_EFFORT
) -> Pipe | ClassPipe:
    """Return a worker's way up.

    Args:
        clock: Virtual time.
        link: Its link.
        seed: Seeds the draws.
        datagrams: Whether it carries any.
        priority: Class of service of the streams.
    """
    if datagrams or link.background_mbps:
        return ClassPipe(clock, link, seed, priority)
    return Pipe(link, seed)


def sizes_on_wire(frames: Sequence[bytes]) -> list[int]:
    """Return what each frame costs on a stream, framing included."""
    return [wire_bytes(len(frame)) for frame in frames]


def carry(
    clock: Clock,
    hops: Sequence[Pipe | ClassPipe],
    sizes: Sequence[int],
    counted: bool,
    deliver: Callable[[], None],
) -> None:
    """Pass a message over one hop after the other, frame by frame.

    Args:
        clock: Virtual time.
        hops: The pipes on the way, at least one.
        sizes: Bytes of each frame; a message of no known size is only delayed.
        counted: Whether they are training bytes.
        deliver: Called when the last frame has arrived.
    """
    first, rest = hops[0], hops[1:]
    sizes = sizes or (0,)
    calls: list[Callable[[], None] | None] = [*[None] * (len(sizes) - 1), deliver]
    if rest:
        calls = [
            functools.partial(carry, clock, rest, (size,), counted, call or _nothing)
            for size, call in zip(sizes, calls, strict=True)
        ]
    first.pass_on(clock, sizes, counted, calls)


def _nothing() -> None:
    """Do nothing: a frame that is not the last delivers no message."""
