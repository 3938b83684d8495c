"""One simulated worker's exchanges with all shards.

What `thinwire.worker.client.exchange.Exchange` is to a real worker, on the virtual clock: nothing
waits, the worker is called when all shards have replied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from thinwire.ops.routing.base import Router, Transport
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.types import Link
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import chunk_bytes_for
from thinwire.ps.core import events
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.simulator.client import SimulatedClient
from thinwire.simulator.clock import Clock
from thinwire.simulator.datagrams import SimulatedTransport
from thinwire.simulator.links import Pipe, SimulatedConnection
from thinwire.simulator.messages import Delivery
from thinwire.simulator.shard import SimulatedShard
from thinwire.worker.client.datagrams import totals_of
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.client.protocol import NewestEpoch
from thinwire.worker.core.messages import PushRequest, ShardReply

_PATIENCE_SECONDS = 60.0
_ATTEND_SECONDS = 1.0  # after which a lost stream is opened though nothing is requested on it
_ENTROPY = 73  # of the pauses between attempts to reach a shard
_RELIABLE, _DEFAULT_TRANSPORT = Reliable(), Transport()


class ExchangeOwner(Protocol):
    """The worker that takes part in the exchanges."""

    def on_joined(self, last_step: int) -> None:
        """Every shard has welcomed this incarnation; `last_step` is the last one applied."""

    def on_replies(self, replies: list[ShardReply | None]) -> None:
        """Every shard has replied to a pull or a push; None where it was not finite."""

    def on_answer(self, answer: pb.Answer | None) -> None:
        """The state server has answered; None: it cannot be reached."""

    def on_refused(self) -> None:
        """A shard has refused this worker for good."""

    def on_unreachable(self) -> None:
        """A shard could not be reached for the whole patience."""


class SimulatedExchange:
    """All shards, as one simulated worker sees them.

    Attributes:
        incarnation: Of the worker; 0 while it is dead.
        newest_incarnation: The present one, or the last.
        requested_at: When the newest pull or push was sent, in virtual seconds.
        clients: One for each shard.
        connections: To each shard.
        channels: What carries datagrams to each shard; None where the method sends none.
        patience_seconds: How long to look for a shard.
        asleep_until: Until then the process stands still.

    Args:
        number: Of the worker.
        link: Its link.
        seed: Of the losses on it.
        shards: All of them.
        decoders: Of each shard's pushes.
        clock: Virtual time.
        router: The policy.
        transport: How its datagrams travel.
    """

    def __init__(
        self,
        number: int,
        link: Link,
        seed: int,
        shards: Sequence[SimulatedShard],
        decoders: Sequence[PushDecoder],
        clock: Clock,
        router: Router = _RELIABLE,
        transport: Transport = _DEFAULT_TRANSPORT,
    ) -> None:
        self.number, self._link, self._shards, self._clock = number, link, shards, clock
        shared = SimulatedTransport(clock, link, seed, router, transport)
        self._uplink = shared.uplink
        self.channels = [shared.open_channel(number, shard) for shard in shards]
        self._totals = totals_of(
            number, self.channels, router.channels, lambda: self.bytes_up, transport.dgt_info
        )
        chunk_bytes = chunk_bytes_for(link)
        total = sum(shard.layout.size for shard in shards)
        self.clients: list[SimulatedClient] = []
        for shard, decoder, channel in zip(shards, decoders, self.channels, strict=True):
            down = Link(link.mbps * shard.layout.size / total, link.delay_ms, link.loss)
            rng = np.random.default_rng([_ENTROPY, seed, shard.number])
            connection = SimulatedConnection(
                number, shard, self._uplink, clock, link.delay_ms / 1e3, rng
            )
            client = SimulatedClient(
                self,
                shard,
                connection,
                PushEncoder(shard.number, channel),
                decoder,
                Pipe(down, seed + 1 + shard.number),
                chunk_bytes,
                clock,
            )
            connection.on_lost = functools.partial(self._on_lost, client)
            self.clients.append(client)
        self.connections = [client.connection for client in self.clients]
        self.incarnation = self.newest_incarnation = 0
        self._last_step = 0  # of this worker, by the shards that have welcomed it
        self.patience_seconds, self.asleep_until = _PATIENCE_SECONDS, 0.0
        self.requested_at = 0.0

    # -- life and death -----------------------------------------------------------------------

    def begin_life(self, owner: ExchangeOwner) -> None:
        """Join as another incarnation of the worker, shard 0 first."""
        newest = self.newest_incarnation
        self.newest_incarnation += 1 << 20 if newest else (1 << 20) + self.number
        self.incarnation = self.newest_incarnation
        self._owner = owner
        self._welcomed: set[int] = set()
        self._replies: dict[int, ShardReply | None] = {}
        epochs = NewestEpoch()
        for client in self.clients:
            client.begin_life(epochs)
        self.clients[0].join()

    def end_life(self) -> None:
        """Receive nothing any more, and lose what is on its way."""
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

    def leave(self, cause: str) -> None:
        """End this life in good order, as far as the shards can be reached."""
        stand = [connection.stands for connection in self.connections]
        self.end_life()
        for shard, stands in zip(self._shards, stand, strict=True):
            if stands and shard.listens:
                shard.handle(events.Leave(self.number, self.newest_incarnation, cause))

    # -- requests -----------------------------------------------------------------------------

    def pull(self) -> None:
        """Request the model of every shard."""
        self.requested_at = self._clock.now
        for client in self.clients:
            client.pull()
        self._ensure_joined()

    def push(self, request: PushRequest) -> None:
        """Push to every shard."""
        self.requested_at = self._clock.now
        if self._totals is not None:
            self._totals.record(request.routed)
        for client in self.clients:
            client.push(request)
        self._ensure_joined()

    def query(self, query: pb.Query) -> None:
        """Query the state server, on shard 0."""
        self.clients[0].query(query)

    def cancel_query(self) -> None:
        """Wait for the answer no longer."""
        self.clients[0].protocol.cancel_query()

    # -- figures ------------------------------------------------------------------------------

    @property
    def sent_at(self) -> float:
        """When the last byte of the newest request was out, in virtual seconds."""
        return self._uplink.free_at

    @property
    def bytes_up(self) -> int:
        """Training bytes sent."""
        beside = sum(channel.bytes_sent for channel in self.channels if channel is not None)
        return self._uplink.num_bytes + beside

    @property
    def datagrams(self) -> SentCounts | None:
        """What was sent by channel; None where the method knows no channels."""
        return self._totals.counts() if self._totals is not None else None

    @property
    def bytes_down(self) -> int:
        """Training bytes that shards have sent here."""
        return sum(client.bytes_down for client in self.clients)

    # -- for the clients ----------------------------------------------------------------------

    def send(self, shard: int, event: Delivery, sizes: list[int], counted: bool) -> None:
        """Send anything to a shard: the one way from workers to shards."""
        self.connections[shard].send(event, sizes, counted)

    def lives(self, incarnation: int) -> bool:
        """Return whether this incarnation goes on; a dead worker receives nothing."""
        return 0 < incarnation == self.incarnation

    def on_welcome(self, shard: int, last_step: int) -> None:
        """Join the other shards after shard 0, which names this incarnation for them."""
        if shard in self._welcomed:
            return
        self._welcomed.add(shard)
        self._last_step = max(last_step, self._last_step if shard else 0)
        if shard == 0:
            for other in self.clients[1:]:
                other.join()
        if len(self._welcomed) == len(self._shards):
            self._owner.on_joined(self._last_step)

    def on_settled(self, shard: int, reply: ShardReply | None) -> None:
        """Keep one shard's part; with everybody's, pass them on."""
        self._replies[shard] = reply
        if self.clients[0].protocol.is_expelled:
            self.on_expelled()
        self._ensure_joined()
        if not self._requesting():
            if self._totals is not None and (step := self.clients[0].step):
                self._totals.log(step)
            replies, self._replies = self._replies, {}
            self._owner.on_replies([replies[number] for number in range(len(self._shards))])

    def on_expelled(self) -> None:
        """Finish nowhere what some shard has finished: at the others it is another round by now."""
        if any(not client.is_requesting for client in self.clients):
            for client in self.clients:
                client.abandon_push()

    def on_answer(self, answer: pb.Answer | None) -> None:
        """Pass on what the state server answers."""
        self._owner.on_answer(answer)

    def on_refused(self) -> None:
        """Pass on that a shard has refused this worker for good."""
        self._owner.on_refused()

    def on_unreachable(self) -> None:
        """Pass on that a shard could not be reached for the whole patience."""
        self._owner.on_unreachable()

    # -- streams that break -------------------------------------------------------------------

    def _on_lost(self, client: SimulatedClient) -> None:
        if self.incarnation:
            client.on_lost()
            self._ensure_joined()
            self._attend_later()

    def _attend_later(self) -> None:
        when = self._clock.now + _ATTEND_SECONDS
        self._clock.at(when, functools.partial(self._attend, self.incarnation))

    def _attend(self, incarnation: int) -> None:
        """Open the streams on which nothing is requested, as a real worker's heartbeat does.

        Shard 0 comes last where it has expelled this worker because of another.
        """
        if not self.lives(incarnation) or len(self._welcomed) < len(self._shards):
            return
        first, *others = self.clients
        for client in others:
            client.ensure_joined()
        if not first.protocol.is_expelled or all(other.connection.stands for other in others):
            first.ensure_joined()
        if not all(client.connection.stands for client in self.clients):
            self._attend_later()

    def _ensure_joined(self) -> None:
        """Open the stream that is waited for: replies are awaited one shard after the other."""
        joining = len(self._welcomed) < len(self._shards)
        awaited = self.clients[len(self._welcomed) :] if joining else self._requesting()
        if awaited:
            awaited[0].ensure_joined()

    def _requesting(self) -> list[SimulatedClient]:
        """Return those whose request is open."""
        return [client for client in self.clients if client.is_requesting]
