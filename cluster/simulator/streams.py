"""One worker's streams to all shards on the virtual clock: Hello, questions, answers, refusals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from absl import logging

from cluster.simulator.clock import Clock
from cluster.simulator.connection import Connection
from cluster.simulator.pipes import Pipe, sizes_on_wire
from cluster.simulator.shard import Arrival, Replied, SimulatedShard
from cluster.simulator.shard_life import Port
from cluster.simulator.ways import SimulatedWays
from cluster.simulator.wording import Spoken, Wording
from ops import wire
from ops.datagram_counts import SentCounts
from ops.routing import Reliable
from ops.routing.transport import Transport
from ops.types import Link
from proto import convert
from proto import thinwire_pb2 as pb
from ps import events
from ps.pushes import PushDecoder
from worker.datagram_totals import totals_of
from worker.exchanged import Outgoing, ShardReply

_PATIENCE_SECONDS = 60.0
_RELIABLE, _USUAL = Reliable(), Transport()
_ENTROPY = 73  # of the pauses between attempts to reach a shard
_PULL_SIZES = sizes_on_wire([convert.frame(pb.ToServer(pull=pb.Pull()))])


class Listener(Protocol):
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
    """What `worker.exchange.Exchange` is to a real worker, without waiting.

    Attributes:
        incarnation: This life of the worker; 0 while it is dead.
        life: This life or the last one.
        asked_at: When the last question to the shards was put, in virtual seconds.
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
        chunk_bytes = convert.chunk_bytes_for(link)
        self._ways = SimulatedWays(clock, link, seed, router, transport)
        self._up = self._ways.up
        self._legs = [self._ways.leg(number, shard) for shard in shards]
        self._wordings = [
            Wording(number, shard, decoder, leg, chunk_bytes)
            for shard, (decoder, leg) in enumerate(zip(decoders, self._legs, strict=True))
        ]
        self._totals = totals_of(
            number, self._legs, router.channels, lambda: self.bytes_up, transport.dgt_info
        )
        total = sum(shard.layout.size for shard in shards)
        self.connections: list[Connection] = []
        for shard in shards:
            part = Link(link.mbps * shard.layout.size / total, link.delay_ms, link.loss)
            down = Pipe(part, seed + 1 + shard.number)
            rng = np.random.default_rng([_ENTROPY, seed, shard.number])
            delay_seconds = link.delay_ms / 1e3
            connection = Connection(number, shard, self._up, clock, delay_seconds, rng)
            connection.on_lost = self._lost
            self.connections.append(connection)
            shard.ports[number] = Port(self.ear, down, chunk_bytes, connection)
        self.incarnation = self.life = 0
        self.patience_seconds, self.asleep_until = _PATIENCE_SECONDS, 0.0
        self.asked_at = 0.0

    def begin_life(self, listener: Listener) -> None:
        """Say Hello to shard 0; `listener` hears of everything that follows."""
        self.life += 1 << 20 if self.life else (1 << 20) + self.number
        self.incarnation = self.life
        self._listener = listener
        self._epoch = 0
        self._welcomed: set[int] = set()
        for wording in self._wordings:
            wording.begin_life()
        self._asked: dict[int, Callable[[], list[Spoken]]] = {}  # shard -> makes its open question
        self._steps: dict[int, int] = {}  # shard -> the push in question; 0: a pull
        self._replies: dict[int, ShardReply | None] = {}
        self._outliers: set[int] = set()  # shards that have refused the newest push for its size
        for shard, connection in zip(self._shards, self.connections, strict=True):
            shard.ports[self.number].chooser = wire.IndexChooser()
            connection.begin()
        self._hello(0)

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
        for shard in range(len(self._shards)):
            self._pull(shard)
        self._mend()

    def push(self, outgoing: Outgoing) -> None:
        """Push to every shard."""
        self.asked_at = self._clock.now
        self._outliers.clear()
        if self._totals is not None:
            self._totals.note(outgoing.routed)
        for shard in range(len(self._shards)):
            self._ask(shard, outgoing.step, functools.partial(self._say_push, shard, outgoing))
        self._mend()

    def _say_push(self, shard: int, outgoing: Outgoing) -> list[Spoken]:
        return self._wordings[shard].push(outgoing, self.incarnation, self._epoch)

    def query(self, query: pb.Query) -> None:
        """Tell the state server, on shard 0, how far this worker is."""
        event = events.Query(
            self.number, self.incarnation, query.step, query.local_steps, query.step_seconds,
            query.age_seconds, query.query_seconds,
        )  # fmt: skip
        sizes = sizes_on_wire([convert.frame(pb.ToServer(query=query))])
        self.tell(0, event, sizes, counted=True)
        if not self.connections[0].stands:
            self._clock.at(self._clock.now, functools.partial(self._ask_nobody, self.incarnation))

    def _ask_nobody(self, incarnation: int) -> None:
        """Train on: the next push will open the stream again."""
        if self._lives(incarnation):
            self._listener.answered(None)

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
        return sum(shard.ports[self.number].down.num_bytes for shard in self._shards)

    # -- one way out, one way in ------------------------------------------------------------

    def tell(self, shard: int, event: Arrival, sizes: list[int], counted: bool) -> None:
        """Send anything to a shard: the one way from workers to shards."""
        self.connections[shard].send(event, sizes, counted)

    def ear(self, shard: int, stream: int, message: Any) -> Callable[[], None]:
        """Return what lets the worker hear a message on a stream; on no later one it does."""
        return functools.partial(self._hear, shard, stream, message)

    def _hear(self, shard: int, stream: int, message: Any) -> None:
        again = functools.partial(self._hear, shard, stream, message)
        if not self.connections[shard].hears(stream, again):
            return
        if self._clock.now < self.asleep_until:
            self._clock.at(self.asleep_until, again)
            return
        self._handlers[type(message)](self, shard, message)

    def _lives(self, incarnation: int) -> bool:
        """Whether this life goes on; what a shard sends to a dead worker is for nobody."""
        return 0 < incarnation == self.incarnation

    def _ask(self, shard: int, step: int, make: Callable[[], list[Spoken]]) -> None:
        """Put a question that stays open until it is answered.

        Args:
            shard: To whom.
            step: Of the push; 0 of a pull.
            make: Makes the messages, anew whenever they are sent.
        """
        self._asked[shard], self._steps[shard] = make, step
        for event, sizes in make():
            self.tell(shard, event, sizes, counted=True)
        for event, sizes in self._wordings[shard].behind() if step else ():
            self.tell(shard, event, sizes, counted=True)

    # -- joining ----------------------------------------------------------------------------

    def _hello(self, shard: int, reconnects: bool = False) -> None:
        """Introduce the worker on another stream, as soon as one can be opened."""
        join = events.Join(self.number, self.incarnation, reconnects, "a simulated worker")
        say = functools.partial(self.tell, shard, join, [], False)
        self.connections[shard].dial(say, self._give_up, self.patience_seconds)

    def _give_up(self) -> None:
        self._listener.unreachable()

    def _lost(self, shard: int) -> None:
        """Hear that a stream is gone."""
        if not self.incarnation:
            return
        if shard == 0 and len(self._welcomed) == len(self._shards) and not self._asked:
            self._listener.answered(None)
        self._mend()

    def _mend(self) -> None:
        """Open again what is waited for; a worker reads one shard's answer after the other's."""
        joining = len(self._welcomed) < len(self._shards)
        waits_for = [len(self._welcomed)] if joining else sorted(self._asked)
        if waits_for:
            connection = self.connections[waits_for[0]]
            if not connection.stands and not connection.dials:
                self._hello(waits_for[0], reconnects=not joining)

    def _welcome(self, shard: int, welcome: events.Welcome) -> None:
        self._epoch = max(self._epoch, welcome.epoch)
        leg = self._legs[shard]
        if leg is not None:
            leg.opened("", self._shards[shard].introduction(self.number, self.incarnation))
        if shard in self._asked:  # said Hello again in the middle of a question
            self._ask(shard, self._steps[shard], self._asked[shard])
        if shard in self._welcomed:
            return
        self._welcomed.add(shard)
        self._last_step = max(welcome.last_step, self._last_step if shard else 0)
        if shard == 0:  # which names this life for the others
            for other in range(1, len(self._shards)):
                self._hello(other)
        if len(self._welcomed) == len(self._shards):
            self._listener.joined(self._last_step)

    def _pull(self, shard: int) -> None:
        pull = events.Pull(self.number, self.incarnation, None, 0)
        self._ask(shard, 0, lambda: [(pull, _PULL_SIZES)])

    # -- answers ----------------------------------------------------------------------------

    def _answer(self, shard: int, answer: events.Answer) -> None:
        del shard
        self._listener.answered(answer)

    def _reply(self, shard: int, replied: Replied) -> None:
        if shard in self._asked and replied.step == self._asked_step(shard):
            self._epoch = max(self._epoch, replied.epoch)
            reply = self._with_losses(shard, replied)
            self._settle(shard, dataclasses.replace(reply, refused=shard in self._outliers))

    def _with_losses(self, shard: int, replied: Replied) -> ShardReply:
        leg = self._legs[shard]
        if leg is None or not replied.step:
            return replied.reply
        lost = leg.heard(replied.reception or pb.Reception())
        return dataclasses.replace(replied.reply, lost=lost)

    def _refusal(self, shard: int, refusal: events.Refuse) -> None:
        asked = shard in self._asked
        if asked and refusal.step not in (self._asked_step(shard), 0):
            return
        remedy = self._remedies.get(refusal.reason)
        if remedy is None:
            logging.error("worker %d is refused: %s", self.number, refusal.message)
            self._listener.refused()
        elif asked or refusal.reason == "QUARANTINED":
            remedy(self, shard, refusal)
        elif refusal.reason == "NOT_MEMBER":  # to a query: nothing else is open then
            self._hello(shard, reconnects=True)
            self._listener.answered(None)

    def _send_with_epoch(self, shard: int, refusal: events.Refuse) -> None:
        self._epoch = max(self._epoch, refusal.epoch)
        self._ask(shard, self._steps[shard], self._asked[shard])

    def _hello_again(self, shard: int, refusal: events.Refuse) -> None:
        del refusal
        self._hello(shard, reconnects=True)

    def _pull_again(self, shard: int, refusal: events.Refuse) -> None:
        del refusal
        self._pull(shard)

    def _pull_for_outlier(self, shard: int, refusal: events.Refuse) -> None:
        del refusal
        self._outliers.add(shard)
        self._pull(shard)

    def _come_back(self, shard: int, refusal: events.Refuse) -> None:
        """Say Hello again when the term is over, if this life lasts so long."""
        life = self.incarnation

        def come_back() -> None:
            if self._lives(life):
                self._hello(shard, reconnects=True)

        self._clock.at(self._clock.now + refusal.retry_after_seconds, come_back)

    def _do_without(self, shard: int, refusal: events.Refuse) -> None:
        del refusal
        self._settle(shard, None)

    def _settle(self, shard: int, reply: ShardReply | None) -> None:
        """Take one shard's last word; with everybody's, pass them on."""
        del self._asked[shard]
        self._replies[shard] = reply
        self._mend()
        if not self._asked:
            if self._totals is not None and self._steps[0]:
                self._totals.tell(self._steps[0])
            replies, self._replies = self._replies, {}
            self._listener.replied([replies[number] for number in range(len(self._shards))])

    def _asked_step(self, shard: int) -> int:
        """The step of the push in question; 0 of a pull."""
        return self._steps[shard]

    _handlers: ClassVar[dict[type, Any]] = {
        events.Welcome: _welcome,
        events.Refuse: _refusal,
        events.Answer: _answer,
        Replied: _reply,
    }
    _remedies: ClassVar[dict[str, Any]] = {
        "STALE_EPOCH": _send_with_epoch,
        "NOT_MEMBER": _hello_again,
        "STALE_GENERATION": _pull_again,
        "NON_FINITE": _do_without,
        "OUTLIER": _pull_for_outlier,
        "QUARANTINED": _come_back,
    }
