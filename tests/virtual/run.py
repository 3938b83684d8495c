"""A whole run in one process: the real cores, a toy problem, no sockets, a virtual clock."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from tests.virtual.toy import KERNELS, SPEC, Softmax
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.sharding.split import shard_spec
from thinwire.ops.wire.low_rank import expanded
from thinwire.ps.core import events
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.simulator.messages import decoded
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import PushRequest, ShardReply


class MiniWorker:
    """A worker core with its batches."""

    def __init__(self, number: int, run: MiniRun) -> None:
        self.number, self.run = number, run
        self.core = WorkerCore(
            SPEC,
            run.layouts,
            run.method,
            run.kernels,
            [run.seed, number],
            num_examples=len(run.problem.y),
            keeps_on_device=run.keeps_on_device,
        )
        self.batches = np.random.default_rng([run.seed, number, 7])
        self.incarnation = number * 1000
        self.replies: dict[int, ShardReply] = {}
        self.outgoing: PushRequest | None = None
        self.computing = False
        self.alive = True

    def join(self, reconnects: bool = False) -> None:
        self.alive, self.computing, self.replies = True, False, {}
        for shard in range(len(self.run.shards)):
            self.run.feed(shard, events.Join(self.number, self.incarnation, reconnects, "peer"))
        for shard in range(len(self.run.shards)):
            self.run.feed(shard, events.Pull(self.number, self.incarnation, None, 0))

    def step(self) -> None:
        if self.ready():
            self.outgoing, self.computing = self.core.end_round(), False
            self.push()
            return
        batch = self.batches.integers(0, len(self.run.problem.y), self.run.batch)
        loss, gradient = self.run.problem.gradient(np.asarray(self.core.weights), batch)
        self.run.log.append((self.number, batch))
        try:
            outgoing = self.core.begin(self.submitted(gradient), self.run.batch, loss)
        except NonFiniteUpdate:
            return
        if outgoing is None:
            return
        self.outgoing, self.computing = outgoing, False
        self.push()

    def submitted(self, gradient: np.ndarray) -> np.ndarray:
        """The result of a mini-batch; a script's step gives weights."""
        return gradient

    def ready(self) -> bool:
        """Query the state server, if the pacer uses one; worker w takes w hundredths a step."""
        if not self.core.method.pacer.queries or not self.core.round.num_steps:
            return False
        return any(each.ready for each in self.ask() if isinstance(each, events.Answer))

    def ask(self) -> list[events.Action]:
        core = self.core
        query = events.Query(
            self.number,
            self.incarnation,
            core.step + 1,
            core.round.num_steps,
            0.01 * self.number,
            0.0,
            0.0,
        )
        return self.run.feed(0, query)

    def push(self) -> None:
        for shard in range(len(self.run.shards)):
            self.run.feed(shard, self.run.push_event(self, shard))

    def take(self, shard: int, reply: ShardReply) -> None:
        self.replies[shard] = reply
        if len(self.replies) == len(self.run.shards):
            self.go_on([self.replies[each] for each in range(len(self.run.shards))])
            self.replies, self.computing = {}, not self.core.stopped
            self.ask()

    def go_on(self, replies: list[ShardReply]) -> None:
        """Do as `WorkerSession.begin` does, and `finish_exchange` after a push."""
        if self.outgoing is None or self.core.own is not None:
            self.core.finish(replies)
            return
        self.core.settle(replies)


