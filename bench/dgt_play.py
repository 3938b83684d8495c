"""Plays runs of the DGT bench in the Simulator, one after the other in this process."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from bench.dgt_arms import MODELS, Case
from thinwire import cli
from thinwire.data.loading import load_dataset
from thinwire.flags import run as run_flags
from thinwire.models.flat_model import SharedModel
from thinwire.models.loss import ensure_compiled_loss
from thinwire.ops.kernels.base import load_kernels
from thinwire.ops.run.settings import Run
from thinwire.ops.sharding.split import shard_positions
from thinwire.simulator import flags as simulator_flags
from thinwire.simulator.messages import Step
from thinwire.simulator.simulation import Simulation
from thinwire.simulator.trainer import Trainer
from thinwire.supervisor.evaluator import Evaluator
from thinwire.worker.role import limit_threads

#: Test images that are asked on the way, the same ones in all runs; at the end all are.
_NUM_WATCHED = 1000


class Idle(Trainer):
    """Hands out the same gradient for ever: for what does not depend on values."""

    def __init__(self, shared: SharedModel) -> None:
        """Draw it."""
        super().__init__(shared, False, 0.0)
        draw = np.random.default_rng(1).standard_normal(len(self.gradient), np.float32)
        self.gradient[:] = 1e-6 * draw

    def step(self, weights: Any, statistics: Any, shard: Any, local: Any) -> Step:
        """Return at once."""
        return Step(1.0, 1, self.statistics, local)


class Bench:
    """A model with its initial weights and data, compiled once for many runs."""

    def __init__(self, run: Run) -> None:
        """Build model and data."""
        shared, self._evaluated = (SharedModel(run.model, run.seed) for _ in range(2))
        self.dataset = load_dataset(run.data, run.model, shared.user_module, run.seed)
        self.trainers = {True: Trainer(shared, False, 0.0), False: Idle(shared)}
        loss = ensure_compiled_loss(self._evaluated.model)
        self._evaluators = [
            Evaluator(
                self._evaluated.model,
                loss,
                self.dataset.test_images[:count],
                self.dataset.test_labels[:count],
                500,
            )
            for count in (_NUM_WATCHED, None)
        ]

    def evaluate(self, simulation: Simulation, final: bool) -> tuple[float, float]:
        """Return accuracy and loss of the shards' weights."""
        weights = np.empty(simulation.spec.num_parameters, np.float32)
        for shard in simulation.shards:
            values, edges = shard.observe().update.values, shard.layout.offsets
            for slot, where in enumerate(shard_positions(simulation.spec, shard.layout)):
                weights[where] = values[edges[slot] : edges[slot + 1]]
        scores = self._evaluators[final].evaluate(lambda: self._evaluated.assign(weights))
        return scores.accuracy, scores.loss


class Watch:
    """What is noted of one run as virtual time passes.

    Attributes:
        times: Virtual seconds at which each version was there, from 1 on.
        evaluations: (version, accuracy, loss) on the way.
        receptions: (fresh, fill) of each push.
    """

    def __init__(self, case: Case, bench: Bench, simulation: Simulation) -> None:
        """Begin."""
        self._case, self._bench, self._simulation = case, bench, simulation
        self._every = MODELS[case.model].evaluate_every
        self._next_step = {worker.number: 1 for worker in simulation.workers}
        self.times: list[float] = []
        self.evaluations: list[tuple[int, float, float]] = []
        self.receptions: list[tuple[float, float]] = []

    def keep(self, now: float) -> None:
        """Look after each event."""
        shard = self._simulation.shards[0]
        if shard.receptions is not None:
            for worker, step in self._next_step.items():
                came = shard.receptions.outcome(worker, step)
                if came is not None:
                    self._next_step[worker] += 1
                    self.receptions.append((came.fresh, came.filled))
        version = shard.core.version
        if version > len(self.times):
            self.times.append(now)
            if self._case.learns and version % self._every == 0:
                self.evaluations.append((version, *self._bench.evaluate(self._simulation, False)))


class Player:
    """Plays cases; models and data stay from one to the next."""

    def __init__(self, threads: int = 1) -> None:
        """Prepare TensorFlow as the Simulator does."""
        cli.define_flags()
        limit_threads(threads)
        tf.config.experimental.enable_op_determinism()
        self._benches: dict[tuple[str, int], Bench] = {}

    def play(self, case: Case, further: Sequence[str] = ()) -> dict[str, Any]:
        """Play one case, with further flags; return what was measured, as JSON takes it."""
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as folder, flagsaver.flagsaver():
            flags.FLAGS(["main.py", *case.flags(), *further, f"--run_dir={folder}"])
            run = run_flags.read_run()
            own = simulator_flags.read(run)
            run.method.check()
            key = case.model, case.seed
            bench = self._benches.get(key) or Bench(run)
            self._benches[key] = bench
            trainer = bench.trainers[case.learns]
            bodies = load_kernels(run.kernels, on_gpu=False)
            simulation = Simulation(run, own, trainer, bench.dataset, bodies)
            watch = Watch(case, bench, simulation)
            simulation.play(watch.keep, lambda: False)
        return self._found(case, bench, simulation, watch) | {
            "core_seconds": round(time.process_time() - begun, 1)
        }

    def _found(
        self, case: Case, bench: Bench, simulation: Simulation, watch: Watch
    ) -> dict[str, Any]:
        counters = [json.loads(worker.report()) for worker in simulation.workers]
        fresh, fill = ([part[at] for part in watch.receptions] for at in (0, 1))
        return {
            "updates": simulation.shards[0].core.version,
            "times": [round(at, 5) for at in watch.times],
            "evaluations": watch.evaluations,
            "final": bench.evaluate(simulation, True) if case.learns else None,
            "fresh": statistics.mean(fresh) if fresh else None,
            "fill": statistics.mean(fill) if fill else None,
            "push_bytes": sum(each["bytes_up"] for each in counters)
            / max(1, sum(each["clock"] for each in counters)),
        }
