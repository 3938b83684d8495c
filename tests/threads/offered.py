"""A shard without a model and workers that offer one, over loopback, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from tests.command_line import given
from tests.nodes import free_ports
from thinwire.flags.run import read_run
from thinwire.ops.offer import Described, Offer, OptimizerOffer, read_offer
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.ps import flags as ps_flags
from thinwire.ps.core import events
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.role import start_offered
from thinwire.ps.scripts.initial_model import model_of_offer
from thinwire.ps.scripts.offering import OfferStage
from thinwire.ps.shard.preparation import PreparedShard
from thinwire.ps.shard.process import ShardProcess
from thinwire.worker import flags as worker_flags
from thinwire.worker.client.offering import Offering
from thinwire.worker.trainer import WorkerSession

SPEC = ModelSpec(
    (
        TensorSpec("dense/kernel", (40, 3)),
        TensorSpec("dense/bias", (3,)),
        TensorSpec("out/kernel", (3, 50)),
    )
)
SGD = OptimizerOffer(Described("SGD", {"learning_rate": 0.5, "momentum": 0.0}))
OFFER = Offer(SPEC, optimizers=(SGD,), num_examples=1000)
FLAGS = (
    *("--model_from=worker", "--method=asgd", "--nb_workers=2", "--kernels=numpy"),
    *("--lease_seconds=2", "--linger_seconds=0.5", "--reconnect_timeout_seconds=20"),
)

_PARSING = threading.Lock()  # absl's flags are the process' own


def weights_of(worker: int, spec: ModelSpec = SPEC):
    """Return initial weights that no other worker has: [num_parameters] float32."""
    return np.random.default_rng(worker).standard_normal(spec.num_parameters, np.float32)


@dataclasses.dataclass(frozen=True)
class Lying(Offering):
    """An offer, or a worker's version of it."""

    lie: Callable[[str, bytes], tuple[str, bytes]] | None = None

    def make(self, shard, layouts):
        document, pieces = super().make(shard, layouts)
        if self.lie is None:
            return document, pieces
        document, payload = self.lie(document, b"".join(pieces))
        return document, [payload]


def restored_shard(run, own):
    """Return a shard that is restored as its process does; it does not listen yet."""
    saved = SavedShard(run, own.node)
    offer = read_offer(saved.last.offer, own.max_model_bytes)
    return PreparedShard.of(run, own, model_of_offer(run, own.id_ps, offer, None), saved)


class OfferedRun:
    """Shards that wait for a model, each served by a thread as its process does.

    Attributes:
        shards: By number, once they have a model.
        failures: By number: what ended a shard.
    """

    def __init__(self, folder, *flags, nb_ps=1, ports=()):
        self.ports = ports or free_ports(nb_ps)
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.flags = (*FLAGS, f"--run_dir={folder}", f"--ps_hosts={hosts}", *flags)
        self.shards, self.stages, self.failures, self.codes = {}, {}, {}, {}
        self.threads = []

    def settings(self, *flags):
        """Return the Run, and the flags of a PS and of a worker; callable from any thread."""
        with _PARSING, given(*self.flags, *flags) as values:
            run = read_run()
            return run, ps_flags.read(run.addresses), worker_flags.read(values.nb_workers)

    def listen(self, number=0, clock=None):
        """Start a shard that has no model, or resumes the model of its folder."""
        run, own, _ = self.settings(f"--id_ps={number}", "--type_node=PS")
        if SavedShard(run, own.node).last.offer is not None and not run.resume:
            prepared = restored_shard(run, own)
            thread = threading.Thread(target=self._go_on, args=(number, prepared), daemon=True)
            self.threads.append(thread)
            thread.start()
            return None
        stage = OfferStage(run, own, *([clock] if clock else []))
        self.stages[number] = stage
        stage.listen()
        thread = threading.Thread(target=self._serve, args=(number, run, own, stage), daemon=True)
        self.threads.append(thread)
        thread.start()
        return stage

    def _go_on(self, number, prepared):
        try:
            shard = self.shards[number] = ShardProcess.open(prepared)
            self.codes[number] = shard.run_to_end()
        except Exception as error:  # noqa: BLE001 - tests look at it
            self.failures[number] = error

    def _serve(self, number, run, own, stage):
        try:
            shard = start_offered(run, own, SavedShard(run, own.node), stage)
            if shard is not None:
                self.shards[number] = shard
                self.codes[number] = shard.run_to_end()
        except Exception as error:  # noqa: BLE001 - tests look at it
            self.failures[number] = error

    def worker(self, number, offer=OFFER, weights=None, flags=(), lie=None):
        """Return a worker that has not joined.

        Args:
            number: Its id.
            offer: The offered model.
            weights: Its initial weights; None: weights that no other worker has.
            flags: Additional flags of the worker.
            lie: Changes the document and the payload that it sends.
        """
        run, _, own = self.settings(f"--id_worker={number}", *flags)
        mine = weights_of(number, offer.spec) if weights is None else weights
        statistics = np.full(offer.statistics, number, np.float32)
        offering = Lying(offer, lambda: mine, lambda: statistics, lie=lie)
        return WorkerSession(run, own, offer.spec, statistics, offering=offering)

    def interrupt(self):
        """End the shards as an operator does: the same command resumes the run."""
        for shard in self.shards.values():
            shard.interrupt()
        for thread in self.threads:
            thread.join(20)

    def close(self):
        for stage in self.stages.values():
            stage.interrupt()
        for shard in self.shards.values():  # an interrupted one would wait for workers to leave
            shard.server.queue.put(events.Stop("finished"))
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@contextlib.contextmanager
def offered_run(folder, *flags, **options):
    """End all shards at the end of the block."""
    run = OfferedRun(folder, *flags, **options)
    try:
        yield run
    finally:
        run.close()
