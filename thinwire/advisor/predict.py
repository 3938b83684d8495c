"""Predicts compositions on measured links, and proposes one.

`Predictor` plays the cores of a real run on a virtual clock. Gradients are real ones of the model's
first steps, a few of them lent again and again; coding, decoding and applying are done for real,
and their time on this machine is measured. `CANDIDATES` are the compositions that an Advisor
predicts, `trials` those that go with the given flags; `propose` chooses one and `describe` writes
the advice.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from thinwire.advisor import costs
from thinwire.advisor.rounds import PLAYED_STEPS
from thinwire.data.loading import take_shards
from thinwire.flags.run import read_run
from thinwire.ops.kernels.numpy_ops import aligned
from thinwire.ops.types import ConfigurationError, Kind, Link, State
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.predictions import (
    Excluded,
    Predicted,
    Prediction,
    Recommendation,
    WorkerLink,
)
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.simulator.devices import StepTime
from thinwire.simulator.flags import ShardSpeed, SimulatorFlags
from thinwire.simulator.links import Pipe
from thinwire.simulator.messages import Step
from thinwire.simulator.simulation import Simulation
from thinwire.simulator.trainer import Trainer
from thinwire.worker.flags import EmulatedDevice

if TYPE_CHECKING:
    from thinwire.data.loading import TrainingShard
    from thinwire.data.registry import Dataset
    from thinwire.ops.kernels import Kernels
    from thinwire.ops.types import Float32, ModelSpec

FLAGS = flags.FLAGS
#: Different gradients that are lent; a large model's take memory.
_NUM_GRADIENTS = 8
#: Pushes of each worker from which the seconds of coding are measured.
_PUSHES_TO_TIME = 6
#: Longest time of this machine that the prediction of one composition may take.
_PATIENCE_SECONDS = 60.0
_UNLIMITED = ShardSpeed(0.0, 0.0)
#: How much slower than the fastest a truer composition may be where none is fast enough.
_ALIKE = 0.1


class GradientPool:
    """Lends the gradients of the first steps of training, in place of a Trainer.

    Attributes:
        spec: The shared model.
        weights: [num_parameters] float32 at the start.
        statistics: [m] float32 moving statistics at the start, where they are averaged.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Float32,
        statistics: Float32,
        gradients: Sequence[Float32],
        samples: int,
    ) -> None:
        """Lend nothing yet.

        Args:
            spec: The shared model.
            weights: [num_parameters] float32 at the start.
            statistics: [m] float32 moving statistics at the start.
            gradients: [num_parameters] float32 each, at least one.
            samples: Of a mini-batch.
        """
        self.spec, self.weights, self.statistics = spec, weights, statistics
        self._gradients, self._samples, self._number = list(gradients), samples, 0

    @classmethod
    def of_first_steps(cls, run: Run, trainer: Trainer, dataset: Dataset) -> GradientPool:
        """Train a few steps on worker 1's examples."""
        shard, local = take_shards(run, dataset)[0], trainer.local_of(1)
        weights, statistics = aligned(len(trainer.weights)), trainer.statistics
        weights[:] = trainer.weights
        gradients = []
        for _ in range(_NUM_GRADIENTS):
            step = trainer.step(weights, statistics, shard, local)
            statistics, local = step.statistics, step.local
            gradients.append(step.gradient)
            weights -= np.float32(run.schedule.rate(0.0)) * step.gradient
        return cls(trainer.spec, trainer.weights, trainer.statistics, gradients, run.batch_size)

    def local_of(self, number: int) -> State:
        """Return the state that stays on a worker: none, its gradients are lent."""
        del number
        return {}

    def step(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Step:
        """Lend the next gradient."""
        del weights, shard
        gradient = self._gradients[self._number % len(self._gradients)].copy()
        self._number += 1
        return Step(gradient, 1.0, self._samples, statistics, local)


@dataclasses.dataclass(frozen=True)
class ProgressPoint:
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

    def __init__(
        self,
        pool: GradientPool,
        dataset: Dataset,
        bodies: Kernels,
        pushes: int,
        server: ShardSpeed = _UNLIMITED,
    ) -> None:
        """Play nothing yet.

        Args:
            pool: Lends gradients.
            dataset: The training part at least.
            bodies: Of the policies' array work.
            pushes: Of each worker, half of which are not counted: rates must have settled.
            server: What each shard can do; by default all, and immediately.
        """
        self._pool, self._dataset, self._bodies, self._pushes = pool, dataset, bodies, pushes
        self._server = server

    def coding_seconds(self, run: Run) -> float:
        """Return this machine's time for an exchange, without the gradient and the network."""
        links = [WorkerLink(number, 0.1, 0.0, 0.0, 0.0, 0) for number in _numbers(run)]
        first, last = self._play(run, links, 0.0, max(_PUSHES_TO_TIME, 16 // run.nb_workers))
        return (last.core_seconds - first.core_seconds) / max(1, last.pushes - first.pushes)

    def predict(self, run: Run, links: Sequence[WorkerLink], coding_seconds: float) -> Prediction:
        """Return the rates that a run would reach.

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
    ) -> tuple[ProgressPoint, ProgressPoint]:
        """Simulate a run; return two moments at which an update had just been applied."""
        run = dataclasses.replace(run, iter_max=2**31 - 2, epochs=None, max_seconds=None)
        devices = [_device(link, coding_seconds) for link in links]
        simulation = Simulation(
            run,
            _settings(run, links, devices, self._server),
            self._pool,
            self._dataset,
            self._bodies,
        )
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
        self.marks: list[ProgressPoint] = []
        self._simulation = simulation
        self._core = simulation.shards[0].core
        self._limits = (pushes // 2, pushes)
        self._version = 0
        self._deadline = time.monotonic() + _PATIENCE_SECONDS

    def look(self, now: float) -> None:
        """Record totals when an update has been applied and enough pushes have been made."""
        if self._core.version == self._version or len(self.marks) == 2:
            return
        self._version = self._core.version
        pushes = sum(account.pushes for account in self._core.counters.workers.values())
        if pushes >= self._limits[len(self.marks)] or time.monotonic() > self._deadline:
            self.marks.append(self._mark(now, pushes))

    def _mark(self, now: float, pushes: int) -> ProgressPoint:
        simulation = self._simulation
        reports = [WorkerMetrics.from_json(worker.report()) for worker in simulation.workers]
        return ProgressPoint(
            seconds=now,
            core_seconds=time.process_time(),
            updates=self._version,
            pushes=pushes,
            replies=self._core.counters.num_replies,
            samples=self._core.samples,
            bytes_up=sum(report.bytes_up for report in reports),
            bytes_down=sum(sum(shard.bytes_down().values()) for shard in simulation.shards),
        )


def _numbers(run: Run) -> range:
    return range(1, run.nb_workers + 1)


def _device(link: WorkerLink, coding_seconds: float) -> EmulatedDevice:
    """Coding is part of each exchange, so it is half of it on the way there and half back."""
    one_way = (link.round_trip_seconds + coding_seconds) / 2
    return EmulatedDevice(Link(link.up_mbps, 1e3 * one_way), 1.0, 0.0)


def _settings(
    run: Run,
    links: Sequence[WorkerLink],
    devices: Sequence[EmulatedDevice],
    server: ShardSpeed,
) -> SimulatorFlags:
    return SimulatorFlags(
        devices=tuple(devices),
        step_times=tuple(StepTime("constant", (link.step_seconds,)) for link in links),
        outages=(),
        servers=(server,) * run.nb_ps,
        threads=0,
        clip_norm=0.0,
        measure="off",
        start_timeout_seconds=600.0,
        settings={},
    )


def _set_down_links(
    simulation: Simulation, links: Sequence[WorkerLink], devices: Sequence[EmulatedDevice]
) -> None:
    """Replies have a rate of their own, shared by the shards by what they hold."""
    total = sum(shard.layout.size for shard in simulation.shards)
    for shard in simulation.shards:
        for link, device in zip(links, devices, strict=True):
            rate = link.down_mbps * shard.layout.size / total
            shard.ports[link.worker].down = Pipe(Link(rate, device.link.delay_ms))


# -- candidates --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One composition, as flags; a further one is a line in CANDIDATES."""

    flags: tuple[str, ...]
    #: Flags for the prediction, where a run begins in another way than it continues.
    settled: tuple[str, ...] = ()
    #: Most steps of a round whose length follows from the links; 0: it is not to be chosen.
    most_local_steps: int = 0


def _sparse(method: str, rate: str, value_dtype: str, *settled: str) -> Candidate:
    return Candidate(
        (f"--method={method}", f"--compression_rate={rate}", f"--value_dtype={value_dtype}"),
        settled,
    )


#: Longest rounds that are proposed: with longer ones few runs have rounds enough to converge.
_MOST_STEPS = 100
#: From true to lossy: exact updates in lockstep; exact ones, ever more stale; steps of the workers
#: on their own; rounded values; ever fewer entries, first those whose rest is sent later with a
#: momentum of its own, then the plain ones, those whose rest is dropped, ever
#: fewer of them, last few of few bits after many steps.
CANDIDATES = (
    Candidate(("--method=bsp",)),
    Candidate(("--method=ssp", "--staleness_bound=3")),
    Candidate(("--method=gsp", "--groups=auto")),
    Candidate(("--method=ssp", "--staleness_bound=10")),
    Candidate(("--method=asgd",)),
    Candidate(("--method=esync",)),
    Candidate(("--method=fedavg",), most_local_steps=_MOST_STEPS),
    Candidate(("--method=diloco",), most_local_steps=_MOST_STEPS),
    Candidate(("--method=asgd", "--value_dtype=bfloat16", "--error_feedback")),
    _sparse("dgs", "0.1", "float32"),
    _sparse("dgs", "0.1", "bfloat16"),
    _sparse("dgs", "0.01", "float32"),
    _sparse("dgs", "0.01", "bfloat16"),
    _sparse("dgs", "0.01", "int8"),
    _sparse("dgc", "0.01", "float32", "--warmup_epochs=0"),
    _sparse("gd", "0.01", "float32"),
    _sparse("adacomp", "0.01", "float32"),
    _sparse("dgs", "0.001", "bfloat16"),
    _sparse("dgc", "0.001", "bfloat16", "--warmup_epochs=0"),
    Candidate(("--method=sparseloco",), most_local_steps=_MOST_STEPS),
)


@dataclasses.dataclass(frozen=True)
class RunnableCandidate:
    """A candidate that can be run with the given flags."""

    candidate: Candidate
    run: Run  # as it would begin
    settled: Run  # as it would continue
    #: Fewest and most local steps, and what makes it of some number of them; None: as it is.
    local_steps: tuple[int, int] = (0, 0)
    with_steps: Callable[[int], RunnableCandidate] | None = None


def trials(
    folder: pathlib.Path,
    candidates: tuple[Candidate, ...] = CANDIDATES,
    given: flags.FlagValues = FLAGS,
    server_optimizer: str | None = None,
) -> tuple[list[RunnableCandidate], list[Excluded]]:
    """Return the candidates that the given flags leave open, and why the others are out.

    Args:
        folder: Run directory of the trials.
        candidates: In order.
        given: The command line; its choices of a method stay.
        server_optimizer: Of a script, for the methods whose optimizer is on the PS; None: that of
            the flags.

    Raises:
        ConfigurationError: None is left.
    """

    def made(candidate: Candidate) -> RunnableCandidate:
        run = compose(candidate.flags, folder, given)
        extra = candidate.flags
        if server_optimizer is not None and run.method.kind is Kind.GRADIENT:
            extra = (*extra, f"--server_optimizer={server_optimizer}")
            run = compose(extra, folder, given)
        settled = compose((*extra, *candidate.settled), folder, given)
        return RunnableCandidate(candidate, run, settled)

    def of_steps(candidate: Candidate, steps: int) -> RunnableCandidate:
        flags_of_it = (*candidate.flags, f"--local_steps={steps}")
        return made(dataclasses.replace(candidate, flags=flags_of_it))

    kept, left_out = [], []
    for candidate in candidates:
        try:
            _refuse_contradiction(candidate, given)
            if candidate.most_local_steps:
                least, most = PLAYED_STEPS, candidate.most_local_steps
                if given["local_steps"].present:
                    least = most = int(given.local_steps)
                kept.append(
                    dataclasses.replace(
                        of_steps(candidate, PLAYED_STEPS),
                        local_steps=(least, most),
                        with_steps=functools.partial(of_steps, candidate),
                    )
                )
            else:
                kept.append(made(candidate))
        except ConfigurationError as error:
            left_out.append(Excluded(list(candidate.flags), " ".join(str(error).split())[:900]))
    if not kept:
        raise ConfigurationError(
            "no composition that an Advisor knows goes with the given flags, which all stay as "
            f"given: {left_out[0].flags[0]}: {left_out[0].why}; leave some out."
        )
    return kept, left_out


def compose(extra: tuple[str, ...], folder: pathlib.Path, given: flags.FlagValues = FLAGS) -> Run:
    """Return the run of the given flags with some more; raises ConfigurationError."""
    changed = copy.deepcopy(given)
    try:
        changed(["advisor", *extra, f"--run_dir={folder}", "--overwrite"])
    except flags.Error as error:
        raise ConfigurationError(str(error)) from error
    return read_run(changed)


def _refuse_contradiction(candidate: Candidate, given: flags.FlagValues) -> None:
    """Reject a candidate that differs from a given flag, on which no advice is wanted."""
    for flag in candidate.flags:
        name = flag.removeprefix("--").partition("=")[0]
        if not given[name].present:
            continue
        wanted = copy.deepcopy(given)
        wanted(["advisor", flag])
        if wanted[name].value != given[name].value:
            raise ConfigurationError(f"--{name}={given[name].value} was given")


# -- the advice --------------------------------------------------------------------------------


def ideal_samples_per_second(links: Sequence[WorkerLink], batch_size: int) -> float:
    """Return the workers' rate if nothing had to be exchanged."""
    return sum(batch_size / link.step_seconds for link in links)


def propose(predicted: Sequence[Predicted], ideal: float, rate: float) -> tuple[int, bool]:
    """Choose a composition.

    Args:
        predicted: From true to lossy, at least one.
        ideal: Samples a second of workers that exchange nothing.
        rate: Share of it that is enough.

    Returns:
        Index of the first that is fast enough, and True; if none is, of the first that is at most
        a tenth slower than the fastest, and False.
    """
    rates = [row.prediction.samples_per_second for row in predicted]
    enough = [number for number, each in enumerate(rates) if each >= rate * ideal]
    if enough:
        return enough[0], True
    fastest = [number for number, each in enumerate(rates) if each >= (1 - _ALIKE) * max(rates)]
    return fastest[0], False


def command_of(advice: Recommendation, path: pathlib.Path) -> str:
    """Return the command line that is proposed; the run will compare itself with `path`."""
    if advice.script:
        proposed = advice.predicted[advice.proposal].flags
        return shlex.join(["thinwire", "run", *advice.given, *proposed, *advice.script])
    flags = [*advice.given, *advice.predicted[advice.proposal].flags, f"--advice={path}"]
    return shlex.join(["thinwire", "cluster", *flags])


def describe(advice: Recommendation, path: pathlib.Path) -> str:
    """Return the whole advice as text; it is stored at `path`."""
    lines = [*_lines(advice), "", *_seen_costs(advice), "", *_verdict(advice)]
    return "\n".join([*lines, command_of(advice, path)]) + "\n"


def _lines(advice: Recommendation) -> Iterator[str]:
    yield "worker  step ms  up Mbit/s  down Mbit/s  round trip ms  rounds"
    for link in advice.links:
        yield (
            f"{link.worker:6d} {1e3 * link.step_seconds:8.1f} {_rate(link.up_mbps):>10} "
            f"{_rate(link.down_mbps):>12} {1e3 * link.round_trip_seconds:14.1f} {link.rounds:7d}"
        )
    ideal = advice.ideal_samples_per_second
    yield ""
    yield f"Without exchanges the workers would compute {ideal:.1f} samples/s."
    yield ""
    yield "  samples/s  of that  updates/s  kB up/push  kB down/pull  coding ms  composition"
    for number, row in enumerate(advice.predicted):
        made = row.prediction
        yield (
            f"{'*' if number == advice.proposal else ' '} {made.samples_per_second:9.1f} "
            f"{made.samples_per_second / ideal:7.0%} {made.updates_per_second:10.2f} "
            f"{made.bytes_up_per_push / 1e3:11.1f} {made.bytes_down_per_pull / 1e3:13.1f} "
            f"{1e3 * row.coding_seconds:10.1f}  {' '.join(row.flags)}"
        )
    for out in advice.left_out:
        yield f"  not predicted: {' '.join(out.flags)}: {out.why}"


def _seen_costs(advice: Recommendation) -> Iterator[str]:
    """Yield what compositions of the list were seen to cost, or that it is not known."""
    rows = costs.load()
    yield "Seen on other work, whose model, data and rates were not these:"
    for number, row in enumerate(advice.predicted):
        found = costs.of(row.flags, rows)
        mark = "*" if number == advice.proposal else " "
        if found is not None:
            yield f"{mark} {' '.join(row.flags)}: {found}"
        elif number == advice.proposal:
            yield f"{mark} {' '.join(row.flags)}: not measured yet"


def _verdict(advice: Recommendation) -> Iterator[str]:
    if advice.reached:
        yield (
            f"Proposed (*): the first in this list, which goes from true to lossy, that reaches "
            f"{advice.rate:.0%} of that (--advise_rate)."
        )
    else:
        yield (
            f"Proposed (*): none reaches {advice.rate:.0%} of that (--advise_rate); this is the "
            "first in the list, which goes from true to lossy, that is at most a tenth slower than "
            "the fastest."
        )


def _rate(mbps: float) -> str:
    return f"{mbps:.1f}" if mbps else "no limit"
