"""A simulated worker's client of one PS shard, which runs `ShardProtocol` on a virtual clock.

The simulated clients correspond to `thinwire.worker.client.shard_client` and `.pacing_client` of a
real worker. Simulated clients use the protocol of a real worker, but no threads and no sockets, and
no call blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from absl import logging

from thinwire.ops.pacing.base import Pacer
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import BytesLike, frame, frames
from thinwire.ps.core import events
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.simulator.clock import Clock
from thinwire.simulator.links import (
    Pipe,
    SimulatedConnection,
    sizes_on_wire,
)
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
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.client.pacing_client import PATIENCE, PacingState
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

_PULL_SIZES = sizes_on_wire([frame(pb.ToServer(pull=pb.Pull()))])


class ClientOwner(Protocol):
    """Interface that the client of one PS shard requires of a simulated worker's exchange."""

    number: int
    incarnation: int
    asleep_until: float
    patience_seconds: float

    def send(self, shard: int, event: Delivery, sizes: list[int], counted: bool) -> None:
        """Send a message to a PS shard; the simulated worker sends all messages this way."""

    def lives(self, incarnation: int) -> bool:
        """Return whether `incarnation` is the worker's current incarnation (process)."""

    def on_welcome(self, shard: int, last_step: int) -> None:
        """Continue after a PS shard's Welcome message, which a worker gets at each connect."""

    def on_answer(self, answer: pb.Answer | None) -> None:
        """Handle the decision of ESync's state server; None if the state server is unreachable."""

    def on_settled(self, shard: int, reply: ShardReply | None) -> None:
        """Pass on a PS shard's reply to a pull or push; None if the push had NaN or infinity."""

    def on_expelled(self) -> None:
        """Continue after a PS shard has ended this worker's membership in the run."""

    def on_refused(self) -> None:
        """End the simulated worker, which a PS shard has rejected permanently."""

    def on_unreachable(self) -> None:
        """End the simulated worker, for which a PS shard was unreachable for too long."""


