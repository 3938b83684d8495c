"""Simulated runs of a toy problem: real cores, gradients in numpy, no TensorFlow."""

from __future__ import annotations

import pathlib
import types

import numpy as np

from tests.virtual.toy import KERNELS, SPEC, Softmax, method
from thinwire.ops.optimizers.schedule import Schedule
from thinwire.ops.types import Link
from thinwire.runtime.run.settings import DataChoice, ModelChoice, Run
from thinwire.simulator import devices
from thinwire.simulator.flags import ShardSpeed, SimulatorFlags
from thinwire.simulator.messages import Step
from thinwire.simulator.simulation import Simulation
from thinwire.worker.flags import EmulatedDevice

BATCH = 8
NO_LIMIT, IDEAL = Link(), ShardSpeed(seconds_per_push=0.0, mbps=0.0)


class ToyTrainer:
    """Stands in for the compiled step; `poisoned` workers only make gradients of NaN."""

    def __init__(self, seed: int = 1, poisoned: bool = False) -> None:
        self.spec = SPEC
        self.weights = np.random.default_rng(seed).normal(size=28).astype(np.float32) * 0.1
        self.statistics = np.zeros(0, np.float32)
        self.problem = Softmax()
        self.poisoned = poisoned

    def local_of(self, number):
        return {}

    def step(self, weights, statistics, shard, local):
        chosen = shard.images[shard.cursor.next(), 0].astype(int)
        loss, gradient = self.problem.gradient(weights, chosen)
        if self.poisoned:
            gradient[:] = np.nan
        return Step(gradient.astype(np.float32), loss, len(chosen), statistics, local)


def dataset(examples=400):
    """Each "image" is the number of an example of the toy problem."""
    labels = np.arange(examples) % 4
    return types.SimpleNamespace(
        train_images=np.arange(examples, dtype=np.float32)[:, None],
        train_labels=labels,
        classes=labels,
        train_file_offsets=None,
    )


def run_of(chosen, nb_workers, nb_ps=1, iter_max=60, **settings):
    """Return the settings of a run without files."""
    values = {
        "type_node": "Simulator",
        "method": chosen,
        "nb_workers": nb_workers,
        "addresses": tuple(f"simulated:{number}" for number in range(nb_ps)),
        "seed": 1,
        "run_dir": pathlib.Path("unused"),
        "overwrite": False,
        "model": ModelChoice("toy", None, 1, 1, 4),
        "data": DataChoice("toy", None, "unit", "iid", None),
        "batch_size": BATCH,
        "schedule": Schedule(0.1),
        "iter_max": iter_max,
        "epochs": None,
        "max_seconds": None,
        "target": None,
        "kernels": "numpy",
        "device": "cpu",
        "lease_seconds": 10.0,
        "checkpoint_interval_seconds": 10.0,
        "keep_checkpoints": 1,
        "reconnect_timeout_seconds": 60.0,
    }
    return Run(**(values | settings))


def simulated(name="asgd", nb_workers=2, steps="0.5", choices=None, **settings):
    """Build a simulation of the method `name`."""
    chosen = method(name, nb_workers, **(choices or {}))
    return simulated_of(chosen, steps, **settings)


def simulated_of(
    chosen,
    steps="0.5",
    links=(NO_LIMIT,),
    failures="",
    servers=(IDEAL,),
    trainer=None,
    garbage=None,
    **settings,
):
    """Build a simulation; a single value serves every worker or shard."""
    nb_workers = sum(len(group) for group in chosen.sync.groups)
    run = run_of(chosen, nb_workers, **settings)
    own = SimulatorFlags(
        devices=tuple(EmulatedDevice(link, 1.0, 0.0) for link in _each(links, nb_workers)),
        step_times=devices.parse_speeds(steps, nb_workers),
        outages=devices.parse_outages(failures, nb_workers),
        servers=_each(servers, run.nb_ps),
        threads=1,
        clip_norm=0.0,
        measure="rounds",
        start_timeout_seconds=600.0,
        settings={},
        garbage=garbage or {},
    )
    return Simulation(run, own, trainer or ToyTrainer(), dataset(), KERNELS)


def played(*arguments, **settings):
    """Build a simulation and let it happen."""
    simulation = simulated(*arguments, **settings)
    simulation.play(lambda now: None, lambda: False)
    return simulation


def _each(values, number):
    return tuple(values) * number if len(values) == 1 else tuple(values)
