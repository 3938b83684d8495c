"""Random faults on random runs until a check fails: ``make chaos``.

    python -m tests.chaos.search --runs 1000 --processes 100
    python -m tests.chaos.search --seed 3 --repeat 17 --real
    python -m tests.chaos.search --seed 3 --repeat 17 --faults 0,2 --workers 2 --steps 9

The command plays simulated runs and runs of real processes in sequence, each run with its own
method, seed and several faults, and checks each history. A failing run is reduced to the
smallest run that still fails, and is reported by the command that repeats the run.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging as python_logging
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from absl import logging

from tests.chaos import planted
from tests.chaos.faults import Plan, plans
from tests.chaos.process_search import ProcessTrial, play
from tests.chaos.simulated import CASES, played, possible
from tests.chaos.simulated_faults import SIMULATED
from tests.chaos.simulated_run import Case
from tests.chaos.verdict import Verdict

_ENTROPY = 71
_MOST_FAULTS = 4
_MOST_WORKERS = 5
_FEWEST_WORKERS = 2
_MOST_LINES = 12


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run, and its faults."""

    seed: int
    number: int
    case: Case
    plans: tuple[Plan, ...]
    kept: tuple[int, ...]  # numbers of the plans, before any were left out

    @staticmethod
    def of(seed: int, number: int) -> Trial:
        """Return a seed's trial of a number: always the same."""
        rng = np.random.default_rng([_ENTROPY, seed, number])
        case = dataclasses.replace(CASES[number % len(CASES)], seed=int(rng.integers(1, 1 << 30)))
        if _may_resize(case):
            workers = int(rng.integers(_FEWEST_WORKERS, _MOST_WORKERS + 1))
            case = dataclasses.replace(case, nb_workers=workers)
        mine = [pair for pair in SIMULATED if possible(Plan(*pair, 0.0, 0), case)]
        count = int(rng.integers(1, _MOST_FAULTS + 1))
        pairs = [mine[int(rng.integers(len(mine)))] for _ in range(count)]
        drawn = [next(plans(int(rng.integers(1 << 30)), 1, [pair])) for pair in pairs]
        return Trial(seed, number, case, tuple(drawn), tuple(range(count)))

    def __str__(self) -> str:
        return f"{self.case}, {self.case.nb_workers} workers: " + "; ".join(map(str, self.plans))

    @property
    def method(self) -> str:
        """Settings of the run."""
        return self.case.name

    @property
    def faults(self) -> list[str]:
        """Kinds of the trial's faults."""
        return [plan.fault.value for plan in self.plans]

    @property
    def command(self) -> str:
        """The command that repeats the trial."""
        faults = ",".join(map(str, self.kept)) or "none"
        return (
            f"python -m tests.chaos.search --seed {self.seed} --repeat {self.number} "
            f"--faults {faults} --workers {self.case.nb_workers} --steps {self.case.iter_max}"
        )

    def smaller(self) -> Iterator[Trial]:
        """Return trials with one fault, worker or step less, or half the steps."""
        for left in range(len(self.plans)):
            yield self.keeping([n for n in range(len(self.plans)) if n != left])
        if _may_resize(self.case) and self.case.nb_workers > _FEWEST_WORKERS:
            yield self.resized(self.case.nb_workers - 1, self.case.iter_max)
        for steps in (self.case.iter_max // 2, self.case.iter_max - 1):
            if 0 < steps < self.case.iter_max:
                yield self.resized(self.case.nb_workers, steps)

    def keeping(self, numbers: list[int]) -> Trial:
        """Return it with these of its faults alone."""
        return dataclasses.replace(
            self,
            plans=tuple(self.plans[number] for number in numbers),
            kept=tuple(self.kept[number] for number in numbers),
        )

    def resized(self, workers: int, steps: int) -> Trial:
        """Return the trial with this many workers and updates."""
        return dataclasses.replace(
            self, case=dataclasses.replace(self.case, nb_workers=workers, iter_max=steps)
        )


def _may_resize(case: Case) -> bool:
    """Return whether nothing of a case names its workers."""
    return not any(name in ("groups", "auto_groups") for name, _ in case.choices)


def simulate(trial: Trial, plant: str = "") -> Verdict:
    """Play a trial on a virtual clock, perhaps with a planted bug."""
    outcome = played(trial.case, *trial.plans, plant=planted.context(plant))
    return Verdict(outcome.violations, outcome.history)


AnyTrial = TypeVar("AnyTrial", Trial, ProcessTrial)


def shrink(
    trial: AnyTrial,
    verdict: Verdict,
    play: Callable[[AnyTrial], Verdict],
    until: float = float("inf"),
) -> tuple[AnyTrial, Verdict]:
    """Return the smallest trial found that breaks one of the same promises, and its verdict."""
    while True:
        for each in trial.smaller():
            if time.monotonic() > until:
                return trial, verdict
            found = play(each)
            if found.promises & verdict.promises:
                trial, verdict = each, found
                break
        else:
            return trial, verdict


@dataclasses.dataclass
class Tally:
    """Counts of a search."""

    runs: int = 0
    failed: int = 0
    acknowledged: int = 0
    methods: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, trial: Trial | ProcessTrial, verdict: Verdict) -> None:
        """Count a trial."""
        self.runs += 1
        self.failed += bool(verdict.violations)
        self.acknowledged += verdict.num_acknowledged
        self.methods[trial.method] += 1
        self.faults.update(trial.faults)


