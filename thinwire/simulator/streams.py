"""One worker's streams to all shards on the virtual clock: Hello, questions, answers, refusals."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from thinwire.ops.routing.base import Transport
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.types import Link
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import chunk_bytes_for, frame
from thinwire.ps.core import events
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.simulator.client import SimulatedClient
from thinwire.simulator.clock import Clock
from thinwire.simulator.links import sizes_on_wire
from thinwire.simulator.messages import Delivery
from thinwire.simulator.shard import SimulatedShard
from thinwire.simulator.ways import SimulatedTransport
from thinwire.simulator.wording import PushEncoder
from thinwire.worker.client.datagrams import totals_of
from thinwire.worker.core.messages import PushRequest, ShardReply

_PATIENCE_SECONDS = 60.0
_RELIABLE, _USUAL = Reliable(), Transport()


class StreamOwner(Protocol):
    """Who the streams belong to."""

    def joined(self, last_step: int) -> None:
        """Every shard has welcomed this life; they have applied so many of its steps."""

    def replied(self, replies: list[ShardReply | None]) -> None:
        """Every shard has answered a pull or a push; None where it was refused as not finite."""

    def answered(self, answer: events.Answer | None) -> None:
        """The state server has spoken; None: it does not know this worker any more."""

    def refused(self) -> None:
        """A shard wants nothing of this worker, for good."""

    def unreachable(self) -> None:
        """A shard has not answered for the whole patience."""


class Streams:
    """What `thinwire.worker.client.exchange.Exchange` is to a real worker, without waiting.

    Attributes:
        incarnation: This life of the worker; 0 while it is dead.
        life: This life or the last one.
        epoch: Newest membership epoch heard of.
        asked_at: When the last question to the shards was put, in virtual seconds.
        clients: For each shard, what is said and heard there.
        connections: To each shard.
        patience_seconds: How long a shard is looked for.
        asleep_until: Till then the process stands still.
    """

    def __init__(
        self,
        number: int,
        link: Link,
        seed: int,
        shards: Sequence[SimulatedShard],
        decoders: Sequence[PushDecoder],
        clock: Clock,
        router: Any = _RELIABLE,
        transport: Transport = _USUAL,
    ) -> None:
        """Nothing is open yet.

        Args:
            number: Of the worker.
            link: Its link.
            seed: Of what befalls on it.
            shards: All of them.
            decoders: Of each shard's pushes.
            clock: Virtual time.
            router: The policy.
            transport: How its datagrams travel.
        """
        self.number, self._link, self._shards, self._clock = number, link, shards, clock
        ways = SimulatedTransport(clock, link, seed, router, transport)
        self._up = ways.up
        self._legs = [ways.leg(number, shard) for shard in shards]
        self._totals = totals_of(
            number, self._legs, router.channels, lambda: self.bytes_up, transport.dgt_info
        )
        chunk_bytes = chunk_bytes_for(link)
        total = sum(shard.layout.size for shard in shards)
        self.clients: list[SimulatedClient] = []
        for shard, decoder, leg in zip(shards, decoders, self._legs, strict=True):
            wording = PushEncoder(number, shard.number, decoder, leg, chunk_bytes)
            down = Link(link.mbps * shard.layout.size / total, link.delay_ms, link.loss)
            client = SimulatedClient(self, shard, wording, ways.up, down, seed, clock)
            client.connection.on_lost = self._lost
            self.clients.append(client)
        self.connections = [client.connection for client in self.clients]
        self.incarnation = self.life = 0
        self.patience_seconds, self.asleep_until = _PATIENCE_SECONDS, 0.0
        self.asked_at = 0.0

    def begin_life(self, listener: StreamOwner) -> None:
        """Say Hello to shard 0; `listener` hears of everything that follows."""
        self.life += 1 << 20 if self.life else (1 << 20) + self.number
        self.incarnation = self.life
        self.listener = listener
        self.epoch = 0
        self._welcomed: set[int] = set()
        self._replies: dict[int, ShardReply | None] = {}
        for client in self.clients:
            client.begin_life()
        self.clients[0].hello()

    def end_life(self) -> None:
        """Hear nothing any more, and lose what is on its way."""
        self.incarnation = 0
        for connection in self.connections:
            connection.begin()

    def break_off(self, is_seen: bool = True) -> None:
        """End this life without a word.

        Args:
            is_seen: Whether the shards see the streams break.
        """
        self.end_life()
        when = self._clock.now + self._link.delay_ms / 1e3
        for each in self.connections if is_seen else ():
            self._clock.at(when, functools.partial(each.shard.lose, self.number, each.number))

    def farewell(self, cause: str) -> None:
        """End this life in good order, as far as the shards are there to hear of it."""
        hears = [connection.stands for connection in self.connections]
        self.end_life()
        for shard, can_hear in zip(self._shards, hears, strict=True):
            if can_hear and shard.listens:
                shard.handle(events.Leave(self.number, self.life, cause))

    def pull(self) -> None:
        """Ask every shard for the model."""
        self.asked_at = self._clock.now
        for client in self.clients:
            client.pull()
        self._mend()

    def push(self, outgoing: PushRequest) -> None:
        """Push to every shard."""
        self.asked_at = self._clock.now
        if self._totals is not None:
            self._totals.note(outgoing.routed)
        for client in self.clients:
            client.push(outgoing)
        self._mend()

    def query(self, query: pb.Query) -> None:
        """Tell the state server, on shard 0, how far this worker is."""
        event = events.Query(
            self.number,
            self.incarnation,
            query.step,
            query.local_steps,
            query.step_seconds,
            query.age_seconds,
            query.query_seconds,
        )
        sizes = sizes_on_wire([frame(pb.ToServer(query=query))])
        self.tell(0, event, sizes, counted=True)
        if not self.connections[0].stands:
            self._clock.at(self._clock.now, functools.partial(self._ask_nobody, self.incarnation))

    def _ask_nobody(self, incarnation: int) -> None:
        """Train on: the next push will open the stream again."""
        if self.lives(incarnation):
            self.listener.answered(None)

    @property
    def sent_at(self) -> float:
        """When the last byte of that question was out, in virtual seconds."""
        return self._up.free_at

    @property
    def bytes_up(self) -> int:
        """Training bytes sent."""
        beside = sum(leg.bytes_sent for leg in self._legs if leg is not None)
        return self._up.num_bytes + beside

    @property
    def datagrams(self) -> SentCounts | None:
        """What was sent by channel; None where the method knows no channels."""
        return self._totals.counts() if self._totals is not None else None

    @property
    def bytes_down(self) -> int:
        """Training bytes that shards have sent here."""
        return sum(client.bytes_down for client in self.clients)

    # -- what a client does and tells -------------------------------------------------------

    def tell(self, shard: int, event: Delivery, sizes: list[int], counted: bool) -> None:
        """Send anything to a shard: the one way from workers to shards."""
        self.connections[shard].send(event, sizes, counted)

    def lives(self, incarnation: int) -> bool:
        """Whether this life goes on; what a shard sends to a dead worker is for nobody."""
        return 0 < incarnation == self.incarnation

    def note_epoch(self, epoch: int) -> None:
        """Hear of a membership epoch."""
        self.epoch = max(self.epoch, epoch)

    def give_up(self) -> None:
        """Hear that a shard was not to be reached in all the patience."""
        self.listener.unreachable()

    def welcomed(self, shard: int, last_step: int) -> None:
        """Hear that a shard has welcomed this life, perhaps again.

        Args:
            shard: Which.
            last_step: Of this worker's steps, the last that it has applied.
        """
        if shard in self._welcomed:
            return
        self._welcomed.add(shard)
        self._last_step = max(last_step, self._last_step if shard else 0)
        if shard == 0:  # which names this life for the others
            for other in self.clients[1:]:
                other.hello()
        if len(self._welcomed) == len(self._shards):
            self.listener.joined(self._last_step)

    def settle(self, shard: int, reply: ShardReply | None) -> None:
        """Take one shard's last word; with everybody's, pass them on."""
        self._replies[shard] = reply
        self._mend()
        if not self._asking():
            if self._totals is not None and (step := self.clients[0].step):
                self._totals.tell(step)
            replies, self._replies = self._replies, {}
            self.listener.replied([replies[number] for number in range(len(self._shards))])

    # -- streams that break -----------------------------------------------------------------

    def _lost(self, shard: int) -> None:
        """Hear that a stream is gone."""
        if not self.incarnation:
            return
        if shard == 0 and len(self._welcomed) == len(self._shards) and not self._asking():
            self.listener.answered(None)
        self._mend()

    def _mend(self) -> None:
        """Open again what is waited for; a worker reads one shard's answer after the other's."""
        joining = len(self._welcomed) < len(self._shards)
        waits_for = self.clients[len(self._welcomed) :] if joining else self._asking()
        if waits_for:
            connection = waits_for[0].connection
            if not connection.stands and not connection.dials:
                waits_for[0].hello(reconnects=not joining)

    def _asking(self) -> list[SimulatedClient]:
        """Return those whose question is open."""
        return [client for client in self.clients if client.is_asking]
