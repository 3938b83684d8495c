"""What a composition comes to on measured links: the cores of a real run on a virtual clock.

Gradients are real ones of the model's first steps, a few of them lent again and again; coding,
decoding and applying are done for real, and what they take of this machine is measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.simulator.flags import Server, SimulatorFlags
from cluster.simulator.pipes import Pipe
from cluster.simulator.simulation import Simulation
from cluster.simulator.speeds import StepTime
from cluster.simulator.trainer import Step, Trainer
from data.chosen import take_shards
from ops.advice import Prediction, WorkerLink
from ops.metrics import WorkerMetrics
from ops.run import Run
from ops.types import ConfigurationError, Link, State
from worker.core import aligned
from worker.flags import Device

if TYPE_CHECKING:
    from ops.types import Float32

#: Different gradients that are lent; a large model's take memory.
_NUM_GRADIENTS = 8
#: Pushes of each worker from which the seconds of coding are measured.
_PUSHES_TO_TIME = 6
#: Longest time of this machine that the prediction of one composition may take.
_PATIENCE_SECONDS = 60.0


class GradientPool:
    """Lends the gradients of the first steps of training, in place of a Trainer.

    Attributes:
        spec: The shared model.
        weights: [num_parameters] float32 at the start.
        statistics: [m] float32 moving statistics at the start, where they are averaged.
        gradient: [num_parameters] float32, of the last step.
    """

    def __init__(self, run: Run, trainer: Trainer, dataset: Any) -> None:
        """Train a few steps on worker 1's examples."""
        self.spec, self.statistics = trainer.spec, trainer.statistics
        self.weights = trainer.weights
        self.gradient = np.zeros(len(self.weights), np.float32)
        self._samples, self._number = run.batch_size, 0
        shard, local = take_shards(run, dataset)[0], trainer.local_of(1)
        weights, statistics = aligned(len(self.weights)), self.statistics
        weights[:] = self.weights
        self._gradients = []
        for _ in range(_NUM_GRADIENTS):
            step = trainer.step(weights, statistics, shard, local)
            statistics, local = step.statistics, step.local
            self._gradients.append(trainer.gradient.copy())
            weights -= np.float32(run.schedule.rate(0.0)) * trainer.gradient

    def local_of(self, number: int) -> State:
        """Return what stays on a worker: nothing, its gradients are lent."""
        del number
        return {}

    def step(self, weights: Float32, statistics: Float32, shard: Any, local: State) -> Step:
        """Lend the next gradient."""
        del weights, shard
        self.gradient[:] = self._gradients[self._number % len(self._gradients)]
        self._number += 1
        return Step(1.0, self._samples, statistics, local)


@dataclasses.dataclass(frozen=True)
class Mark:
    """Totals at one moment, in virtual seconds."""

    seconds: float
    core_seconds: float  # of this machine
    updates: int
    pushes: int
    replies: int
    samples: int
    bytes_up: int
    bytes_down: int


