"""Exchanges of updates between one simulated worker and all PS shards, on a virtual clock.

`SimulatedExchange` corresponds to `thinwire.worker.client.exchange.Exchange` of a real worker, and
`SimulatedClient` to `thinwire.worker.client.shard_client.ShardClient`. The clients use the protocol
of a real worker (`ShardProtocol`), but no threads and no sockets. No call blocks: the exchange
calls the worker when all PS shards have replied.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from absl import logging

from thinwire.ops.routing.base import Router, Transport
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.types import Link
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import BytesLike, chunk_bytes_for, frame, frames
from thinwire.ps.core import events
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.simulator.clock import Clock
from thinwire.simulator.datagrams import SimulatedTransport
from thinwire.simulator.links import Pipe, SimulatedConnection, sizes_on_wire
from thinwire.simulator.messages import (
    Datagrams,
    Delivery,
    NonFinitePush,
    ReplyInFlight,
    StreamPart,
    ToWorker,
    to_client,
)
from thinwire.simulator.shard import Port, SimulatedShard
from thinwire.worker.client.datagrams import totals_of
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.client.protocol import (
    Action,
    Answered,
    Ended,
    NewestEpoch,
    Rejoin,
    Replied,
    Send,
    ShardProtocol,
    State,
    Trigger,
    WaitUntil,
)
from thinwire.worker.core.messages import PushRequest, ShardReply

_PATIENCE_SECONDS = 60.0
_ATTEND_SECONDS = 1.0  # seconds until a lost stream without an open request is dialed again
_ENTROPY = 73  # part of the seed of the random pauses between attempts to dial a shard
_RELIABLE, _DEFAULT_TRANSPORT = Reliable(), Transport()
_PULL_SIZES = sizes_on_wire([frame(pb.ToServer(pull=pb.Pull()))])


class ExchangeOwner(Protocol):
    """Interface of the simulated worker that owns a `SimulatedExchange`."""

    number: int

    def on_joined(self, last_step: int) -> None:
        """Start or resume training, because every PS shard has sent a Welcome message.

        Args:
            last_step: Number of the worker's last training step that the PS shards have applied.
        """

    def on_replies(self, replies: list[ShardReply | None]) -> None:
        """Apply the PS shards' replies to a pull or push; None if the push had NaN or infinity."""

    def on_answer(self, answer: pb.Answer | None) -> None:
        """Handle the decision of ESync's state server; None if the state server is unreachable."""

    def on_refused(self) -> None:
        """End the simulated worker, which a PS shard has rejected permanently."""

    def on_unreachable(self) -> None:
        """End the simulated worker, for which a PS shard was unreachable for too long."""


