"""Random faults on random runs until a promise is broken: ``make chaos``.

    python -m tests.chaos.search --runs 1000
    python -m tests.chaos.search --seed 3 --repeat 17
    python -m tests.chaos.search --seed 3 --repeat 17 --faults 0,2 --workers 2 --steps 9

plays runs on a virtual clock, one after the other, each with another method, several faults and its
own seed, and checks the history of each. A run that breaks a promise
is made as small as it still does, and named by the command that repeats it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging as python_logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import logging

from tests.chaos import planted
from tests.chaos.checker import Violation
from tests.chaos.faults import Plan, plans
from tests.chaos.history import Acknowledged, History
from tests.chaos.simulated import CASES, played, possible
from tests.chaos.simulated_faults import SIMULATED
from tests.chaos.simulated_run import Case

_ENTROPY = 71
_MOST_FAULTS = 4
_MOST_WORKERS = 5
_FEWEST_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run, and what befalls it."""

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
    def command(self) -> str:
        """What repeats it."""
        faults = ",".join(map(str, self.kept)) or "none"
        return (
            f"python -m tests.chaos.search --seed {self.seed} --repeat {self.number} "
            f"--faults {faults} --workers {self.case.nb_workers} --steps {self.case.iter_max}"
        )

    def smaller(self) -> Iterator[Trial]:
        """Return trials with one fault, worker or step less, or half the steps."""
        for left in range(len(self.plans)):
            rest = [number for number in range(len(self.plans)) if number != left]
            yield dataclasses.replace(
                self,
                plans=tuple(self.plans[number] for number in rest),
                kept=tuple(self.kept[number] for number in rest),
            )
        if _may_resize(self.case) and self.case.nb_workers > _FEWEST_WORKERS:
            yield self.resized(self.case.nb_workers - 1, self.case.iter_max)
        for steps in (self.case.iter_max // 2, self.case.iter_max - 1):
            if 0 < steps < self.case.iter_max:
                yield self.resized(self.case.nb_workers, steps)

    def resized(self, workers: int, steps: int) -> Trial:
        """Return it with so many workers and updates."""
        return dataclasses.replace(
            self, case=dataclasses.replace(self.case, nb_workers=workers, iter_max=steps)
        )


def _may_resize(case: Case) -> bool:
    """Return whether nothing of a case names its workers."""
    return not any(name in ("groups", "auto_groups") for name, _ in case.choices)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a trial has shown."""

    violations: tuple[Violation, ...]
    num_acknowledged: int
    history: History

    @property
    def promises(self) -> frozenset[str]:
        """Names of those that are broken."""
        return frozenset(each.promise for each in self.violations)


def simulate(trial: Trial, plant: str = "") -> Verdict:
    """Play a trial on a virtual clock, perhaps with a planted bug."""
    outcome = played(trial.case, *trial.plans, plant=planted.context(plant))
    return Verdict(outcome.violations, outcome.acknowledged, outcome.history)


def shrink(
    trial: Trial, verdict: Verdict, play: Callable[[Trial], Verdict]
) -> tuple[Trial, Verdict]:
    """Return the smallest trial found that breaks one of the same promises, and its verdict."""
    while True:
        for each in trial.smaller():
            found = play(each)
            if found.promises & verdict.promises:
                trial, verdict = each, found
                break
        else:
            return trial, verdict


@dataclasses.dataclass
class Tally:
    """What a search has done."""

    runs: int = 0
    failed: int = 0
    acknowledged: int = 0
    methods: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, trial: Trial, verdict: Verdict) -> None:
        """Count a trial."""
        self.runs += 1
        self.failed += bool(verdict.violations)
        self.acknowledged += verdict.num_acknowledged
        self.methods[trial.case.name] += 1
        self.faults.update(plan.fault.value for plan in trial.plans)


def search(
    seed: int,
    numbers: Sequence[int],
    play: Callable[[Trial], Verdict],
    until: float = float("inf"),
) -> tuple[Tally, list[tuple[Trial, Verdict]]]:
    """Play trials; return what was done, and what failed, made small.

    Args:
        seed: Of all of them.
        numbers: Which.
        play: Plays one.
        until: No other begins after this moment of `time.monotonic`.
    """
    tally, failures = Tally(), []
    for number in numbers:
        if time.monotonic() > until:
            break
        trial = Trial.of(seed, number)
        verdict = play(trial)
        tally.add(trial, verdict)
        if verdict.violations:
            failures.append(shrink(trial, verdict, play))
            report(*failures[-1])
    return tally, failures


def report(trial: Trial, verdict: Verdict) -> None:
    """Print a failure and how to repeat it."""
    print_line(f"BROKEN {trial}")
    for violation in verdict.violations[:_MOST_LINES]:
        print_line(f"  {violation}")
    print_line(f"  repeat: {trial.command}")


_MOST_LINES = 12


def print_line(text: str) -> None:
    """Write a line immediately."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Search as the command line says; return 1 if a promise was broken."""
    given = _parser().parse_args(arguments)
    logging.set_verbosity(logging.FATAL)
    python_logging.disable(python_logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and reap
    if given.repeat is not None:
        return _repeat(given)
    begun = time.monotonic()
    until = begun + given.seconds if given.seconds else float("inf")
    print_line(f"seed {given.seed}")
    tally, failures = search(
        given.seed, range(given.runs), lambda trial: simulate(trial, given.plant), until
    )
    seconds = time.monotonic() - begun
    print_line(
        f"{tally.runs} simulated runs of {len(tally.methods)} methods in {seconds:.0f} s, "
        f"{sum(tally.faults.values())} faults of {len(tally.faults)} kinds, {tally.acknowledged} "
        f"requests answered: {len(failures)} runs broke a promise"
    )
    return int(bool(failures))


def _repeat(given: argparse.Namespace) -> int:
    trial = Trial.of(given.seed, given.repeat)
    if given.faults is not None:
        kept = [] if given.faults == "none" else [int(each) for each in given.faults.split(",")]
        drawn = tuple(trial.plans[number] for number in kept)
        trial = dataclasses.replace(trial, plans=drawn, kept=tuple(kept))
    workers, steps = trial.case.nb_workers, trial.case.iter_max
    trial = trial.resized(given.workers or workers, given.steps or steps)
    verdict = simulate(trial, given.plant)
    print_line(str(trial))
    for violation in verdict.violations:
        print_line(f"  {violation}")
    if given.history:
        verdict.history.write(given.history)
    answered = len(list(verdict.history.of(Acknowledged)))
    print_line(f"{answered} requests answered, {len(verdict.violations)} violations")
    return int(bool(verdict.violations))


def _parser() -> argparse.ArgumentParser:
    import pathlib

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500, help="on a virtual clock")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="begin no run after so many")
    parser.add_argument("--plant", choices=sorted(planted.PLANTS), default="", help="a bug")
    parser.add_argument("--repeat", type=int, help="this run of the seed alone")
    parser.add_argument("--faults", help="of a repeated run: those of these numbers alone, or none")
    parser.add_argument("--workers", type=int, help="of a repeated run")
    parser.add_argument("--steps", type=int, help="of a repeated run: its updates")
    parser.add_argument("--history", type=pathlib.Path, help="of a repeated run: write it here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
