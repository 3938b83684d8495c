"""Simulated links between workers and PS shards, and the streams and datagrams on them.

Simulated links use the models of emulated links (`thinwire.proto.emulation`) on a virtual clock. A
simulated stream models a TCP connection: its messages arrive in order, or are lost if the stream
breaks. Delayed messages of an old simulated stream may arrive after a newer stream was opened. A PS
shard reads only a worker's newest gRPC stream on which it has sent a Welcome message.
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
    """Interface of a simulated PS shard that connections and datagram senders use."""

    number: int
    lease_seconds: float
    uplink: Pipe  # link on which all workers' messages arrive at the shard
    has_own_link: bool

    @property
    def listens(self) -> bool:
        """True if the PS shard accepts new streams from workers."""

    def receive(self, worker: int, stream: int, event: Delivery) -> None:
        """Receive a message that arrived at the PS shard on a worker's gRPC stream."""

    def arrive(self, event: Delivery) -> None:
        """Receive a message that arrived at the PS shard, without a check of its gRPC stream."""

    def lose(self, worker: int, stream: int) -> None:
        """Note that a worker's gRPC stream to the PS shard is lost."""

    def receive_datagrams(self, data: memoryview, size: int) -> None:
        """Receive datagrams of equal size that arrive at the PS shard together."""


class Pipe:
    """One direction (uplink or downlink) of a simulated network link.

    Attributes:
        num_bytes: Number of training bytes that were sent on the link, including retransmissions.
        free_at: Virtual time in seconds at which the last byte that was sent arrives.
    """

    def __init__(self, link: Link, seed: int = 0) -> None:
        """Create an idle simulated link; `seed` is the seed of the random message losses."""
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
        """Send messages on the link in order, and make a call when each message arrives.

        Args:
            clock: Virtual clock of the simulation.
            sizes: Size in bytes of each message to send.
            counted: True if the sent messages count as training bytes.
            calls: For each message, the function to call when the message arrives; None: no call.
        """
        for size, call in zip(sizes, calls, strict=True):
            arrival = self.send(clock.now, size, counted)
            if call is not None:
                clock.at(arrival, call)

    def send(self, now: float, size: int, counted: bool) -> float:
        """Send `size` bytes on the link at time `now`; return the virtual time of their arrival."""
        delivery = self._model.send(now, size)
        self.num_bytes += delivery.bytes_on_wire if counted else 0
        self.free_at = delivery.delivered_at
        return delivery.delivered_at


class ClassPipe:
    """Simulated uplink of a worker, with classes of service for streams and datagrams.

    Attributes:
        num_bytes: Number of training bytes that have arrived in streams, including retransmissions.
        free_at: Virtual time in seconds at which the last message of a stream arrived.
        on_space: Functions that are called when traffic has passed the uplink, so that its queues
            may have space.
    """

    def __init__(
        self, clock: Clock, link: Link, seed: int = 0, priority: int = BEST_EFFORT
    ) -> None:
        """Create a simulated uplink without messages.

        Args:
            clock: Virtual clock of the simulation.
            link: Properties of the uplink: rate, delay, loss, treatment of datagrams.
            seed: Seed of the simulated link's random losses.
            priority: Class of service of the streams, 0 to 7.
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
        """Send messages on the uplink in order, in the class of service of the worker's streams."""
        for size, call in zip(sizes, calls, strict=True):
            arrived = functools.partial(self._arrived, counted, call)
            self.model.offer(clock.now, self._priority, size, arrived)
        self._set_alarm()

    def offer_datagrams(
        self, priority: int, size: int, count: int, deliver: Callable[[PacketArrival], None]
    ) -> None:
        """Send datagrams on the uplink; call `deliver` with the datagrams that arrive."""
        self.model.offer_datagrams(self._clock.now, priority, size, count, deliver)
        self._set_alarm()

    def has_space(self, priority: int) -> bool:
        """Return True if a sender may send datagrams of a class now, False to wait for space."""
        return self.model.has_space(priority)

    def _arrived(
        self, counted: bool, call: Callable[[], None] | None, arrival: PacketArrival
    ) -> None:
        self.num_bytes += arrival.bytes_on_wire if counted else 0
        self.free_at = arrival.at
        if call is not None:
            call()

    def _set_alarm(self) -> None:
        """Schedule an update of the simulated link at the time of the link's next event."""
        at = self.model.next_event()
        if at is not None and (self._alarm is None or at < self._alarm):
            self._alarm = at
            self._clock.at(at, functools.partial(self._run, at))

    def _run(self, when: float) -> None:
        if when != self._alarm:  # an earlier alarm has replaced this alarm
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
    """Return a worker's simulated uplink, with classes of service if the traffic needs them.

    Args:
        clock: Virtual clock of the simulation.
        link: Rate, delay and loss of the worker's simulated link.
        seed: Seed of the simulated link's random losses.
        datagrams: True if the worker also sends datagrams.
        priority: Class of service of the worker's streams, 0 to 7.
    """
    if datagrams or link.background_mbps:
        return ClassPipe(clock, link, seed, priority)
    return Pipe(link, seed)


