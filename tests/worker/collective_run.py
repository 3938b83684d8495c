"""A collective run: a shard and workers with real cores and gRPC, threads, a toy problem."""

import threading
import time
import types

import numpy as np

from tests.virtual.toy import KERNELS, SPEC, Softmax
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.routing.base import Transport
from thinwire.ops.sharding.split import place_tensors
from thinwire.ops.types import Link
from thinwire.proto.grpc import Unreachable
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
from thinwire.runtime.run import fingerprint
from thinwire.runtime.run.credentials import NO_CREDENTIALS
from thinwire.runtime.run.settings import DataChoice, Diverged
from thinwire.worker.client.exchange import Heartbeat
from thinwire.worker.client.pacing_client import PacingClient
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.flags import EmulatedDevice, WorkerFlags
from thinwire.worker.trainer import exchange_for

LEASE_SECONDS = 2.0  # of a machine that does other work as well
PROBLEM = Softmax()


class Shard:
    """A shard in its own thread; started as MiniRun's is."""

    def __init__(self, method, iter_max, generation=0, port=0, state=None, **config):
        self.method, self.iter_max = method, iter_max
        self.nb_workers = sum(len(group) for group in method.sync.groups)
        theta = np.random.default_rng(1).normal(size=28).astype(np.float32) * 0.1
        settings = CoreConfig(
            Budget(iter_max), Schedule(0.1), self.nb_workers, generation, **config
        )
        self.core = PsCore(
            settings,
            method,
            theta,
            KERNELS,
            Coordinator(self.nb_workers, LEASE_SECONDS),
        )
        if state is not None:
            self.core.load_state_dict(state)
        self.layouts = place_tensors(SPEC, 1)
        model = ServedModel.of(self.core, SPEC, self.layouts[0])
        self.server = ShardServer(model, LEASE_SECONDS)
        self.port = self.server.listen("127.0.0.1", port)
        self.run = types.SimpleNamespace(
            method=method,
            policy=None,
            nb_workers=self.nb_workers,
            nb_ps=1,
            seed=1,
            model_is_offered=False,
            iter_max=iter_max,
            schedule=Schedule(0.1),
            addresses=(f"127.0.0.1:{self.port}",),
            reconnect_timeout_seconds=20.0,
            data=DataChoice("toy", None, "unit", "iid", None),
            transport=Transport(),
            credentials=NO_CREDENTIALS,
        )
        self.closing = threading.Event()
        self.server.open_for(
            Identity("run", 0, 1, generation, fingerprint.fingerprint(self.run), SPEC, []), "{}"
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        self.server.run_until(self.closing.is_set)

    def close(self):
        self.closing.set()
        self.thread.join()
        self.server.server.stop()


class WorkerThread(threading.Thread):
    """One worker's training loop; `on_round(worker)` is called before each push.

    Worker w reports that its steps take w fiftieths of a second.
    """

    def __init__(self, number, shard, sync_every=1, on_round=None, incarnation_seed=0):
        super().__init__(daemon=True)
        self.number, self.on_round = number, on_round or (lambda worker: None)
        self.closing = threading.Event()
        own = WorkerFlags(
            number, 1, 0.0, "off", EmulatedDevice(Link(), 1.0, 0.0), sync_every=sync_every
        )
        self.core = WorkerCore(SPEC, shard.layouts, shard.method, KERNELS, [1, number])
        self.exchange = exchange_for(shard.run, own, self.core, self.closing)
        self.batches = np.random.default_rng([1, number, 7])
        self.rounds, self.error, self.dead = 0, None, False
        self.start()

    def run(self):
        try:
            self._train()
        except (Unreachable, ShardGone, Diverged) as error:
            self.error = error

    def _train(self):
        (welcome,) = self.exchange.join()
        self.core.step = welcome.last_applied_step
        heartbeat = Heartbeat(
            self.exchange, LEASE_SECONDS, lambda: f'{{"id": {self.number}}}', lambda: []
        )
        core, cause = self.core, "done"
        asker, seconds = (
            PacingClient(core.method.pacer, self.exchange.shards[0]),
            0.02 * self.number,
        )
        try:
            core.finish(self.exchange.pull())
            asker.begin_round(core.step + 1, seconds)
            while not core.stopped and not self.closing.is_set():
                ready = asker.ready(core.step + 1, core.round.num_steps, seconds, time.monotonic())
                outgoing = core.end_round() if ready else self._step()
                if outgoing is None:
                    continue
                self.on_round(self)
                if self.dead:
                    return
                self.exchange.send(outgoing)
                for number, reply in enumerate(self.exchange.replies()):
                    core.receive(number, reply)
                core.restart_from_base()
                asker.begin_round(core.step + 1, seconds)
                self.rounds += 1
        except Diverged:
            cause = "diverged"
            raise
        finally:
            heartbeat.stop()
            if self.dead:
                self.die()
            else:
                self.exchange.close(cause)

    def _step(self):
        batch = self.batches.integers(0, len(PROBLEM.y), 8)
        return self.core.begin(*self.gradient(batch))

    def gradient(self, batch):
        loss, gradient = PROBLEM.gradient(self.core.weights, batch)
        return gradient, len(batch), loss

    def die(self):
        """Disappear without a message."""
        for shard in self.exchange.shards:
            shard.close()
        for each in (self.exchange._parts, self.exchange._queries, self.exchange._server):
            each.close()

    def end(self, seconds=40.0):
        self.join(seconds)
        assert not self.is_alive(), "the worker hangs"
        return self
