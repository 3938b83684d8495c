"""One worker on the virtual clock: the worker core, its device, its link, its deaths."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from absl import logging

from cluster.simulator.clock import Clock
from cluster.simulator.pipes import Pipe, carry, sizes_on_wire
from cluster.simulator.shard import Answer, Port, SimulatedShard
from cluster.simulator.trainer import Trainer
from data.chosen import Shard
from ops import metrics, wire
from ops.codecs import NonFiniteUpdate
from ops.types import Link, State
from proto import convert
from proto import thinwire_pb2 as pb
from ps import events
from ps.pushes import NonFinite, PushDecoder
from worker.core import Outgoing, ShardReply, WorkerCore
from worker.exchange import push_message
from worker.loop import MAX_NON_FINITE

_PULL_SIZES = sizes_on_wire([convert.frame(pb.ToServer(pull=pb.Pull()))])


@dataclasses.dataclass(frozen=True)
class Equipment:
    """What one worker owns."""

    number: int  # from 1
    make_core: Callable[[], WorkerCore]  # for each of its lives
    shard: Shard  # its examples
    step_seconds: Callable[[], float]  # of its next mini-batch
    link: Link
    up: Pipe
    seed: int  # of the losses on its link


@dataclasses.dataclass
class Seconds:
    """Where a worker's virtual time went."""

    compute: float = 0.0
    send: float = 0.0
    wait: float = 0.0


