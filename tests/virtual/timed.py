"""A run in one process with message delays: ordered streams, each at its own random pace."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable

from tests.virtual.run import MiniRun, MiniWorker
from thinwire.ps.core import events

HEARTBEAT_SECONDS = 1.0


class TimedWorker(MiniWorker):
    """A worker; each of its steps takes `run.seconds[number]`."""

    epoch = 0
    life = 0

    def join(self, reconnects: bool = False) -> None:
        self.life += 1
        self.incarnation = self.number * 1000 + self.life
        self.alive, self.computing, self.replies = True, False, {}
        join = events.Join(self.number, self.incarnation, reconnects, "peer")
        self.run.send((self, 0), lambda: self.run.feed(0, join))

    def welcome(self, shard: int, action: events.Welcome) -> None:
        """Shard 0 accepts first; then the worker requests the model from all shards."""
        self.core.step = max(self.core.step, action.last_step)
        pull = events.Pull(self.number, self.incarnation, None, 0)
        if shard == 0:
            for other in range(1, len(self.run.shards)):
                join = events.Join(self.number, self.incarnation, False, "peer")
                self.run.send((self, other), lambda o=other, j=join: self.run.feed(o, j))
        self.run.send((self, shard), lambda: self.run.feed(shard, pull))

    def push(self) -> None:
        for shard in range(len(self.run.shards)):
            self.push_to(shard)

    def push_to(self, shard: int) -> None:
        event = dataclasses.replace(self.run.push_event(self, shard), epoch=self.epoch)
        self.run.send((self, shard), lambda: self.run.feed(shard, event))

    def refused(self, shard: int, action: events.Reject) -> None:
        self.epoch = max(self.epoch, action.epoch)
        of_this_life = action.incarnation == self.incarnation and self.outgoing is not None
        if of_this_life and action.reason == "STALE_EPOCH":
            self.push_to(shard)

    def take_reply(self, shard: int, action: events.Reply) -> None:
        self.epoch = max(self.epoch, action.epoch)
        waits_for = 0 if self.outgoing is None or self.life_began else self.outgoing.head.step
        if action.step != waits_for:
            return
        self.take(shard, self.run.decoded(shard, action))
        if self.computing:
            self.life_began = False
            life = self.life
            self.run.later(self.run.seconds[self.number], lambda: self.finish_step(life))

    def finish_step(self, life: int) -> None:
        if self.alive and life == self.life:
            self.step()

    life_began = True


class TimedRun(MiniRun):
    """Plays events in order of time; `rounds` lists which pushes each shard merged together."""

    def __init__(self, chosen, seconds, delay=0.02, late=0.02, **settings) -> None:
        super().__init__(chosen, **settings)
        self.workers = {number: TimedWorker(number, self) for number in self.workers}
        self.seconds, self.delay = dict(enumerate(seconds, start=1)), delay
        self.late = late  # largest delay of messages from workers to shards 1..
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._free_at: dict[object, float] = {}
        self.rounds: list[list[frozenset[tuple[int, int]]]] = [[] for _ in self.shards]
        for shard in range(self.nb_ps):
            self._listen_to(shard)

    def _listen_to(self, shard: int) -> None:
        core = self.shards[shard]
        release = core._release

        def noted(arrivals, now):
            if core.stop_reason is None and not core._lifecycle.is_spent:
                self.rounds[shard].append(frozenset((each.worker, each.step) for each in arrivals))
            return release(arrivals, now)

        core._release = noted

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), do))

    def send(self, stream: tuple[object, object], deliver: Callable[[], None]) -> None:
        """Deliver on a stream, after all earlier messages of the stream."""
        to_others = isinstance(stream[0], TimedWorker) and stream[1] > 0
        most = self.late if to_others else self.delay
        arrives = max(self._free_at.get(stream, 0.0), self.now + self.rng.uniform(0, most))
        self._free_at[stream] = arrives
        self.later(arrives - self.now, deliver)

    def feed(self, shard: int, event: events.Event) -> list[events.Action]:
        actions = self.shards[shard].handle(event, self.now)
        for action in actions:
            self.actions.append((shard, action))
            if isinstance(action, events.NewEpoch) and shard == 0:
                for other in range(1, self.nb_ps):
                    epoch = action.epoch
                    self.send(("epochs", other), lambda o=other, e=epoch: self.feed(o, e))
            elif isinstance(action, events.Reply | events.Welcome | events.Reject):
                self._answer(shard, action)
        return actions

    def _answer(self, shard: int, action: events.Action) -> None:
        worker = self.workers[action.worker]
        life = worker.life

        def deliver() -> None:
            if not worker.alive or worker.life != life:
                return
            if isinstance(action, events.Reply):
                worker.take_reply(shard, action)
            elif isinstance(action, events.Welcome):
                worker.welcome(shard, action)
            else:
                worker.refused(shard, action)

        self.send((shard, worker), deliver)

    def kill(self, number: int) -> None:
        worker = self.workers[number]
        worker.alive = worker.computing = False
        for shard in range(self.nb_ps):
            self.feed(shard, events.WorkerDisconnected(number, worker.incarnation))

    def revive(self, number: int) -> None:
        self.workers[number].outgoing, self.workers[number].life_began = None, True
        self.workers[number].join()

    def _beat(self) -> None:
        for number, worker in self.workers.items():
            if worker.alive:
                self.feed(0, events.WorkerAlive(number))
        for shard in range(self.nb_ps):
            self.feed(shard, events.Tick())
        self.later(HEARTBEAT_SECONDS, self._beat)

    def play(self, until: float = math.inf, limit: int = 200_000) -> TimedRun:
        """Let time pass until the run ends, or until then."""
        if self.now == 0.0:
            self.join_all()
            self._beat()
        for _ in range(limit):
            over = self.shards[0].stop_reason is not None and not self._trains()
            if over and until == math.inf:
                break
            if self._queue[0][0] > until:
                self.now = until
                break
            self.now, _, do = heapq.heappop(self._queue)
            do()
        return self

    def _trains(self) -> bool:
        """Whether a following shard still waits for updates on their way."""
        ended, aim = self.shards[0].ended_at or 0.0, self.shards[0].version
        return self.now < ended + 5.0 and any(core.version < aim for core in self.shards[1:])
