"""A run of real shards and workers in one process: servers, streams and threads over loopback.

Every worker reaches every shard, and every following shard reaches shard 0, over a separate wire
that a test can cut. The run stores each shard's applied updates and each worker's acknowledgments.
"""

from __future__ import annotations

import collections
import dataclasses
import types

import numpy as np

from tests.threads.nodes import ElasticShard, ElasticWorker
from tests.threads.wires import Wire
from tests.virtual.toy import SPEC
from tests.waiting import wait_until
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.routing.base import Transport
from thinwire.ps.core import events
from thinwire.ps.core.members import CoreConfig
from thinwire.runtime.run.credentials import NO_CREDENTIALS
from thinwire.runtime.run.settings import DataChoice


class InProcessCluster:
    """All of it."""

    def __init__(self, method, nb_ps=1, iter_max=100, lease_seconds=1.0, **config):
        self.method, self.nb_ps, self.iter_max = method, nb_ps, iter_max
        self.lease_seconds, self.config = lease_seconds, config
        self.nb_workers = sum(len(group) for group in method.sync.groups)
        self.layouts = method.place(SPEC, nb_ps)
        self.run = types.SimpleNamespace(
            policy=None,
            method=method,
            nb_workers=self.nb_workers,
            nb_ps=nb_ps,
            seed=1,
            iter_max=iter_max,
            addresses=(),
            reconnect_timeout_seconds=20.0,
            schedule=Schedule(0.1),
            kernels="numpy",
            device="cpu",
            data=DataChoice("toy", None, "unit", "iid", None),
            transport=Transport(),
            credentials=NO_CREDENTIALS,
            model_is_offered=False,
            rate_in_round=lambda num_examples: None,
        )
        self.shards = [ElasticShard(self, number) for number in range(nb_ps)]
        targets = [f"127.0.0.1:{shard.port}" for shard in self.shards]
        self.leader_wires = {number: Wire(targets[0]) for number in range(1, nb_ps)}
        self.wires = {
            (worker, shard): Wire(targets[shard])
            for worker in range(1, self.nb_workers + 1)
            for shard in range(nb_ps)
        }
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
        worker = ElasticWorker(self, number, pause_seconds)
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
        """Let shard 0 apply this many updates from now on."""
        goal = self.first.version + more
        wait_until(lambda: self.first.version >= goal, seconds, f"version {goal}")

    def stop(self, reason="iter_max", seconds=20.0):
        """End the run; all threads must end."""
        self.shards[0].server.queue.put(events.Stop(reason))
        self.finish(seconds)

    def finish(self, seconds=30.0):
        """Wait for the end, and check the invariants."""
        for worker in self.workers:
            wait_until(lambda worker=worker: not worker.is_alive(), seconds, f"{worker.name}'s end")
        for shard in self.shards:
            wait_until(lambda shard=shard: shard.core.stop_reason, seconds, "the end")
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