class SimulatedClient:
    """A simulated worker's client of one PS shard.

    Attributes:
        connection: Simulated connection to the PS shard, with its newest gRPC stream.
        protocol: State machine of the worker's current incarnation (process) that decides which
            requests are sent, repeated or given up.

    Args:
        owner: Exchange of the worker (the clients of all shards), which owns this client.
        shard: Simulated PS shard to which the client connects.
        connection: Simulated connection to the PS shard.
        encoder: Encoder of the worker's pushes to the PS shard.
        decoder: Decoder that the PS shard uses for pushes.
        downlink: Simulated link from the PS shard to the worker.
        chunk_bytes: Maximum number of bytes of a push or reply in one frame.
        clock: Virtual clock of the simulation.
    """

    def __init__(
        self,
        owner: ClientOwner,
        shard: SimulatedShard,
        connection: SimulatedConnection,
        encoder: PushEncoder,
        decoder: PushDecoder,
        downlink: Pipe,
        chunk_bytes: int,
        clock: Clock,
    ) -> None:
        self._owner, self._shard, self._clock = owner, shard, clock
        self._encoder, self._decoder, self._chunk_bytes = encoder, decoder, chunk_bytes
        self.connection = connection
        self.protocol = ShardProtocol(shard.number, NewestEpoch())
        self._port = Port(self._delivery, downlink, chunk_bytes, connection)
        # Newest reply of the PS shard; None before the first reply.
        self._arrived: ReplyInFlight | None = None
        shard.ports[owner.number] = self._port

    def begin_life(self, epochs: NewestEpoch) -> None:
        """Reset the client for a restarted worker process: no gRPC stream, no open request."""
        self.protocol = ShardProtocol(self._shard.number, epochs, self._owner.incarnation)
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
        owner, number = self._owner, self._shard.number
        reconnects = self.protocol.has_joined
        self.protocol.join()
        join = events.Join(owner.number, owner.incarnation, reconnects, "a simulated worker")
        send = functools.partial(owner.send, number, join, [], False)
        self.connection.dial(send, owner.on_unreachable, owner.patience_seconds)

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
                incarnation = self._owner.incarnation
                self._clock.at(self._clock.now, functools.partial(self._answer_none, incarnation))
            else:
                self._perform([action])

    def _answer_none(self, incarnation: int) -> None:
        if self._owner.lives(incarnation):
            self._owner.on_answer(None)

    def on_lost(self) -> None:
        """Note the loss of the gRPC stream to the PS shard, unless a new stream is being dialed."""
        if not self.connection.dials:
            self._perform(self.protocol.lost())

    # -- incoming messages --------------------------------------------------------------------

    def _delivery(self, stream: int, message: ToWorker) -> Callable[[], None]:
        """Return a function that delivers a message, unless a newer gRPC stream exists then."""
        return functools.partial(self._deliver, stream, message)

    def _deliver(self, stream: int, message: ToWorker) -> None:
        retry = functools.partial(self._deliver, stream, message)
        if not self.connection.delivers(stream, retry) or self.connection.dials:
            return
        if self._clock.now < self._owner.asleep_until:
            self._clock.at(self._owner.asleep_until, retry)
            return
        if isinstance(message, ReplyInFlight):
            self._arrived = message
        elif isinstance(message, events.Welcome):
            self._on_welcome(message)
            return
        self._perform(self.protocol.receive(to_client(message), self._clock.now))

    def _on_welcome(self, welcome: events.Welcome) -> None:
        if self._encoder.channel is not None:
            owner = self._owner
            offer = self._shard.introduction(owner.number, owner.incarnation)
            self._encoder.channel.open("", offer)
        self._perform(self.protocol.receive(to_client(welcome), self._clock.now))
        self._owner.on_welcome(self._shard.number, welcome.last_step)

    # -- the protocol's actions ---------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Replied():
                    self._settle(action)
                case Answered():
                    self._owner.on_answer(action.answer)
                case WaitUntil():
                    wake = functools.partial(self._wake, self._owner.incarnation)
                    self._clock.at(action.when, wake)
                case Ended():
                    logging.error("the PS rejects worker %d: %s", self._owner.number, action.cause)
                    self._owner.on_refused()
                case Rejoin(after=Trigger.LOST):
                    # A worker waits for the PS shards' replies in order, and its exchange dials a
                    # shard when it waits for that shard's reply.
                    pass
                case Rejoin():
                    self.join()
                    if action.after is Trigger.EXPEL:
                        self._owner.on_expelled()

    def _wake(self, incarnation: int) -> None:
        if self._owner.lives(incarnation):
            self._perform(self.protocol.tick(self._clock.now))

    def _send(self, action: Send) -> None:
        request, owner, number = action.request, self._owner, self._shard.number
        if isinstance(request, pb.Query):
            owner.send(number, _query_event(owner.number, request), _query_sizes(request), True)
        elif isinstance(request, pb.Pull):
            pull = events.Pull(owner.number, action.incarnation, None, 0)
            owner.send(number, pull, _PULL_SIZES, counted=True)
        else:
            for message, pieces in self._encoder.encode(request, action.incarnation, action.epoch):
                owner.send(number, *self._on_wire(message, pieces), counted=True)
            for message, pieces in self._encoder.finish():
                owner.send(number, *self._on_wire(message, pieces), counted=True)

    def _on_wire(
        self, message: pb.ToServer, pieces: Sequence[BytesLike]
    ) -> tuple[Delivery, list[int]]:
        """Return a message in the form that a PS shard receives, and its frames' sizes in bytes."""
        if message.WhichOneof("body") == "datagrams":
            return Datagrams(message.datagrams), sizes_on_wire([frame(message)])
        sizes = sizes_on_wire(frames(message, pieces, self._chunk_bytes))
        payload, worker = memoryview(b"".join(pieces)), self._owner.number
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
        self._owner.on_settled(self._shard.number, reply)

    def _with_losses(self, arrived: ReplyInFlight) -> ShardReply:
        channel = self._encoder.channel
        if channel is None or not arrived.step:
            return arrived.reply
        lost = channel.record(arrived.reception or pb.DatagramOutcome())
        return dataclasses.replace(arrived.reply, lost=lost)


