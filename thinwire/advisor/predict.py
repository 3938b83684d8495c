"""Predicts the speed of compositions of training policies on measured links; proposes one.

`Predictor` simulates the PS and workers of a run on a virtual clock. The simulated workers push a
few real gradients of the model's first training steps repeatedly. The simulation really encodes,
decodes and applies the updates, and measures the time on this machine. `CANDIDATES` are the
compositions of policies that an Advisor predicts. `trials` returns the candidate compositions that
do not contradict the user's flags. `propose` chooses a candidate composition, and `describe`
returns the advice as text.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
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
from thinwire.runtime.run import own_policies
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
#: Number of different gradients in a `GradientPool`. The number is small to save memory.
_NUM_GRADIENTS = 8
#: Least number of pushes of each worker in the simulation that measures the coding time.
_PUSHES_TO_TIME = 6
#: Longest wall-clock time for simulating one composition of policies, in seconds.
_PATIENCE_SECONDS = 60.0
_UNLIMITED = ShardSpeed(0.0, 0.0)
#: If no composition of policies is fast enough, the Advisor proposes the most exact composition
#: that is slower than the fastest composition by at most this fraction.
_ALIKE = 0.1


@dataclasses.dataclass
class GradientPool:
    """Replaces a `Trainer` in a simulation: returns stored gradients of first steps in a cycle.

    Attributes:
        spec: Specification (tensor names and shapes) of the shared model.
        weights: [num_parameters] float32 weights before the first step.
        statistics: [m] float32 moving statistics (of batch normalization) before the first step; m
            = 0 if the run does not average them.
        gradients: One or more gradients of the model, each [num_parameters] float32.
        samples: Number of training samples in a mini-batch.
    """

    spec: ModelSpec
    weights: Float32
    statistics: Float32
    gradients: Sequence[Float32]
    samples: int

    def __post_init__(self) -> None:
        """Begin with the first gradient."""
        self._cycle = itertools.cycle(self.gradients)

    @classmethod
    def of_first_steps(cls, run: Run, trainer: Trainer, dataset: Dataset) -> GradientPool:
        """Return a `GradientPool` with gradients of a few training steps on worker 1's examples."""
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
        """Return an empty worker state, because stored gradients need no state of a worker."""
        return {}

    def step(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Step:
        """Return a copy of the next stored gradient as the result of a simulated training step."""
        return Step(next(self._cycle).copy(), 1.0, self.samples, statistics, local)


@dataclasses.dataclass(frozen=True)
class ProgressPoint:
    """Totals of a simulated training run at one moment of its virtual time.

    Attributes:
        seconds: Virtual time since the start of the run, in seconds.
        core_seconds: CPU time that the simulating process has used since its start, in seconds.
        updates: Number of updates that the PS has applied.
        pushes: Number of updates that all workers together have pushed.
        replies: Number of replies that the PS has sent to all workers together.
        samples: Number of training samples that all workers together have consumed.
        bytes_up: Number of bytes that all workers together have sent.
        bytes_down: Number of bytes that all PS shards together have sent to workers.
    """

    seconds: float
    core_seconds: float
    updates: int
    pushes: int
    replies: int
    samples: int
    bytes_up: int
    bytes_down: int


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Simulates a training run with given policies; returns the predicted updates per second.

    Attributes:
        pool: Source of the simulated workers' gradients.
        dataset: Data set with training examples; test examples are not necessary.
        bodies: Kernels that perform the policies' array operations.
        pushes: Number of pushes of each worker in a simulation. The first half of the pushes is
            not counted, because the rates are not yet steady.
        server: Emulated speed of each PS shard; by default unlimited.
    """

    pool: GradientPool
    dataset: Dataset
    bodies: Kernels
    pushes: int
    server: ShardSpeed = _UNLIMITED

    def coding_seconds(self, run: Run) -> float:
        """Return the time on this machine to encode, decode and apply one update, in seconds."""
        links = [WorkerLink(number, 0.1, 0.0, 0.0, 0.0, 0) for number in _numbers(run)]
        first, last = self._play(run, links, 0.0, max(_PUSHES_TO_TIME, 16 // run.nb_workers))
        return (last.core_seconds - first.core_seconds) / max(1, last.pushes - first.pushes)

    def predict(self, run: Run, links: Sequence[WorkerLink], coding_seconds: float) -> Prediction:
        """Return predicted updates and samples per second, and bytes per message, for given links.

        Args:
            run: Settings of the simulated training run.
            links: Measured step time and link of every worker, in order of worker id.
            coding_seconds: Time to encode, decode and apply one update, in seconds.
        """
        first, last = self._play(run, links, coding_seconds, self.pushes)
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
        """Simulate a training run; return its totals after half of the pushes and after all."""
        run = dataclasses.replace(run, iter_max=2**31 - 2, epochs=None, max_seconds=None)
        devices = [_device(link, coding_seconds) for link in links]
        own = SimulatorFlags(
            devices=tuple(devices),
            step_times=tuple(StepTime("constant", (link.step_seconds,)) for link in links),
            servers=(self.server,) * run.nb_ps,
        )
        simulation = Simulation(run, own, self.pool, self.dataset, self.bodies)
        _set_down_links(simulation, links, devices)
        watch = _Watch(simulation, pushes * run.nb_workers)
        simulation.play(watch.look, lambda: len(watch.marks) == 2)
        if len(watch.marks) < 2:
            raise ConfigurationError(
                f"--method={run.method.name} ended before its second exchange with the PS in a "
                "simulation with measured gradients; expected two exchanges. Lower --learning_rate."
            )
        return watch.marks[0], watch.marks[1]


class _Watch:
    """Records the totals of a simulated run at two moments, between which rates are computed."""

    def __init__(self, simulation: Simulation, pushes: int) -> None:
        self.marks: list[ProgressPoint] = []
        self._simulation = simulation
        self._core = simulation.shards[0].core
        self._limits = (pushes // 2, pushes)
        self._version = 0
        self._deadline = time.monotonic() + _PATIENCE_SECONDS

    def look(self, now: float) -> None:
        """Record the simulated run's totals after an update, if enough pushes or time passed."""
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
    """Return an emulated worker that delays each message by half the round-trip and coding time."""
    one_way = (link.round_trip_seconds + coding_seconds) / 2
    return EmulatedDevice(Link(link.up_mbps, 1e3 * one_way), 1.0, 0.0)


def _set_down_links(
    simulation: Simulation, links: Sequence[WorkerLink], devices: Sequence[EmulatedDevice]
) -> None:
    """Divide each worker's downlink rate among the PS shards by their shares of the model."""
    total = sum(shard.layout.size for shard in simulation.shards)
    for shard in simulation.shards:
        for link, device in zip(links, devices, strict=True):
            rate = link.down_mbps * shard.layout.size / total
            shard.ports[link.worker].down = Pipe(Link(rate, device.link.delay_ms))


# -- candidate compositions ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One composition of training policies that an Advisor may propose; an entry of CANDIDATES.

    Attributes:
        flags: Flags that select the composition of policies.
        settled: Additional flags for predicting the run after its warm-up, for example
            --warmup_epochs=0; empty if the composition has no warm-up.
        most_local_steps: Largest number of local steps per round that the Advisor may choose for
            the measured links; 0 if the composition has no adjustable number of local steps.
    """

    flags: tuple[str, ...]
    settled: tuple[str, ...] = ()
    most_local_steps: int = 0


def _sparse(method: str, rate: str, value_dtype: str, *settled: str) -> Candidate:
    return Candidate(
        (f"--method={method}", f"--compression_rate={rate}", f"--value_dtype={value_dtype}"),
        settled,
    )


#: Maximum number of local steps per round in a proposal: with longer rounds most runs have too few
#: rounds to converge.
_MOST_STEPS = 100
#: Compositions of policies that the Advisor simulates, from exact to lossy: exact updates in
#: lockstep, exact updates with growing staleness, local steps, rounded values, then sparse updates
#: with fewer and fewer entries. Sparse methods of one compression rate have this order: dgs and
#: dgc, which send unsent entries in later rounds with momentum, gd, which sends unsent entries in
#: later rounds without momentum, adacomp, which drops unsent entries. The last composition sends
#: few entries of few bits after many local steps.
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
    """A candidate composition of policies that does not contradict the user's flags.

    Attributes:
        candidate: The composition of training policies, as flags.
        run: Settings of a training run with this composition of policies, warm-up included.
        settled: Settings for predicting the training run after its warm-up.
        local_steps: Smallest and largest number of local steps per round that the Advisor may
            choose; (0, 0) if the number is fixed.
        with_steps: Function that returns this candidate with a given number of local steps per
            round; None if the number is fixed.
    """

    candidate: Candidate
    run: Run
    settled: Run
    local_steps: tuple[int, int] = (0, 0)
    with_steps: Callable[[int], RunnableCandidate] | None = None


def trials(
    folder: pathlib.Path,
    candidates: tuple[Candidate, ...] | None = None,
    given: flags.FlagValues = FLAGS,
    server_optimizer: str | None = None,
) -> tuple[list[RunnableCandidate], list[Excluded]]:
    """Return the compositions of policies that fit the user's flags, and why others do not fit.

    Args:
        folder: Run directory in the settings of the returned candidate compositions.
        candidates: Compositions of policies to consider, from exact to lossy; None: `CANDIDATES`,
            then the training methods of --policy.
        given: Flags of the command line. A candidate composition never changes a flag that the user
            gave.
        server_optimizer: Value of --server_optimizer for methods whose workers push a script's
            gradients; None to keep the user's value.

    Raises:
        ConfigurationError: Every candidate composition contradicts the user's flags.
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
        with_steps = (*candidate.flags, f"--local_steps={steps}")
        return made(dataclasses.replace(candidate, flags=with_steps))

    own = own_policies.loaded()
    if candidates is None:
        names = () if own is None else own.methods
        candidates = (*CANDIDATES, *(Candidate((f"--method={name}",)) for name in names))
    runnable, left_out = [], []
    for candidate in candidates:
        try:
            _refuse_contradiction(candidate, given)
            if candidate.most_local_steps:
                least, most = PLAYED_STEPS, candidate.most_local_steps
                if given["local_steps"].present:
                    least = most = int(given.local_steps)
                runnable.append(
                    dataclasses.replace(
                        of_steps(candidate, PLAYED_STEPS),
                        local_steps=(least, most),
                        with_steps=functools.partial(of_steps, candidate),
                    )
                )
            else:
                runnable.append(made(candidate))
        except ConfigurationError as error:
            left_out.append(Excluded(list(candidate.flags), " ".join(str(error).split())[:900]))
    if not runnable:
        raise ConfigurationError(
            "no composition in the Advisor's list fits the given flags; leave some flags out. The "
            f"first, {left_out[0].flags[0]}, does not fit: {left_out[0].why}"
        )
    return runnable, left_out


def compose(extra: tuple[str, ...], folder: pathlib.Path, given: flags.FlagValues = FLAGS) -> Run:
    """Return the settings of a training run that has the user's flags plus the `extra` flags.

    Raises:
        ConfigurationError: The user's flags and the `extra` flags contradict each other.
    """
    changed = copy.deepcopy(given)
    try:
        changed(["advisor", *extra, f"--run_dir={folder}", "--overwrite"])
    except flags.Error as error:
        raise ConfigurationError(str(error)) from error
    return read_run(changed)


def _refuse_contradiction(candidate: Candidate, given: flags.FlagValues) -> None:
    """Reject a candidate composition of policies that contradicts a flag that the user gave."""
    for flag in candidate.flags:
        name = flag.removeprefix("--").partition("=")[0]
        if not given[name].present:
            continue
        proposed = copy.deepcopy(given)
        proposed(["advisor", flag])
        if proposed[name].value != given[name].value:
            raise ConfigurationError(f"--{name}={given[name].value} was given")


# -- proposal and its text ----------------------------------------------------------------------


def ideal_samples_per_second(links: Sequence[WorkerLink], batch_size: int) -> float:
    """Return the samples per second of all workers together, if workers never communicated."""
    return sum(batch_size / link.step_seconds for link in links)


def propose(predicted: Sequence[Predicted], ideal: float, rate: float) -> tuple[int, bool]:
    """Choose the composition of policies to propose, from the predicted rates.

    Args:
        predicted: Predicted samples and updates per second of compositions of policies, from exact
            to lossy.
        ideal: Total rate of the workers without communication, in samples per second.
        rate: Share of the rate `ideal`, from 0.01 to 1, that is fast enough for a composition.

    Returns:
        The index of the first composition that is fast enough, and True. If no composition is fast
        enough, the index of the first composition that is at most a tenth slower than the fastest
        composition, and False.
    """
    rates = [row.prediction.samples_per_second for row in predicted]
    enough = [number for number, reached in enumerate(rates) if reached >= rate * ideal]
    if enough:
        return enough[0], True
    alike = (1 - _ALIKE) * max(rates)
    return next(number for number, reached in enumerate(rates) if reached >= alike), False


def command_of(advice: Recommendation, path: pathlib.Path) -> str:
    """Return the proposed command line; it has --advice=`path` if the model comes from flags."""
    if advice.script:
        proposed = advice.predicted[advice.proposal].flags
        return shlex.join(["thinwire", "run", *advice.given, *proposed, *advice.script])
    flags = [*advice.given, *advice.predicted[advice.proposal].flags, f"--advice={path}"]
    return shlex.join(["thinwire", "cluster", *flags])


def describe(advice: Recommendation, path: pathlib.Path) -> str:
    """Return the Advisor's whole output as text; `path` is the file that stores the advice."""
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
    yield "  samples/s    share  updates/s  kB up/push  kB down/pull  coding ms  composition"
    for number, row in enumerate(advice.predicted):
        rates = row.prediction
        yield (
            f"{'*' if number == advice.proposal else ' '} {rates.samples_per_second:9.1f} "
            f"{rates.samples_per_second / ideal:7.0%} {rates.updates_per_second:10.2f} "
            f"{rates.bytes_up_per_push / 1e3:11.1f} {rates.bytes_down_per_pull / 1e3:13.1f} "
            f"{1e3 * row.coding_seconds:10.1f}  {' '.join(row.flags)}"
        )
    for out in advice.left_out:
        yield f"  not predicted: {' '.join(out.flags)}: {out.why}"


def _seen_costs(advice: Recommendation) -> Iterator[str]:
    """Yield lines with the measured accuracy costs of the predicted compositions."""
    rows = costs.load()
    yield "Measured on other work, with other models, data and rates:"
    for number, row in enumerate(advice.predicted):
        cost = costs.of(row.flags, rows)
        mark = "*" if number == advice.proposal else " "
        if cost is not None:
            yield f"{mark} {' '.join(row.flags)}: {cost}"
        elif number == advice.proposal:
            yield f"{mark} {' '.join(row.flags)}: not measured yet"


def _verdict(advice: Recommendation) -> Iterator[str]:
    if advice.reached:
        yield (
            f"Proposed (*): the first in this list, from exact to lossy, that reaches "
            f"{advice.rate:.0%} of the rate without exchanges (--advise_rate)."
        )
    else:
        yield (
            f"Proposed (*): none reaches {advice.rate:.0%} of the rate without exchanges "
            "(--advise_rate); this is the first in the list, from exact to lossy, that is at most "
            "a tenth slower than the fastest."
        )


def _rate(mbps: float) -> str:
    return f"{mbps:.1f}" if mbps else "no limit"