class Predictor:
    """Plays compositions of one run."""

    def __init__(self, pool: GradientPool, dataset: Any, bodies: Any, pushes: int) -> None:
        """Play nothing yet.

        Args:
            pool: Lends gradients.
            dataset: With train_images and train_labels, as data.chosen loads it.
            bodies: ops.kernels.Kernels.
            pushes: Of each worker, half of which are not counted: rates must have settled.
        """
        self._pool, self._dataset, self._bodies, self._pushes = pool, dataset, bodies, pushes

    def coding_seconds(self, run: Run) -> float:
        """Return what an exchange takes of this machine besides the gradient and the network."""
        links = [WorkerLink(number, 0.1, 0.0, 0.0, 0.0, 0) for number in _numbers(run)]
        first, last = self._play(run, links, 0.0, max(_PUSHES_TO_TIME, 16 // run.nb_workers))
        return (last.core_seconds - first.core_seconds) / max(1, last.pushes - first.pushes)

    def predict(self, run: Run, links: Sequence[WorkerLink], coding_seconds: float) -> Prediction:
        """Return what a run comes to.

        Args:
            run: Its settings.
            links: Of every worker, in order of id.
            coding_seconds: Of an exchange.
        """
        first, last = self._play(run, links, coding_seconds, self._pushes)
        seconds = last.seconds - first.seconds
        pushes = max(1, last.pushes - first.pushes)
        return Prediction(
            updates_per_second=(last.updates - first.updates) / seconds,
            samples_per_second=(last.samples - first.samples) / seconds,
            bytes_up_per_push=(last.bytes_up - first.bytes_up) / pushes,
            bytes_down_per_pull=(last.bytes_down - first.bytes_down)
            / max(1, last.replies - first.replies),
        )

    def _play(
        self, run: Run, links: Sequence[WorkerLink], coding_seconds: float, pushes: int
    ) -> tuple[Mark, Mark]:
        """Let a run happen; return two moments at which an update had just been applied."""
        run = dataclasses.replace(run, iter_max=2**31 - 2, epochs=None, max_seconds=None)
        devices = [_device(link, coding_seconds) for link in links]
        simulation = Simulation(run, _settings(run, links, devices), self._pool, self._dataset,
                                self._bodies)  # type: ignore[arg-type]  # fmt: skip
        _set_down_links(simulation, links, devices)
        watch = _Watch(simulation, pushes * run.nb_workers)
        simulation.play(watch.look, lambda: len(watch.marks) == 2)
        if len(watch.marks) < 2:
            raise ConfigurationError(
                f"--method={run.method.name} came to no second exchange when it was played with "
                "measured gradients; lower --learning_rate."
            )
        return watch.marks[0], watch.marks[1]


class _Watch:
    """Waits for the two moments between which rates are taken."""

    def __init__(self, simulation: Simulation, pushes: int) -> None:
        self.marks: list[Mark] = []
        self._simulation = simulation
        self._core = simulation.shards[0].core
        self._limits = (pushes // 2, pushes)
        self._version = 0
        self._deadline = time.monotonic() + _PATIENCE_SECONDS

    def look(self, now: float) -> None:
        """Note totals when an update has been applied and enough pushes have been made."""
        if self._core.version == self._version or len(self.marks) == 2:
            return
        self._version = self._core.version
        pushes = sum(account.pushes for account in self._core.accounts.workers.values())
        if pushes >= self._limits[len(self.marks)] or time.monotonic() > self._deadline:
            self.marks.append(self._mark(now, pushes))

    def _mark(self, now: float, pushes: int) -> Mark:
        simulation = self._simulation
        reports = [WorkerMetrics.from_json(worker.report()) for worker in simulation.workers]
        return Mark(
            seconds=now,
            core_seconds=time.process_time(),
            updates=self._version,
            pushes=pushes,
            replies=self._core.accounts.num_replies,
            samples=self._core.samples,
            bytes_up=sum(report.bytes_up for report in reports),
            bytes_down=sum(sum(shard.bytes_down().values()) for shard in simulation.shards),
        )


def _numbers(run: Run) -> range:
    return range(1, run.nb_workers + 1)


def _device(link: WorkerLink, coding_seconds: float) -> Device:
    """Coding is part of each exchange, so it is half of it on the way there and half back."""
    one_way = (link.round_trip_seconds + coding_seconds) / 2
    return Device(Link(link.up_mbps, 1e3 * one_way), 1.0, 0.0)


def _settings(run: Run, links: Sequence[WorkerLink], devices: Sequence[Device]) -> SimulatorFlags:
    return SimulatorFlags(
        devices=tuple(devices),
        step_times=tuple(StepTime("constant", (link.step_seconds,)) for link in links),
        outages=(),
        servers=(Server(0.0, 0.0),) * run.nb_ps,
        threads=0,
        clip_norm=0.0,
        measure="off",
        start_timeout_seconds=600.0,
        settings={},
    )


def _set_down_links(
    simulation: Simulation, links: Sequence[WorkerLink], devices: Sequence[Device]
) -> None:
    """Replies have a rate of their own, shared by the shards by what they hold."""
    total = sum(shard.layout.size for shard in simulation.shards)
    for shard in simulation.shards:
        for link, device in zip(links, devices, strict=True):
            rate = link.down_mbps * shard.layout.size / total
            shard.ports[link.worker].down = Pipe(Link(rate, device.link.delay_ms))