def sizes_on_wire(frames: Iterable[Frame]) -> list[int]:
    """Return each message frame's size on the wire in bytes, with the framing of the stream."""
    return [wire_bytes(len(frame)) for frame in frames]


def carry(
    clock: Clock,
    hops: Sequence[Pipe | ClassPipe],
    sizes: Sequence[int],
    counted: bool,
    deliver: Callable[[], None],
) -> None:
    """Send a message over several simulated links in order, frame by frame.

    Args:
        clock: Virtual clock of the simulation.
        hops: One or more links, from the sender to the receiver.
        sizes: Size of each frame of the message in bytes. An empty list means a message without
            size, which is only delayed.
        counted: True if the frames of the message count as training bytes.
        deliver: Function that is called when the message's last frame has arrived.
    """
    first, next_hops = hops[0], hops[1:]
    sizes = sizes or (0,)
    calls: list[Callable[[], None] | None] = [*[None] * (len(sizes) - 1), deliver]
    if next_hops:
        calls = [
            functools.partial(carry, clock, next_hops, (size,), counted, call or _nothing)
            for size, call in zip(sizes, calls, strict=True)
        ]
    first.pass_on(clock, sizes, counted, calls)


def _nothing() -> None:
    """Do nothing, because only a message's last frame delivers the message."""


#: First and longest pause between attempts to open a stream, and shortest silence after which a
#: worker gives up a stream, in seconds. The constants equal the constants of real workers in
#: thinwire.proto.grpc.session.
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0
_LEAST_PROGRESS_SECONDS = 10.0


