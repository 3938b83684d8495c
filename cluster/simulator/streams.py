"""One worker's streams to all shards on the virtual clock: Hello, questions, answers, refusals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from absl import logging

from cluster.simulator.clock import Clock
from cluster.simulator.pipes import Pipe, carry, sizes_on_wire
from cluster.simulator.shard import Arrival, Port, Replied, SimulatedShard
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
from worker.core import Outgoing, ShardReply
from worker.datagram_totals import totals_of

_RELIABLE, _USUAL = Reliable(), Transport()
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


class Streams:
    """What `worker.exchange.Exchange` is to a real worker, without waiting.

    Attributes:
        incarnation: This life of the worker; 0 while it is dead.
        life: This life or the last one.
        asked_at: When the last question to the shards was put, in virtual seconds.
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
        for shard in shards:
            part = Link(link.mbps * shard.layout.size / total, link.delay_ms, link.loss)
            down = Pipe(part, seed + 1 + shard.number)
            shard.ports[number] = Port(self.ear, down, chunk_bytes)
        self.incarnation = self.life = 0
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
        for shard in self._shards:
            shard.ports[self.number].chooser = wire.IndexChooser()
        self._hello(0)

    def end_life(self) -> None:
        """Hear nothing any more, and lose what is on its way."""
        self.incarnation = 0

    def break_off(self) -> None:
        """End this life without a word: the shards see the streams break."""
        self.end_life()
        lost = events.Lost(self.number, self.life)
        for shard in self._shards:
            when = self._clock.now + self._link.delay_ms / 1e3
            self._clock.at(when, functools.partial(shard.arrive, lost))

    def farewell(self, cause: str) -> None:
        """End this life in good order."""
        self.end_life()
        for shard in self._shards:
            shard.handle(events.Leave(self.number, self.life, cause))

    def pull(self) -> None:
        """Ask every shard for the model."""
        self.asked_at = self._clock.now
        for shard in range(len(self._shards)):
            self._pull(shard)

    def push(self, outgoing: Outgoing) -> None:
        """Push to every shard."""
        self.asked_at = self._clock.now
        self._outliers.clear()
        if self._totals is not None:
            self._totals.note(outgoing.routed)
        for shard in range(len(self._shards)):
            self._ask(shard, outgoing.step, functools.partial(self._say_push, shard, outgoing))

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
        there = self._shards[shard]
        hops = (self._up, there.up) if there.has_own_link else (self._up,)
        deliver = functools.partial(self._deliver, self.incarnation, there, event)
        carry(self._clock, hops, sizes, counted, deliver)

    def ear(self, shard: int, message: Any) -> Callable[[], None]:
        """Return what lets this life of the worker hear a message; later ones never do."""
        return functools.partial(self._hear, self.incarnation, shard, message)

    def _deliver(self, incarnation: int, there: SimulatedShard, event: Arrival) -> None:
        if self._lives(incarnation):
            there.arrive(event)

    def _hear(self, incarnation: int, shard: int, message: Any) -> None:
        if self._lives(incarnation):
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
        join = events.Join(self.number, self.incarnation, reconnects, "a simulated worker")
        self.tell(shard, join, [], counted=False)

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