class SimulatedWorker:
    """Joins, steps and exchanges; dies and comes back when told to."""

    def __init__(
        self,
        own: Equipment,
        shards: Sequence[SimulatedShard],
        decoders: Sequence[PushDecoder],
        trainer: Trainer,
        clock: Clock,
    ) -> None:
        """Wait to be started."""
        self.own, self.number = own, own.number
        self.shards, self.decoders, self.trainer, self.clock = shards, decoders, trainer, clock
        self.core = own.make_core()
        self.seconds = Seconds()
        self.chunk_bytes = convert.chunk_bytes_for(own.link)
        self.num_steps = self.num_non_finite = 0
        self.incarnation = 0  # 0: dead
        self.lives = 0

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.incarnation > 0

    # -- life and death ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life: say Hello to shard 0."""
        self.lives += 1
        self.incarnation = (self.lives << 20) + self.number
        if self.lives > 1:
            self.core = self.own.make_core()
        self.local: State = self.trainer.local_of(self.number)
        self.epoch = 0
        self._non_finite_in_a_row = 0
        self._welcomed: set[int] = set()
        self._choosers = [wire.IndexChooser() for _ in self.shards]
        self._asked: dict[int, tuple[events.Event, list[int]]] = {}  # shard -> open question
        self._replies: dict[int, ShardReply | None] = {}
        self._asked_at = self._sent_at = self.clock.now
        for shard in self.shards:
            shard.ports[self.number] = self._port(shard)
        self._hello(0)

    def die(self) -> None:
        """Be killed: what is on its way is lost, the shards see the streams break."""
        incarnation, self.incarnation = self.incarnation, 0
        delay = self.own.link.delay_ms / 1e3
        for shard in self.shards:
            lost = functools.partial(shard.arrive, events.Lost(self.number, incarnation))
            self.clock.at(self.clock.now + delay, lost)

    def leave(self, cause: str) -> None:
        """Say farewell to every shard and end."""
        incarnation, self.incarnation = self.incarnation, 0
        for shard in self.shards:
            shard.handle(events.Leave(self.number, incarnation, cause))

    def _port(self, shard: SimulatedShard) -> Port:
        """Open a stream; the bytes of earlier lives stay counted, the coding starts afresh."""
        link, known = self.own.link, shard.ports.get(self.number)
        if known is None:
            share = shard.layout.size / self.core.spec.num_parameters
            part = Link(link.mbps * share, link.delay_ms, link.loss)
            known = Port(self, Pipe(part, self.own.seed + 1 + shard.number), self.chunk_bytes)
        return dataclasses.replace(known, chooser=wire.IndexChooser())

    # -- one way out, one way in ------------------------------------------------------------

    def tell(self, shard: int, event: events.Event, sizes: list[int], counted: bool) -> float:
        """Send anything to a shard: the one way from workers to shards.

        Returns:
            When the last byte will have left.
        """
        there = self.shards[shard]
        hops = (self.own.up, there.up) if there.has_own_link else (self.own.up,)
        deliver = functools.partial(self._deliver, self.incarnation, there, event)
        carry(self.clock, hops, sizes, counted, deliver)
        return self.own.up.free_at

    def ear(self, shard: int, message: Any) -> Callable[[], None]:
        """Return what lets this life of the worker hear a message; later ones never do."""
        return functools.partial(self._hear, self.incarnation, shard, message)

    def _deliver(self, incarnation: int, there: SimulatedShard, event: events.Event) -> None:
        if incarnation == self.incarnation:
            there.arrive(event)

    def _hear(self, incarnation: int, shard: int, message: Any) -> None:
        if incarnation == self.incarnation:
            self._handlers[type(message)](self, shard, message)

    def _ask(self, shard: int, event: events.Event, sizes: list[int]) -> None:
        """Put a question that stays open until it is answered."""
        self._asked[shard] = (event, sizes)
        self._sent_at = max(self._sent_at, self.tell(shard, event, sizes, counted=True))

    # -- joining ----------------------------------------------------------------------------

    def _hello(self, shard: int, reconnects: bool = False) -> None:
        self._welcomed.discard(shard)
        join = events.Join(self.number, self.incarnation, reconnects, "a simulated worker")
        self.tell(shard, join, [], counted=False)

    def _welcome(self, shard: int, welcome: events.Welcome) -> None:
        self.epoch = max(self.epoch, welcome.epoch)
        self._welcomed.add(shard)
        if shard in self._asked:  # said Hello again in the middle of a question
            self._ask(shard, *self._asked[shard])
            return
        self.core.step = max(self.core.step, welcome.last_step)
        if shard == 0:  # which names this life for the others
            for other in range(1, len(self.shards)):
                self._hello(other)
        if len(self._welcomed) == len(self.shards):
            self._asked_at = self.clock.now
            for number in range(len(self.shards)):
                self._pull(number)

    def _pull(self, shard: int) -> None:
        self._ask(shard, events.Pull(self.number, self.incarnation, None, 0), _PULL_SIZES)

    # -- training ---------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin the next mini-batch, unless the run has ended."""
        if self.core.stopped:
            return
        if self._non_finite_in_a_row > MAX_NON_FINITE:
            logging.warning("worker %d: gradients stay non-finite; it gives up", self.number)
            self.leave("diverged")
            return
        seconds = self.own.step_seconds()
        self.seconds.compute += seconds
        done = functools.partial(self._finish_step, self.incarnation)
        self.clock.at(self.clock.now + seconds, done)

    def _finish_step(self, incarnation: int) -> None:
        """Have the gradient, and what the pacer and the codec make of it."""
        if incarnation != self.incarnation:
            return
        loss, samples, self.local = self.trainer.step(self.core.weights, self.own.shard, self.local)
        self.num_steps += 1
        try:
            outgoing = self.core.begin(self.trainer.gradient, samples, loss)
        except NonFiniteUpdate:
            self.num_non_finite += 1
            self._non_finite_in_a_row += 1
            self._go_on()
            return
        if outgoing is None:
            self._non_finite_in_a_row = 0
            self._go_on()
        else:
            self._push(outgoing)

    def _push(self, outgoing: Outgoing) -> None:
        self._asked_at = self.clock.now
        for number, shard in enumerate(self.shards):
            chooser = self._choosers[number]
            message, pieces = push_message(outgoing, number, self.incarnation, self.epoch, chooser)
            sizes = sizes_on_wire(list(convert.frames(message, pieces, self.chunk_bytes)))
            payload = memoryview(b"".join(pieces))
            event: events.Event
            try:
                event = self.decoders[number].decode(self.number, message.push, payload)
            except NonFinite:
                event = events.Refused(self.number, "non_finite")
            self._ask(shard.number, event, sizes)

    # -- answers ----------------------------------------------------------------------------

    def _answer(self, shard: int, answer: Answer) -> None:
        if answer.step == self._asked_step(shard):
            self.epoch = max(self.epoch, answer.epoch)
            self._settle(shard, answer.reply)

    def _refusal(self, shard: int, refusal: events.Refuse) -> None:
        if refusal.step == self._asked_step(shard) or refusal.reason not in self._remedies:
            self._remedies.get(refusal.reason, SimulatedWorker._give_up)(self, shard, refusal)

    def _send_with_epoch(self, shard: int, refusal: events.Refuse) -> None:
        event, sizes = self._asked[shard]
        self._ask(shard, dataclasses.replace(event, epoch=refusal.epoch), sizes)  # type: ignore

    def _hello_again(self, shard: int, refusal: events.Refuse) -> None:
        self._hello(shard, reconnects=True)

    def _pull_again(self, shard: int, refusal: events.Refuse) -> None:
        self._pull(shard)

    def _do_without(self, shard: int, refusal: events.Refuse) -> None:
        self._settle(shard, None)

    def _give_up(self, shard: int, refusal: events.Refuse) -> None:
        logging.error("worker %d is refused: %s", self.number, refusal.message)
        self.incarnation = 0

    def _settle(self, shard: int, reply: ShardReply | None) -> None:
        """Take one shard's last word; with everybody's, go on at the shards' model."""
        del self._asked[shard]
        self._replies[shard] = reply
        if self._asked:
            return
        self.seconds.send += self._sent_at - self._asked_at
        self.seconds.wait += self.clock.now - max(self._sent_at, self._asked_at)
        replies, self._replies = self._replies, {}
        for number in sorted(replies):
            if (each := replies[number]) is not None:
                self.core.receive(number, each)
        applied = replies[0] is not None
        if not applied:
            self.core.undelivered()
        self._non_finite_in_a_row = 0 if applied else self._non_finite_in_a_row + 1
        self.core.restart_from_base()
        self._go_on()

    def _asked_step(self, shard: int) -> int:
        """The step of the push in question; 0 of a pull."""
        event = self._asked[shard][0] if shard in self._asked else None
        return event.step if isinstance(event, events.Push) else 0

    # -- figures ----------------------------------------------------------------------------

    def report(self) -> str:
        """Return the worker's own counters, as a real one sends them to shard 0."""
        seconds = self.seconds
        return metrics.WorkerMetrics(
            id=self.number,
            clock=self.core.step,
            bytes_up=self.own.up.num_bytes,
            compute_seconds=seconds.compute,
            send_seconds=seconds.send,
            wait_seconds=seconds.wait,
            non_finite=self.num_non_finite,
            steps_per_second=self.num_steps / self.clock.now if self.clock.now else 0.0,
            labels=self.own.shard.label_counts,
        ).to_json()

    _handlers: ClassVar[dict[type, Any]] = {
        events.Welcome: _welcome,
        events.Refuse: _refusal,
        Answer: _answer,
    }
    _remedies: ClassVar[dict[str, Any]] = {
        "STALE_EPOCH": _send_with_epoch,
        "NOT_MEMBER": _hello_again,
        "STALE_GENERATION": _pull_again,
        "NON_FINITE": _do_without,
    }