class MiniRun:
    """Shards and workers of one run, driven in a seeded random order."""

    keeps_on_device = True

    def __init__(
        self,
        chosen: Method,
        iter_max: int = 60,
        seed: int = 1,
        nb_ps: int = 1,
        rate: float = 0.1,
        batch: int = 8,
        bodies=KERNELS,
        **config,
    ) -> None:
        self.kernels = bodies
        self.method, self.seed, self.batch, self.nb_ps = chosen, seed, batch, nb_ps
        self.problem = Softmax()
        self.layouts = chosen.place(SPEC, nb_ps)
        self.now = 0.0
        self.rng = random.Random(seed)
        self.log: list[tuple[int, np.ndarray]] = []
        self.actions: list[tuple[int, events.Action]] = []
        nb_workers = sum(len(group) for group in chosen.sync.groups)
        self.settings = CoreConfig(Budget(iter_max), Schedule(rate), nb_workers, **config)
        initial = np.random.default_rng(seed).normal(size=28).astype(np.float32) * 0.1
        self.shards = [self._shard(number, initial) for number in range(nb_ps)]
        self.decoders = [PushDecoder(layout, chosen.kind, bodies) for layout in self.layouts]
        self.workers = {number: MiniWorker(number, self) for number in range(1, nb_workers + 1)}

    def _shard(self, number: int, initial: np.ndarray) -> PsCore:
        layout = self.layouts[number]
        offsets = SPEC.offsets
        theta = np.concatenate(
            [
                initial[offsets[p.tensor] + p.start : offsets[p.tensor] + p.stop]
                for p in layout.slices
            ]
        )
        nb_workers = self.settings.nb_workers
        member = Coordinator(nb_workers, 10.0) if number == 0 else FollowerMembership(nb_workers)
        aux = WorkerAverages(num_slots=self.method.num_averaged(28)) if number == 0 else None
        settings = dataclasses.replace(self.settings, spec=shard_spec(SPEC, layout))
        return PsCore(settings, self.method, theta, self.kernels, member, aux)

    def feed(self, shard: int, event: events.Event) -> list[events.Action]:
        """Pass one event to a shard and carry out its actions."""
        actions = self.shards[shard].handle(event, self.now)
        for action in actions:
            self.actions.append((shard, action))
            if isinstance(action, events.Reply) and self.workers[action.worker].alive:
                self.workers[action.worker].take(shard, self.decoded(shard, action))
            elif isinstance(action, events.NewEpoch) and shard == 0:
                for other in range(1, self.nb_ps):
                    self.feed(other, action.epoch)
        return actions

    def decoded(self, shard: int, reply: events.Reply) -> ShardReply:
        blocks, rounds = decoded(reply.update, self.layouts[shard])
        return ShardReply(
            reply.operation,
            blocks,
            reply.version,
            self.shards[shard].config.generation,
            reply.learning_rate,
            reply.samples,
            reply.stop,
            aux=reply.aux,
            rounds=rounds,
        )

    def push_event(self, worker: MiniWorker, shard: int) -> events.Push:
        outgoing = worker.outgoing
        blocks = [expanded(block) for block in outgoing.shards[shard]]
        update = self.decoders[shard].flatten(blocks)
        return events.Push(
            worker.number,
            worker.incarnation,
            self.shards[0].membership.epoch,
            outgoing.head,
            outgoing.origins[shard],
            update,
            outgoing.aux if shard == 0 else None,
            blocks=tuple(blocks) if self.method.down_codec.relays else None,
        )

    def join_all(self) -> None:
        for worker in self.workers.values():
            worker.join()

    def turn(self) -> bool:
        """Let one random worker that can take a step; return whether there was one."""
        self.now += 0.01
        ready = [worker for worker in self.workers.values() if worker.alive and worker.computing]
        if not ready:
            return False
        self.rng.choice(ready).step()
        return True

    def run(self, max_turns: int = 100_000) -> MiniRun:
        self.join_all()
        for _ in range(max_turns):
            if not self.turn():
                break
        return self

    @property
    def theta(self) -> np.ndarray:
        flat = np.empty(28, np.float32)
        for core, layout in zip(self.shards, self.layouts, strict=True):
            for slot, piece in enumerate(layout.slices):
                start = SPEC.offsets[piece.tensor] + piece.start
                own = layout.offsets
                flat[start : start + piece.size] = core.model.theta[own[slot] : own[slot + 1]]
        return flat

    def deadlocked(self) -> bool:
        return self.shards[0].stop_reason is None