def _query_event(worker: int, query: pb.Query) -> events.Query:
    seconds = query.step_seconds, query.age_seconds, query.query_seconds
    return events.Query(worker, query.incarnation, query.step, query.local_steps, *seconds)


def _query_sizes(query: pb.Query) -> list[int]:
    return sizes_on_wire([frame(pb.ToServer(query=query))])


class StateServerClient(Protocol):
    """Interface by which a pacing client queries the state server (ESync's scheduler)."""

    incarnation: int

    def query(self, query: pb.Query) -> None:
        """Query the state server, whose answer is passed to `SimulatedPacingClient.on_answer`."""

    def cancel_query(self) -> None:
        """Give up the open query to the state server; a late answer is ignored."""


class SimulatedPacingClient:
    """A simulated worker's queries to the state server, which schedules local steps (ESync).

    `SimulatedPacingClient` corresponds to `thinwire.worker.client.pacing_client.PacingClient` of a
    real worker. If the pacer never queries the state server, `decide` always decides to train
    another mini-batch.
    """

    def __init__(self, pacer: Pacer, exchange: StateServerClient, clock: Clock) -> None:
        self._queries, self._blocks = pacer.queries, pacer.waits_for_answer
        self._exchange, self._clock = exchange, clock
        self._state = PacingState()
        # Function that receives the decision on the open query; None without an open query.
        self._decide: Callable[[bool], None] | None = None
        self._open = (0, 0)  # training step and number of local steps in the last query
        self._queried_at = 0.0

    def begin_round(self, step: int, step_seconds: float) -> None:
        """Report a training round's start and the last local step's seconds to the state server."""
        if self._queries:
            self._query(step, 0, step_seconds)

    def decide(
        self, step: int, local_steps: int, step_seconds: float, decide: Callable[[bool], None]
    ) -> None:
        """Decide whether to push now; call `decide` with the decision, now or later.

        Args:
            step: Training step (number of exchanges with the PS) of the push that would follow.
            local_steps: Number of local steps that the worker has done in this training round.
                After 0 local steps, the decision is not to push.
            step_seconds: Duration of the last local step, which has just ended, in seconds.
            decide: Function that is called with True to push now, or with False to train another
                mini-batch first.
        """
        if not self._queries or local_steps == 0:
            decide(False)
            return
        self._open, self._decide = (step, local_steps), decide
        self._queried_at = self._clock.now
        self._query(step, local_steps, step_seconds)
        if self._decide is not None and not self._blocks:
            give_up = functools.partial(self._give_up, (step, local_steps))
            self._clock.at(self._clock.now + PATIENCE * step_seconds, give_up)

    def on_answer(self, answer: pb.Answer | None) -> None:
        """Decide by the state server's answer whether to push; None: the server is unreachable."""
        self._settle(answer, is_away=answer is None)

    def _give_up(self, query: tuple[int, int]) -> None:
        if query == self._open and self._decide is not None:
            self._exchange.cancel_query()
            self._settle(None, is_away=False)

    def _settle(self, answer: pb.Answer | None, is_away: bool) -> None:
        decide, self._decide = self._decide, None
        if decide is not None:
            seconds = self._clock.now - self._queried_at
            decide(self._state.decide(self._open[1], answer, seconds, is_away))

    def _query(self, step: int, local_steps: int, step_seconds: float) -> None:
        incarnation = self._exchange.incarnation
        self._exchange.query(self._state.query(incarnation, step, local_steps, step_seconds))
