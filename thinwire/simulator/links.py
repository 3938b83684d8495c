"""Links on the virtual clock, and the streams and datagrams that they carry.

The models of the emulated links (`thinwire.proto.emulation`), without their sleeping. A stream is
TCP underneath: what is sent on it arrives in order, or not at all because the stream has broken.
Nothing overtakes anything inside one stream. What was held up on an old stream may come after a
newer one was opened; a shard reads the newest that it has welcomed and no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.types import BEST_EFFORT, Link
from thinwire.proto.emulation.link import LinkModel
from thinwire.proto.emulation.priority_link import PacketArrival, PriorityLink
from thinwire.proto.grpc.common import wire_bytes
from thinwire.simulator.clock import Clock

if TYPE_CHECKING:
    import numpy as np

    from thinwire.proto.framing import Frame
    from thinwire.simulator.messages import Delivery


class Endpoint(Protocol):
    """A shard as those who send to it see it."""

    number: int
    lease_seconds: float
    uplink: Pipe  # the shard's own link, on which all workers' messages arrive
    has_own_link: bool

    @property
    def listens(self) -> bool:
        """Whether a stream can be opened to it."""

    def receive(self, worker: int, stream: int, event: Delivery) -> None:
        """Take in a message of a worker's stream."""

    def arrive(self, event: Delivery) -> None:
        """Take in what has passed the network, on whatever stream."""

    def lose(self, worker: int, stream: int) -> None:
        """Take note that a worker's stream is gone."""

    def receive_datagrams(self, data: memoryview, size: int) -> None:
        """Take in datagrams of one size that arrive together."""


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
        """Put messages on the link one after the other; make each one's call as it arrives.

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
    """A worker's uplink where it has classes of service: its streams and its datagrams.

    Attributes:
        num_bytes: Training bytes of its streams that have arrived, with what was sent again.
        free_at: When the last message of a stream arrived, in seconds.
        on_space: Called whenever something has passed, so that there may be space.
    """

    def __init__(
        self, clock: Clock, link: Link, seed: int = 0, priority: int = BEST_EFFORT
    ) -> None:
        """Start idle.

        Args:
            clock: Virtual time.
            link: Rate, delay, loss, and what happens to datagrams.
            seed: Seeds the draws.
            priority: Class of service of the streams.
        """
        self.model = PriorityLink(link, seed)
        self._clock, self._priority = clock, priority
        self._alarm: float | None = None
        self.num_bytes = 0
        self.free_at = 0.0
        self.on_space: list[Callable[[], None]] = []

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
        self, priority: int, size: int, count: int, deliver: Callable[[PacketArrival], None]
    ) -> None:
        """Put datagrams on the link; `deliver` is called with those that come through."""
        self.model.offer_datagrams(self._clock.now, priority, size, count, deliver)
        self._set_alarm()

    def has_space(self, priority: int) -> bool:
        """See `PriorityLink.has_space`."""
        return self.model.has_space(priority)

    def _arrived(
        self, counted: bool, call: Callable[[], None] | None, arrival: PacketArrival
    ) -> None:
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
        for call in self.on_space:
            call()
        self._set_alarm()


def uplink_of(
    clock: Clock, link: Link, seed: int, datagrams: bool = False, priority: int = BEST_EFFORT
) -> Pipe | ClassPipe:
    """Return a worker's uplink.

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


def sizes_on_wire(frames: Iterable[Frame]) -> list[int]:
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


#: As a real worker's (thinwire.worker.client.shard_client).
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0
_LEAST_PROGRESS_SECONDS = 10.0