def search(
    trials: Iterable[AnyTrial],
    play: Callable[[AnyTrial], Verdict],
    until: float = float("inf"),
) -> Tally:
    """Play trials and report failures, reduced to small trials; return the counts.

    Args:
        trials: Which.
        play: Plays one.
        until: No other begins after this moment of `time.monotonic`.
    """
    tally = Tally()
    for trial in trials:
        if time.monotonic() > until:
            break
        verdict = play(trial)
        tally.add(trial, verdict)
        if verdict.violations:
            report(*shrink(trial, verdict, play, until))
    return tally


def report(trial: Trial | ProcessTrial, verdict: Verdict) -> None:
    """Print a failure and how to repeat it."""
    print_line(f"BROKEN {trial}")
    for violation in verdict.violations[:_MOST_LINES]:
        print_line(f"  {violation}")
    print_line(f"  repeat: {trial.command}")


def print_line(text: str) -> None:
    """Write a line immediately."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Search as the command line requests; return 1 if a check failed."""
    given = _parser().parse_args(arguments)
    logging.set_verbosity(logging.FATAL)
    python_logging.disable(python_logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and reap
    if given.repeat is not None:
        return _repeat(given)
    print_line(f"seed {given.seed}")
    simulated = (Trial.of(given.seed, number) for number in range(given.runs))
    real = (ProcessTrial.of(given.seed, number) for number in range(given.processes))
    failed = _search("simulated", simulated, lambda trial: simulate(trial, given.plant), given)
    failed += _search("real", real, lambda trial: play(trial, given.plant), given)
    return int(failed > 0)


def _search(
    name: str,
    trials: Iterable[AnyTrial],
    play: Callable[[AnyTrial], Verdict],
    given: argparse.Namespace,
) -> int:
    """Search, print the counts, and return the number of runs that failed a check."""
    begun = time.monotonic()
    tally = search(trials, play, begun + given.seconds if given.seconds else float("inf"))
    if tally.runs:
        print_line(
            f"{tally.runs} {name} runs of {len(tally.methods)} methods in "
            f"{time.monotonic() - begun:.0f} s, {sum(tally.faults.values())} faults of "
            f"{len(tally.faults)} kinds, {tally.acknowledged} requests answered: {tally.failed} "
            "runs broke a promise"
        )
    return tally.failed


def _repeat(given: argparse.Namespace) -> int:
    trial: Trial | ProcessTrial
    trial = (ProcessTrial if given.real else Trial).of(given.seed, given.repeat)
    if given.faults is not None:
        kept = [] if given.faults == "none" else [int(each) for each in given.faults.split(",")]
        trial = trial.keeping(kept)
    if isinstance(trial, Trial):
        case = trial.case
        trial = trial.resized(given.workers or case.nb_workers, given.steps or case.iter_max)
        verdict = simulate(trial, given.plant)
    else:
        trial = trial.resized(given.workers or trial.nb_workers, 0)
        verdict = play(trial, given.plant)
    print_line(str(trial))
    for violation in verdict.violations:
        print_line(f"  {violation}")
    if given.history:
        verdict.history.write(given.history)
    num = len(verdict.violations)
    print_line(f"{verdict.num_acknowledged} requests answered, {num} violations")
    return int(num > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500, help="on a virtual clock")
    parser.add_argument("--processes", type=int, default=0, help="runs of real processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="of each sort, begin no run after so many")
    parser.add_argument("--plant", choices=sorted(planted.PLANTS), default="", help="a bug")
    parser.add_argument("--repeat", type=int, help="this run of the seed alone")
    parser.add_argument("--real", action="store_true", help="a repeated run is of processes")
    parser.add_argument("--faults", help="of a repeated run: those of these numbers alone, or none")
    parser.add_argument("--workers", type=int, help="of a repeated run")
    parser.add_argument("--steps", type=int, help="of a repeated run: its updates")
    parser.add_argument("--history", type=pathlib.Path, help="of a repeated run: write it here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