class SimulatedConnection:
    """A simulated worker's connection to a PS shard, with the state of its newest gRPC stream.

    Attributes:
        number: Number of the connection's newest stream. Each stream has a different number.
        stands: True if the worker regards the connection's newest gRPC stream as open.
        dials: True while the worker tries to open a gRPC stream to the PS shard.
        cut_until: Virtual time in seconds until which the worker can open no stream to the PS
            shard.
        held_until: Virtual times in seconds until which no message arrives, as [to the shard, to
            the worker].
        on_lost: Function that is called when the worker notices that its gRPC stream is lost.

    Args:
        worker: Id of the worker that owns the connection.
        shard: PS shard to which the worker connects.
        uplink: Simulated uplink of the worker.
        clock: Virtual clock of the simulation.
        delay_seconds: Time after which worker and PS shard notice a broken stream, in virtual
            seconds.
        rng: Random generator for the pauses between attempts to open a stream.
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
        self._broken_to = 0  # number of the newest broken stream; older ones are broken, too
        self._life = 0  # number of worker starts; dialing of earlier starts is dropped
        self.cut_until = 0.0
        self.held_until = [0.0, 0.0]
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def carries(self) -> bool:
        """True if the worker's stream to the PS shard is intact and no fault delays messages."""
        is_intact = self.stands and self.number > self._broken_to
        return is_intact and self._clock.now >= self.held_until[0]

    # -- opening ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Reset the connection after a restart of the worker: no gRPC stream is open or dialed."""
        self.stands = self.dials = False
        self._broken_to = self.number
        self._life += 1

    def dial(
        self, hello: Callable[[], None], give_up: Callable[[], None], patience_seconds: float
    ) -> None:
        """Open a stream to the PS shard; repeat failed attempts with backoff until a time limit.

        Args:
            hello: Function that is called when the stream is open, to send a Hello message.
            give_up: Function that is called if no stream could be opened in time.
            patience_seconds: Time limit of all attempts to open a stream together, in virtual
                seconds.
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
        """Open a new stream from the worker to the PS shard immediately."""
        self.number += 1
        self.stands = True

    # -- breaking ---------------------------------------------------------------------------

    def snap(self) -> None:
        """Break the gRPC stream, lose messages in flight, and notify worker and PS shard later."""
        number = self.number
        self._broken_to = number
        later = self._clock.now + self._delay_seconds
        self._clock.at(later, functools.partial(self.lose, number))
        self._clock.at(later, functools.partial(self.shard.lose, self.worker, number))

    def fall_silent(self) -> None:
        """Break the worker's gRPC stream to the PS shard without notifying worker or shard.

        The PS shard does not notice a stream that `fall_silent` has broken. The worker notices the
        broken stream when it has received no message for too long.
        """
        self._broken_to = self.number
        self.expect_progress()

    def hold(self, up: bool, seconds: float) -> None:
        """Delay the messages of one direction of the worker's connection.

        While messages to the worker are delayed, the worker may give up the gRPC stream.

        Args:
            up: True to delay messages to the PS shard, False to delay messages to the worker.
            seconds: Time until messages arrive again, in virtual seconds.
        """
        direction = 0 if up else 1
        until = self._clock.now + seconds
        self.held_until[direction] = max(self.held_until[direction], until)
        if not up:
            self.expect_progress(until)

    def expect_progress(self, until: float | None = None) -> None:
        """Schedule that the worker gives up a gRPC stream on which no message arrives for too long.

        Args:
            until: Virtual time in seconds at which messages arrive again; None: never.
        """
        seconds = max(_LEAST_PROGRESS_SECONDS, 3 * self.shard.lease_seconds)
        when = self._clock.now + seconds
        if until is None or when < until:
            self._clock.at(when, functools.partial(self.lose, self.number))

    def lose(self, number: int) -> None:
        """Notify the worker that a gRPC stream is lost, unless a newer stream has replaced it."""
        if number == self.number and self.stands:
            self.stands = False
            self.on_lost()

    # -- messages ---------------------------------------------------------------------------

    def send(self, event: Delivery, sizes: Sequence[int], counted: bool) -> None:
        """Send a message to the PS shard if the worker's stream is open.

        Args:
            event: Message to send to the PS shard.
            sizes: Size of each frame of the message in bytes. An empty list means a message without
                size, which is only delayed.
            counted: True if the frames of the message count as training bytes.
        """
        if self.stands:
            deliver = functools.partial(self._deliver, self.number, event)
            carry(self._clock, self._hops, list(sizes), counted, deliver)

    def _deliver(self, number: int, event: Delivery) -> None:
        if self._waits(0, functools.partial(self._deliver, number, event)):
            return
        if number > self._broken_to:
            self.shard.receive(self.worker, number, event)

    def delivers(self, number: int, again: Callable[[], None]) -> bool:
        """Return True if a message of a stream from the PS shard reaches the worker now.

        Args:
            number: Number of the stream on which the message was sent.
            again: Function that is called when messages to the worker arrive again, if they are
                delayed now.
        """
        if self._waits(1, again):
            return False
        return number == self.number > self._broken_to and self.stands

    def _waits(self, direction: int, again: Callable[[], None]) -> bool:
        until = self.held_until[direction]
        if self._clock.now >= until:
            return False
        self._clock.at(until, again)
        return True