class SimulatedExchange:
    """A simulated worker's connections to all PS shards together: pull, push, query, leave.

    Attributes:
        incarnation: Number of the worker's current incarnation (process); 0 while the worker is
            dead.
        newest_incarnation: Number of the worker's current incarnation (process), or of the last
            incarnation while the worker is dead.
        requested_at: Virtual time in seconds at which the worker sent the newest pull or push.
        clients: The worker's clients of the PS shards, shard 0 first.
        connections: The worker's connections to the PS shards, shard 0 first.
        channels: Datagram channel to each PS shard; None if the run's router sends no datagrams.
        patience_seconds: Time after which the worker gives up an unreachable PS shard, in virtual
            seconds.
        asleep_until: Virtual time in seconds until which the worker's process is stopped.

    Args:
        number: Id of the worker that owns the exchange.
        link: Rate, delay and loss of the worker's link.
        seed: Seed of the random losses on the worker's link.
        shards: All simulated PS shards, shard 0 first.
        decoders: Decoders that the PS shards use for pushes, shard 0 first.
        clock: Virtual clock of the simulation.
        router: Policy that chooses which entries of a push are sent in datagrams.
        transport: Settings of the datagrams, for example their size and pacing.
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
        total = sum(shard.layout.size for shard in shards)
        self.clients: list[SimulatedClient] = []
        for shard, decoder, channel in zip(shards, decoders, self.channels, strict=True):
            down = Link(link.mbps * shard.layout.size / total, link.delay_ms, link.loss)
            rng = np.random.default_rng([_ENTROPY, seed, shard.number])
            connection = SimulatedConnection(
                number, shard, self._uplink, clock, link.delay_ms / 1e3, rng
            )
            port = Port(connection, Pipe(down, seed + 1 + shard.number), chunk_bytes_for(link))
            encoder = PushEncoder(shard.number, channel)
            client = SimulatedClient(self, shard, port, encoder, decoder, clock)
            connection.on_lost = functools.partial(self._on_lost, client)
            self.clients.append(client)
        self.connections = [client.connection for client in self.clients]
        self.incarnation = self.newest_incarnation = 0
        # Highest last applied step that a shard's Welcome has named to the worker's current
        # process.
        self._last_step = 0
        self.patience_seconds, self.asleep_until = _PATIENCE_SECONDS, 0.0
        self.requested_at = 0.0

    # -- start and end ------------------------------------------------------------------------

    def begin_life(self, worker: ExchangeOwner) -> None:
        """Connect to the PS shards as a new incarnation (process) of the worker, shard 0 first."""
        newest = self.newest_incarnation
        self.newest_incarnation += 1 << 20 if newest else (1 << 20) + self.number
        self.incarnation = self.newest_incarnation
        self.worker = worker
        self._welcomed: set[int] = set()
        self._replies: dict[int, ShardReply | None] = {}
        epochs = NewestEpoch()
        for client in self.clients:
            client.begin_life(epochs)
        self.clients[0].join()

    def end_life(self) -> None:
        """End this process of the worker: close its gRPC streams and drop messages in flight."""
        self.incarnation = 0
        for connection in self.connections:
            connection.begin()

    def break_off(self, is_seen: bool = True) -> None:
        """End this incarnation (process) of the worker without a Leave message to the PS shards.

        Args:
            is_seen: True if the PS shards notice that the worker's gRPC streams break.
        """
        self.end_life()
        when = self._clock.now + self._link.delay_ms / 1e3
        for stream in self.connections if is_seen else ():
            self._clock.at(when, functools.partial(stream.shard.lose, self.number, stream.number))

    def leave(self, cause: str) -> None:
        """Send a Leave message to every reachable PS shard, and end this process of the worker."""
        were_open = [connection.stands for connection in self.connections]
        self.end_life()
        for shard, was_open in zip(self._shards, were_open, strict=True):
            if was_open and shard.listens:
                shard.handle(events.Leave(self.number, self.newest_incarnation, cause))

    # -- requests -----------------------------------------------------------------------------

    def pull(self) -> None:
        """Pull the whole model: each PS shard's slice of the parameters."""
        self.requested_at = self._clock.now
        for client in self.clients:
            client.pull()
        self._ensure_joined()

    def push(self, request: PushRequest) -> None:
        """Push the worker's update: to each PS shard its slice of the update."""
        self.requested_at = self._clock.now
        if self._totals is not None:
            self._totals.record(request.routed)
        for client in self.clients:
            client.push(request)
        self._ensure_joined()

    def query(self, query: pb.Query) -> None:
        """Query ESync's state server, which runs on PS shard 0."""
        self.clients[0].query(query)

    def cancel_query(self) -> None:
        """Give up the open query to the state server; a late answer is ignored."""
        self.clients[0].protocol.cancel_query()

    # -- metrics ------------------------------------------------------------------------------

    @property
    def sent_at(self) -> float:
        """Virtual time in seconds at which the last byte of the newest request was sent."""
        return self._uplink.free_at

    @property
    def bytes_up(self) -> int:
        """Number of training bytes that the worker has sent to all PS shards."""
        in_datagrams = sum(channel.bytes_sent for channel in self.channels if channel is not None)
        return self._uplink.num_bytes + in_datagrams

    @property
    def datagrams(self) -> SentCounts | None:
        """Numbers of sent datagrams by channel; None if the run's router sends no datagrams."""
        return self._totals.counts() if self._totals is not None else None

    @property
    def bytes_down(self) -> int:
        """Number of training bytes that all PS shards have sent to this worker."""
        return sum(client.bytes_down for client in self.clients)

    # -- for the clients ----------------------------------------------------------------------

    def lives(self, incarnation: int) -> bool:
        """Return True if `incarnation` is the worker's current process, and the worker is alive."""
        return 0 < incarnation == self.incarnation

    def on_welcome(self, shard: int, last_step: int) -> None:
        """After PS shard 0's Welcome message to this process, connect to the other shards."""
        if shard in self._welcomed:
            return
        self._welcomed.add(shard)
        self._last_step = max(last_step, self._last_step if shard else 0)
        if shard == 0:
            for other in self.clients[1:]:
                other.join()
        if len(self._welcomed) == len(self._shards):
            self.worker.on_joined(self._last_step)

    def on_settled(self, shard: int, reply: ShardReply | None) -> None:
        """Store one PS shard's reply; after the last reply, pass all replies to the worker."""
        self._replies[shard] = reply
        if self.clients[0].protocol.is_expelled:
            self.on_expelled()
        self._ensure_joined()
        if not self._requesting():
            if self._totals is not None and (step := self.clients[0].step):
                self._totals.log(step)
            replies, self._replies = self._replies, {}
            self.worker.on_replies([replies[number] for number in range(len(self._shards))])

    def on_expelled(self) -> None:
        """Abandon the open push on every PS shard if one shard has already applied its slice."""
        # A push of an expelled worker cannot be part of a round that one shard has finished. If the
        # worker sent the push again, the remaining shards would count the push in a later round.
        if any(not client.is_requesting for client in self.clients):
            for client in self.clients:
                client.abandon_push()

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
        """Reconnect lost gRPC streams without an open request, as a worker's heartbeat thread does.

        PS shard 0 may have expelled this worker because another PS shard received nothing from the
        worker. An expelled worker reconnects to PS shard 0 only when every other shard is
        reachable. If the worker reconnected earlier, all workers would again wait for it at the
        unreachable shard.
        """
        if not self.lives(incarnation) or len(self._welcomed) < len(self._shards):
            return
        first, *following = self.clients
        for client in following:
            client.ensure_joined()
        if not first.protocol.is_expelled or all(c.connection.stands for c in following):
            first.ensure_joined()
        if not all(client.connection.stands for client in self.clients):
            self._attend_later()

    def _ensure_joined(self) -> None:
        """Dial the PS shard for whose reply the worker waits; it waits in order of shard ids."""
        joining = len(self._welcomed) < len(self._shards)
        awaited = self.clients[len(self._welcomed) :] if joining else self._requesting()
        if awaited:
            awaited[0].ensure_joined()

    def _requesting(self) -> list[SimulatedClient]:
        """Return the clients of the PS shards that have not answered the newest pull or push."""
        return [client for client in self.clients if client.is_requesting]


