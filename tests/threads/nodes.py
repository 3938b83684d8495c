"""Nodes of `threads.cluster`: real shards and workers in one process, which die and return."""

from __future__ import annotations

import copy
import threading
import time
import types

import numpy as np

from tests.virtual.toy import KERNELS, SPEC, Softmax
from tests.worker_steps import advance
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.sharding.split import shard_spec
from thinwire.ops.types import Link
from thinwire.proto.grpc import Unreachable
from thinwire.proto.grpc.session import RequestRejected
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.ps.service.handshake import Identity, hello_to_leader
from thinwire.ps.service.leader_client import LeaderClient
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
from thinwire.ps.service.state import ServerHooks
from thinwire.runtime.run import fingerprint
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.core.worker_round import MiniBatch, RoundAction
from thinwire.worker.flags import EmulatedDevice, WorkerFlags
from thinwire.worker.trainer import WorkerSession

PROBLEM = Softmax()


class ElasticShard:
    """One shard with its writer thread; may die and return, also at another port."""

    def __init__(self, cluster, number):
        self.cluster, self.number, self.port, self.generation = cluster, number, 0, 0
        self.applied = []  # (version before, worker, incarnation, step)
        self.saved = None  # newest snapshot
        self.leader, self.announced = None, ""
        self.start()

    def start(self):
        cluster, number = self.cluster, self.number
        layout = cluster.layouts[number]
        initial = np.random.default_rng(1).normal(size=28).astype(np.float32) * 0.1
        theta = np.concatenate(
            [
                initial[SPEC.offsets[p.tensor] + p.start : SPEC.offsets[p.tensor] + p.stop]
                for p in layout.slices
            ]
        )
        config = CoreConfig(
            Budget(cluster.iter_max),
            Schedule(0.1),
            cluster.nb_workers,
            self.generation,
            spec=shard_spec(SPEC, layout),
            **cluster.config,
        )
        if number == 0:
            member = Coordinator(cluster.nb_workers, cluster.lease_seconds)
        else:
            member = FollowerMembership(cluster.nb_workers, cluster.lease_seconds)
        aux = WorkerAverages(num_slots=cluster.method.num_averaged(28)) if number == 0 else None
        self.core = PsCore(config, cluster.method, theta, KERNELS, member, aux)
        if self.saved is not None:
            self.core.load_state_dict(copy.deepcopy(self.saved))
            self.applied = [each for each in self.applied if each[0] < self.core.version]
        self._keep_what_is_applied()
        hooks = ServerHooks(save=self._save, on_unreachable=self._report_unreachable)
        model = ServedModel.of(self.core, SPEC, layout)
        self.server = ShardServer(model, cluster.lease_seconds, hooks)
        self.port = self.server.listen("127.0.0.1", self.port)
        self.server.server._listener.stop()  # nothing passes the wires by
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def open(self):
        """Join shard 0, and let clients in."""
        mine = Identity(
            "run",
            self.number,
            self.cluster.nb_ps,
            self.generation,
            fingerprint.fingerprint(self.cluster.run),
            SPEC,
            [],
        )
        if self.number:
            self.leader = LeaderClient(
                self.cluster.leader_wires[self.number].address,
                hello_to_leader(mine, self.announced),
                self.cluster.layouts[self.number],
                self.server.queue.put,
                lambda: "{}",
                is_wanted=lambda: bool(self.server.connections.workers),
            )
            self.leader.connect(20.0)
            self.leader.follow(20.0)
        self.server.open_for(mine, "{}")

    def _report_unreachable(self, action):
        if self.leader is not None:
            self.leader.report_unreachable(action)

    def _run(self):
        self.server.run_until(self.ended.is_set)

    def _save(self, version, state):
        self.saved = state

    def _keep_what_is_applied(self):
        keep, core = self.core.counters.applied, self.core

        def applied(push, version, group):
            self.applied.append((core.version - 1, push.worker, push.incarnation, push.head.step))
            keep(push, version, group)

        core.counters.applied = applied

    def snapshot(self):
        """Save now."""
        done = threading.Event()

        def take():
            self.saved = copy.deepcopy(self.core.state_dict())
            done.set()

        self.server.queue.put(take)
        assert done.wait(10)

    def kill(self):
        """End without a message to any node."""
        self.ended.set()
        self.thread.join(10)
        if self.leader is not None:
            self.leader._closing.set()
            self.leader._session.close(0.0)
        self.server.server._server.stop(None)

    def come_back(self, elsewhere=False):
        """Restart from the newest snapshot, with another generation, maybe at another port."""
        self.generation += 1
        self.port = 0 if elsewhere else self.port
        self.start()
        self.announced = f"127.0.0.1:{self.port}" if elsewhere else ""
        self.open()


class ElasticWorker(threading.Thread):
    """One worker process: the real session of a worker, on a toy problem."""

    def __init__(self, cluster, number, pause_seconds=0.0):
        super().__init__(daemon=True, name=f"worker {number}")
        self.cluster, self.number, self.pause_seconds = cluster, number, pause_seconds
        addresses = tuple(cluster.wires[number, shard].address for shard in range(cluster.nb_ps))
        run = types.SimpleNamespace(**vars(cluster.run) | {"addresses": addresses})
        own = WorkerFlags(number, 1, 0.0, "off", EmulatedDevice(Link(), 1.0, 0.0))
        self.part = WorkerSession(run, own, SPEC, np.zeros(0, np.float32))
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
        except (Unreachable, RequestRejected, ShardGone) as error:
            self.error = error

    def _train(self):
        part, cause = self.part, "error"
        last = part.join()
        if self._state is not None:
            part.core.restore(self._state, last)
        try:
            part.begin()
            action, _, _ = advance(part, part.steps.begin())
            while action is RoundAction.COMPUTE and not part.stopped:
                self._moving.wait()
                action, request, replies = advance(part, self._step())
                if replies:
                    self._acknowledge(request, replies[0])
            cause = "done"
        finally:
            if not self._killed.is_set():
                part.leave(cause)

    def _acknowledge(self, request, reply):
        self.num_rounds += 1
        # step 0: the reply to the pull that replaced an abandoned push
        if reply is not None and reply.step and not reply.refused and not reply.stop:
            self.acknowledged.append(request.head.step)

    def _step(self):
        batch = self.batches.integers(0, len(PROBLEM.y), 8)
        started = time.monotonic()
        loss, gradient = PROBLEM.gradient(self.part.core.weights, batch)
        if self.pause_seconds:
            self.part.closing.wait(self.pause_seconds)
        return self.part.computed(MiniBatch(gradient, len(batch), loss), started)

    def freeze(self):
        """Stand still, as a stopped process does."""
        self._moving.clear()

    def thaw(self):
        """Go on."""
        self._moving.set()

    def kill(self):
        """Disappear without a message."""
        self._killed.set()
        self.part.closing.set()
        if self.part._heartbeat is not None:
            self.part._heartbeat._stop.set()
        for shard in self.part.exchange.shards:
            if (session := shard._session) is not None:
                session.close(0.0)
        self._moving.set()

    def state(self):
        """Return the content of a checkpoint of this worker."""
        return copy.deepcopy(self.part.core.save())
