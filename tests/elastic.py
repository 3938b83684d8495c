"""A run of real shards and workers in one process: servers, streams and threads over loopback.

Every worker reaches every shard, and every following shard reaches shard 0, over a wire of its own
that a test may cut. What each shard applied, and what each worker was told that it has, is kept.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import threading
import time
import types

import numpy as np

from ops import agreement
from ops.credentials import NO_CREDENTIALS
from ops.routing.transport import Transport
from ops.run import DataChoice
from ops.schedule import Budget, Schedule
from ops.sync import SyncRule
from ops.types import Link
from proto.channel_grpc import Unreachable
from proto.session import Refused
from ps import events
from ps.aux_mean import AuxMean
from ps.core import PsCore
from ps.follow import Leader
from ps.handshake import hello_to_leader, identity
from ps.members import CoreConfig
from ps.membership import Coordinator, Follower
from ps.server import ShardServer
from tests.harness import KERNELS, SPEC, Softmax
from tests.wires import Wire
from worker.flags import Device, WorkerFlags
from worker.participant import Participant
from worker.shard_client import Halted

PROBLEM = Softmax()


def wait_for(condition, seconds=30.0, what="the condition"):
    """Look until it holds; time in which this process was stopped does not count."""
    waited, before = 0.0, time.monotonic()
    while not condition():
        assert waited < seconds, f"{what} was not seen in {seconds:g} s"
        threading.Event().wait(0.01)
        now = time.monotonic()
        waited, before = waited + min(0.1, now - before), now


class Shard:
    """One shard with its writer thread; may die and come back at the same port."""

    def __init__(self, house, number):
        self.house, self.number, self.port, self.generation = house, number, 0, 0
        self.applied = []  # (version before, worker, incarnation, step)
        self.saved = None  # newest snapshot
        self.leader = None
        self.start()

    def start(self):
        house, number = self.house, self.number
        layout, rule = house.layouts[number], house.method.sync
        initial = np.random.default_rng(1).normal(size=28).astype(np.float32) * 0.1
        theta = np.concatenate(
            [initial[SPEC.offsets[p.tensor] + p.start : SPEC.offsets[p.tensor] + p.stop]
             for p in layout.slices]
        )  # fmt: skip
        config = CoreConfig(
            Budget(house.iter_max), Schedule(0.1), house.nb_workers, self.generation,
            offsets=layout.offsets, **house.config,
        )  # fmt: skip
        if number == 0:
            member = Coordinator(house.nb_workers, house.lease_seconds)
        else:
            member = Follower(house.nb_workers, house.lease_seconds)
            rule = SyncRule(rule.groups)
        aux = AuxMean(num_slots=house.method.num_averaged(28)) if number == 0 else None
        self.core = PsCore(config, house.method, theta, KERNELS, member, rule, aux)
        if self.saved is not None:
            self.core.restore(copy.deepcopy(self.saved))
            self.applied = [each for each in self.applied if each[0] < self.core.version]
        self._keep_what_is_applied()
        self.server = ShardServer(
            self.core, layout, layout.size / 28, self._save, house.lease_seconds, 32
        )
        self.port = self.server.listen("127.0.0.1", self.port)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def open(self):
        """Join shard 0, and let clients in."""
        mine = identity("run", self.number, self.house.nb_ps, self.generation,
                        agreement.fingerprint(self.house.run), SPEC, [])  # fmt: skip
        if self.number:
            self.leader = Leader(
                self.house.leader_wires[self.number].address, hello_to_leader(mine),
                self.house.layouts[self.number], self.server.queue.put, lambda: "{}",
                is_wanted=lambda: bool(self.server.connections.workers),
            )  # fmt: skip
            self.leader.connect(20.0)
            self.server.on_missed = self.leader.miss
            self.leader.follow(20.0)
        self.server.open_for(mine, "{}")

    def _run(self):
        self.server.run_until(self.ended.is_set)

    def _save(self, version, state):
        self.saved = state

    def _keep_what_is_applied(self):
        keep, core = self.core.accounts.applied, self.core

        def applied(push, version, group):
            self.applied.append((core.version - 1, push.worker, push.incarnation, push.step))
            keep(push, version, group)

        core.accounts.applied = applied

    def snapshot(self):
        """Save now."""
        done = threading.Event()

        def take():
            self.saved = copy.deepcopy(self.core.snapshot())
            done.set()

        self.server.queue.put(take)
        assert done.wait(10)

    def kill(self):
        """End without a word to anybody."""
        self.ended.set()
        self.thread.join(10)
        if self.leader is not None:
            self.leader._closing.set()
            self.leader._session.close(0.0)
        self.server.server._server.stop(None)

    def come_back(self):
        """Start anew from the newest snapshot, with another generation."""
        self.generation += 1
        self.start()
        self.open()


class Worker(threading.Thread):
    """One process of a worker: the real Participant on a toy problem."""

    def __init__(self, house, number, pause_seconds=0.0):
        super().__init__(daemon=True, name=f"worker {number}")
        self.house, self.number, self.pause_seconds = house, number, pause_seconds
        addresses = tuple(house.wires[number, shard].address for shard in range(house.nb_ps))
        run = types.SimpleNamespace(**vars(house.run) | {"addresses": addresses})
        own = WorkerFlags(number, 1, 0.0, "off", Device(Link(), 1.0, 0.0))
        self.part = Participant(run, own, SPEC, np.zeros(0, np.float32))
        report = self.part._report
        self.part._report = lambda: self._moving.wait() and report()
        self.batches = np.random.default_rng([1, number, 7])
        self.acknowledged = []  # steps that shard 0 has taken, by its word
        self.num_rounds, self.error, self._state = 0, None, None
        self._moving, self._killed = threading.Event(), threading.Event()
        self._moving.set()

    def run(self):
        try:
            self._train()
        except (Unreachable, Refused, Halted) as error:
            self.error = error

    def _train(self):
        part, cause = self.part, "error"
        last = part.join()
        if self._state is not None:
            part.core.restore(self._state, last)
        try:
            part.begin()
            while not part.stopped:
                self._moving.wait()
                outgoing = part.due() or self._step()
                if outgoing is None:
                    continue
                replies = part.exchange_round(outgoing, lambda weights: None)
                self.num_rounds += 1
                if replies[0] is not None and not replies[0].refused and not replies[0].stop:
                    self.acknowledged.append(outgoing.step)
            cause = "done"
        finally:
            if not self._killed.is_set():
                part.leave(cause)

    def _step(self):
        batch = self.batches.integers(0, len(PROBLEM.y), 8)
        started = time.monotonic()
        loss, gradient = PROBLEM.gradient(self.part.core.weights, batch)
        if self.pause_seconds:
            self.part.closing.wait(self.pause_seconds)
        return self.part.take_in(gradient, len(batch), loss, None, started)

    def freeze(self):
        """Stand still, as a stopped process does."""
        self._moving.clear()

    def thaw(self):
        """Go on."""
        self._moving.set()

    def kill(self):
        """Be gone without a word."""
        self._killed.set()
        self.part.closing.set()
        if self.part._heartbeat is not None:
            self.part._heartbeat._stop.set()
        for shard in self.part.exchange.shards:
            if (session := shard._session) is not None:
                session.close(0.0)
        self._moving.set()

    def state(self):
        """Return what a checkpoint of this worker would hold."""
        return copy.deepcopy(self.part.core.save())


class House:
    """All of it."""

    def __init__(self, method, nb_ps=1, iter_max=100, lease_seconds=1.0, **config):
        self.method, self.nb_ps, self.iter_max = method, nb_ps, iter_max
        self.lease_seconds, self.config = lease_seconds, config
        self.nb_workers = sum(len(group) for group in method.sync.groups)
        self.layouts = method.placement.place(SPEC, nb_ps)
        self.run = types.SimpleNamespace(
            method=method, nb_workers=self.nb_workers, nb_ps=nb_ps, seed=1, iter_max=iter_max,
            addresses=(), reconnect_timeout_seconds=20.0, kernels="numpy", device="cpu",
            data=DataChoice("toy", None, "unit", "iid", None), transport=Transport(),
            credentials=NO_CREDENTIALS,
        )  # fmt: skip
        self.shards = [Shard(self, number) for number in range(nb_ps)]
        targets = [f"127.0.0.1:{shard.port}" for shard in self.shards]
        self.leader_wires = {number: Wire(targets[0]) for number in range(1, nb_ps)}
        self.wires = {
            (worker, shard): Wire(targets[shard])
            for worker in range(1, self.nb_workers + 1) for shard in range(nb_ps)
        }  # fmt: skip
        for shard in self.shards:
            shard.open()
        self.workers = []

    def __enter__(self):
        return self

    def __exit__(self, *why):
        for worker in self.workers:
            worker.kill()
        for shard in self.shards:
            shard.kill()
        for wire in [*self.wires.values(), *self.leader_wires.values()]:
            wire.close()

    def worker(self, number, state=None, pause_seconds=0.0):
        """Start a process of a worker."""
        worker = Worker(self, number, pause_seconds)
        worker._state = state
        self.workers.append(worker)
        worker.start()
        return worker

    def start(self, pause_seconds=0.0):
        """Start all workers; return them."""
        numbers = range(1, self.nb_workers + 1)
        return [self.worker(number, pause_seconds=pause_seconds) for number in numbers]

    @property
    def first(self):
        """Shard 0's core."""
        return self.shards[0].core

    def wait_for_updates(self, more, seconds=30.0):
        """Let shard 0 apply so many updates from now on."""
        goal = self.first.version + more
        wait_for(lambda: self.first.version >= goal, seconds, f"version {goal}")

    def stop(self, reason="iter_max", seconds=20.0):
        """End the run; everybody must come to an end."""
        self.shards[0].server.queue.put(events.Stop(reason))
        self.finish(seconds)

    def finish(self, seconds=30.0):
        """Wait for the end, and check what holds after whatever has happened."""
        for worker in self.workers:
            wait_for(lambda worker=worker: not worker.is_alive(), seconds, f"{worker.name}'s end")
        for shard in self.shards:
            wait_for(lambda shard=shard: shard.core.stop_reason, seconds, "the end")
        self.check()

    def check(self):
        """Nothing is applied twice, and nothing that was acknowledged is missing.

        Who is let go in the middle of an exchange may leave its part of it out on other shards.
        """
        left = self.first.membership.num_left
        for shard in self.shards:
            counts = collections.Counter((w, step) for _, w, _, step in shard.applied)
            twice = [each for each, count in counts.items() if count > 1]
            assert not twice, f"shard {shard.number} applied {twice} twice"
            if shard.generation == 0:
                said = {(worker.number, s) for worker in self.workers for s in worker.acknowledged}
                missing = said - set(counts)
                allowed = left if shard.number else 0
                assert len(missing) <= allowed, f"shard {shard.number} lacks {sorted(missing)}"
            assert np.isfinite(shard.core.model.theta).all()


def config_of(**choices):
    """Return choices of CoreConfig that tests mostly want."""
    return dataclasses.asdict(CoreConfig(Budget(1), Schedule(0.1), 1)) | choices