class SimulatedClient:
    """A simulated worker's client of one PS shard.

    Attributes:
        connection: Simulated connection to the PS shard, with its newest gRPC stream.
        protocol: State machine of the worker's current incarnation (process) that decides which
            requests are sent, repeated or given up.

    Args:
        exchange: Exchange of the worker (the clients of all shards), which owns this client.
        shard: Simulated PS shard to which the client connects.
        port: The PS shard's end of the client's connection.
        encoder: Encoder of the worker's pushes to the PS shard.
        decoder: Decoder that the PS shard uses for pushes.
        clock: Virtual clock of the simulation.
    """

    def __init__(
        self,
        exchange: SimulatedExchange,
        shard: SimulatedShard,
        port: Port,
        encoder: PushEncoder,
        decoder: PushDecoder,
        clock: Clock,
    ) -> None:
        self._exchange, self._shard, self._clock = exchange, shard, clock
        self._port = port
        self._encoder, self._decoder = encoder, decoder
        self.connection = port.connection
        self.protocol = ShardProtocol(shard.number, NewestEpoch())
        # Newest reply of the PS shard; None before the first reply.
        self._arrived: ReplyInFlight | None = None
        port.deliver = self._deliver
        shard.ports[exchange.number] = port

    def begin_life(self, epochs: NewestEpoch) -> None:
        """Reset the client for a restarted worker process: no gRPC stream, no open request."""
        self.protocol = ShardProtocol(self._shard.number, epochs, self._exchange.incarnation)
        self._encoder.restart()
        self._port.chooser = IndexChooser()
        self.connection.begin()

    @property
    def step(self) -> int:
        """Training step of the worker's newest push; 0 if the newest request is a pull."""
        return self.protocol.step

    @property
    def is_requesting(self) -> bool:
        """True while the PS shard has not answered the worker's newest pull or push."""
        return self.protocol.is_requesting

    @property
    def bytes_down(self) -> int:
        """Number of training bytes that the PS shard has sent to this worker."""
        return self._port.down.num_bytes

    # -- calls by the worker ------------------------------------------------------------------

    def join(self) -> None:
        """Dial the PS shard, and send a Hello message when the new gRPC stream is open."""
        exchange, reconnects = self._exchange, self.protocol.has_joined
        self.protocol.join()
        join = events.Join(exchange.number, exchange.incarnation, reconnects, "a simulated worker")
        send = functools.partial(self.connection.send, join, [], counted=False)
        self.connection.dial(send, exchange.worker.on_unreachable, exchange.patience_seconds)

    def ensure_joined(self) -> None:
        """Dial the PS shard again if the gRPC stream is lost or the shard expelled the worker."""
        if self.protocol.state in (State.CLOSED, State.EXPELLED):
            self.join()

    def pull(self) -> None:
        """Send a pull: a request for the parameters that the PS shard stores."""
        self._perform(self.protocol.pull())

    def push(self, request: PushRequest) -> None:
        """Push the slice of the worker's update that belongs to the PS shard."""
        self._perform(self.protocol.push(request))

    def abandon_push(self) -> None:
        """Give up an unanswered push and send a pull instead; do nothing without such a push."""
        self._perform(self.protocol.abandon_push())

    def query(self, query: pb.Query) -> None:
        """Query ESync's state server; if it is unreachable, schedule `on_answer(None)`."""
        for action in self.protocol.query(query):
            if isinstance(action, Answered) and action.answer is None:
                incarnation = self._exchange.incarnation
                self._clock.at(self._clock.now, functools.partial(self._answer_none, incarnation))
            else:
                self._perform([action])

    def _answer_none(self, incarnation: int) -> None:
        if self._exchange.lives(incarnation):
            self._exchange.worker.on_answer(None)

    def on_lost(self) -> None:
        """Note the loss of the gRPC stream to the PS shard, unless a new stream is being dialed."""
        if not self.connection.dials:
            self._perform(self.protocol.lost())

    # -- incoming messages --------------------------------------------------------------------

    def _deliver(self, stream: int, message: ToWorker) -> None:
        """Deliver a message of a gRPC stream from the PS shard, unless a newer stream exists."""
        retry = functools.partial(self._deliver, stream, message)
        if not self.connection.delivers(stream, retry) or self.connection.dials:
            return
        if self._clock.now < self._exchange.asleep_until:
            self._clock.at(self._exchange.asleep_until, retry)
            return
        if isinstance(message, ReplyInFlight):
            self._arrived = message
        elif isinstance(message, events.Welcome):
            self._on_welcome(message)
            return
        self._perform(self.protocol.receive(to_client(message), self._clock.now))

    def _on_welcome(self, welcome: events.Welcome) -> None:
        exchange, port = self._exchange, self._shard.datagrams
        if self._encoder.channel is not None and port is not None:
            offer = port.introduction(exchange.number, exchange.incarnation)
            self._encoder.channel.open("", offer)
        self._perform(self.protocol.receive(to_client(welcome), self._clock.now))
        self._exchange.on_welcome(self._shard.number, welcome.last_step)

    # -- the protocol's actions ---------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Replied():
                    self._settle(action)
                case Answered():
                    self._exchange.worker.on_answer(action.answer)
                case WaitUntil():
                    wake = functools.partial(self._wake, self._exchange.incarnation)
                    self._clock.at(action.when, wake)
                case Ended():
                    logging.error(
                        "the PS rejects worker %d: %s", self._exchange.number, action.cause
                    )
                    self._exchange.worker.on_refused()
                case Rejoin(after=Trigger.LOST):
                    # A worker waits for the PS shards' replies in order, and its exchange dials a
                    # shard when it waits for that shard's reply.
                    pass
                case Rejoin():
                    self.join()
                    if action.after is Trigger.EXPEL:
                        self._exchange.on_expelled()

    def _wake(self, incarnation: int) -> None:
        if self._exchange.lives(incarnation):
            self._perform(self.protocol.tick(self._clock.now))

    def _send(self, action: Send) -> None:
        request, worker, send = action.request, self._exchange.number, self.connection.send
        if isinstance(request, pb.Query):
            sizes = sizes_on_wire([frame(pb.ToServer(query=request))])
            send(_query_event(worker, request), sizes, counted=True)
        elif isinstance(request, pb.Pull):
            send(events.Pull(worker, action.incarnation, None, 0), _PULL_SIZES, counted=True)
        else:
            for message, pieces in self._encoder.encode(request, action.incarnation, action.epoch):
                send(*self._on_wire(message, pieces), counted=True)
            for message, pieces in self._encoder.finish():
                send(*self._on_wire(message, pieces), counted=True)

    def _on_wire(
        self, message: pb.ToServer, pieces: Sequence[BytesLike]
    ) -> tuple[Delivery, list[int]]:
        """Return a message in the form that a PS shard receives, and its frames' sizes in bytes."""
        if message.WhichOneof("body") == "datagrams":
            return Datagrams(message.datagrams), sizes_on_wire([frame(message)])
        sizes = sizes_on_wire(frames(message, pieces, self._port.chunk_bytes))
        payload, worker = memoryview(b"".join(pieces)), self._exchange.number
        if self._encoder.channel is not None:
            return StreamPart(worker, message.push, payload), sizes
        try:
            return self._decoder.decode(worker, message.push, payload), sizes
        except NonFinite:
            return NonFinitePush(worker, message.push.step), sizes

    def _settle(self, replied: Replied) -> None:
        reply: ShardReply | None = None
        if replied.reply is not None and self._arrived is not None:
            reply = dataclasses.replace(
                self._with_losses(self._arrived), refused=replied.is_outlier
            )
        self._exchange.on_settled(self._shard.number, reply)

    def _with_losses(self, arrived: ReplyInFlight) -> ShardReply:
        channel = self._encoder.channel
        if channel is None or not arrived.step:
            return arrived.reply
        lost = channel.record(arrived.reception or pb.DatagramOutcome())
        return dataclasses.replace(arrived.reply, lost=lost)


def _query_event(worker: int, query: pb.Query) -> events.Query:
    seconds = query.step_seconds, query.age_seconds, query.query_seconds
    return events.Query(worker, query.incarnation, query.step, query.local_steps, *seconds)