class SimulatedConnection:
    """The newest stream, what both ends know of it, and dialling until there is one.

    Attributes:
        number: Of the newest stream; no two have the same.
        stands: Whether it stands, as far as the worker knows.
        cut_until: Till then no stream can be opened, in virtual seconds.
        held_until: Till then nothing arrives, up and down.

    Args:
        worker: Whose.
        shard: Where to.
        uplink: The worker's.
        clock: Virtual time.
        delay_seconds: After which one end sees what happened at the other.
        rng: Of the pauses between attempts.
    """

    def __init__(
        self,
        worker: int,
        shard: Endpoint,
        uplink: Pipe | ClassPipe,
        clock: Clock,
        delay_seconds: float,
        rng: np.random.Generator,
    ) -> None:
        self.worker, self.shard, self._clock = worker, shard, clock
        self._hops = (uplink, shard.uplink) if shard.has_own_link else (uplink,)
        self._delay_seconds, self._rng = delay_seconds, rng
        self.number, self.stands, self.dials = 0, False, False
        self._broken_to = 0  # streams up to this number are no more
        self._life = 0  # of the worker; grows
        self.cut_until = 0.0
        self.held_until = [0.0, 0.0]
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def carries(self) -> bool:
        """Whether nothing but the link's delay keeps back what is sent now."""
        whole = self.stands and self.number > self._broken_to
        return whole and self._clock.now >= self.held_until[0]

    # -- opening ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Belong to another life of the worker: nothing is open."""
        self.stands = self.dials = False
        self._broken_to = self.number
        self._life += 1

    def dial(
        self, hello: Callable[[], None], give_up: Callable[[], None], patience_seconds: float
    ) -> None:
        """Open a stream, trying again until it stands.

        Args:
            hello: Introduces the worker on a stream that has just been opened.
            give_up: Called instead when the patience is over.
            patience_seconds: How long to try.
        """
        self.dials = True
        life, backoff = self._life, _FIRST_BACKOFF_SECONDS
        deadline = self._clock.now + patience_seconds

        def attempt() -> None:
            nonlocal backoff
            if not self.dials or life != self._life:
                return
            if self.shard.listens and self._clock.now >= self.cut_until:
                self.dials = False
                self.open()
                hello()
            elif self._clock.now + backoff >= deadline:
                self.dials = False
                give_up()
            else:
                pause = backoff * self._rng.uniform(0.5, 1.0)
                backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)
                self._clock.at(self._clock.now + pause, attempt)

        attempt()

    def open(self) -> None:
        """Open another stream immediately."""
        self.number += 1
        self.stands = True

    # -- breaking ---------------------------------------------------------------------------

    def snap(self) -> None:
        """Break: what is on its way is lost, and both ends see it a little later."""
        number = self.number
        self._broken_to = number
        later = self._clock.now + self._delay_seconds
        self._clock.at(later, functools.partial(self.lose, number))
        self._clock.at(later, functools.partial(self.shard.lose, self.worker, number))

    def fall_silent(self) -> None:
        """Break silently: the shard never sees it, the worker when nothing has come for long."""
        self._broken_to = self.number
        self.expect_progress()

    def hold(self, up: bool, seconds: float) -> None:
        """Delay what is sent in one direction; the worker may give the stream up meanwhile."""
        direction = 0 if up else 1
        until = self._clock.now + seconds
        self.held_until[direction] = max(self.held_until[direction], until)
        if not up:
            self.expect_progress(until)

    def expect_progress(self, until: float | None = None) -> None:
        """Have the worker give the stream up when it has received nothing for too long.

        Args:
            until: When something will arrive again; None: never.
        """
        seconds = max(_LEAST_PROGRESS_SECONDS, 3 * self.shard.lease_seconds)
        when = self._clock.now + seconds
        if until is None or when < until:
            self._clock.at(when, functools.partial(self.lose, self.number))

    def lose(self, number: int) -> None:
        """Let the worker find that a stream is gone."""
        if number == self.number and self.stands:
            self.stands = False
            self.on_lost()

    # -- messages ---------------------------------------------------------------------------

    def send(self, event: Delivery, sizes: Sequence[int], counted: bool) -> None:
        """Send something to the shard, if the stream stands."""
        if self.stands:
            deliver = functools.partial(self._deliver, self.number, event)
            carry(self._clock, self._hops, list(sizes), counted, deliver)

    def _deliver(self, number: int, event: Delivery) -> None:
        if self._waits(0, functools.partial(self._deliver, number, event)):
            return
        if number > self._broken_to:
            self.shard.receive(self.worker, number, event)

    def delivers(self, number: int, again: Callable[[], None]) -> bool:
        """Return whether something sent down a stream arrives now; `again` is called if later."""
        if self._waits(1, again):
            return False
        return number == self.number > self._broken_to and self.stands

    def _waits(self, direction: int, again: Callable[[], None]) -> bool:
        until = self.held_until[direction]
        if self._clock.now >= until:
            return False
        self._clock.at(until, again)
        return True
