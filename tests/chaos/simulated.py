"""Chaos on a virtual clock: many short runs, each with faults, each history checked.

    python -m tests.chaos.simulated --runs 1000 --seed 0
    python -m tests.chaos.simulated --runs 200 --method adacomp --fault "kill after push"

prints a table of faults, victims and methods, and the command that repeats each failed run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging as python_logging
import os
import pathlib
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from absl import logging

from tests.chaos.checker import Declared, Violation, check
from tests.chaos.faults import Fault, Plan, Victim, plans
from tests.chaos.recorder import Recorder
from tests.chaos.simulated_faults import SIMULATED, Striker
from tests.chaos.simulated_outcome import Outcome
from tests.chaos.simulated_run import Case, ChaoticRun, Stuck
from thinwire.ops.sync.groups import AutoGroups

_GROUPS = (("groups", ((1, 2), (3,))),)
_QUORUM = (("overrides", (("sync", "quorum"),)), ("quorum", 2), ("quorum_grace_seconds", 0.05))
DRAWN = (("fraction", 0.5), ("seed", 7))
_FEW_ENTRIES = (("chunk", 8), ("chunk_k", 2), ("local_steps", 2), ("local_optimizer", "sgd"))
#: Cases to run: sparse methods keep a journal; dense methods run with --journal=on and, as by
#: default, without a journal.
CASES = (
    Case("adacomp", choices=(("compression_rate", 0.3),)),
    Case("dgs", nb_ps=2, choices=(("compression_rate", 0.3),)),
    Case("dgt", nb_ps=2),
    Case("gsp", nb_ps=2, choices=_GROUPS),
    Case("adacomp", nb_ps=3, choices=(("compression_rate", 0.3),)),
    Case("gsp", choices=_GROUPS),
    Case("gsp", nb_ps=2, choices=(("auto_groups", AutoGroups(8, 1.0)),)),
    Case("dgs", choices=(("compression_rate", 0.3),)),
    Case("dgt"),
    Case("bsp", nb_ps=2, iter_max=18),
    Case("asgd", nb_ps=2),
    Case("ssp", nb_ps=2, choices=(("staleness_bound", 1),)),
    Case("esync", nb_ps=2, iter_max=14),
    Case("dcasgd", nb_ps=2),
    Case("bsp", journal="auto", iter_max=18),
    Case("asgd", nb_ps=2, journal="auto"),
    Case("ssp", journal="auto", choices=(("staleness_bound", 1),)),
    Case("gsp", nb_ps=2, journal="auto", choices=_GROUPS),
    Case("dcasgd", journal="auto"),
    Case("esync", journal="auto", iter_max=14),
    Case("dgc", nb_ps=2, choices=(("compression_rate", 0.3),)),
    Case("gd", choices=(("compression_rate", 0.3),)),
    Case("ssgd", nb_ps=2, iter_max=18),
    Case("asgd", journal="auto", choices=(("momentum", 0.9),)),
    Case("bsp", nb_ps=2, nb_workers=4, choices=(("overlap", True),), iter_max=18),
    Case("bsp", nb_ps=2, nb_workers=4, choices=DRAWN, iter_max=18),
    Case("bsp", nb_ps=2, nb_workers=4, journal="auto", choices=DRAWN, iter_max=18),
    Case("sparseloco", nb_ps=2, choices=_FEW_ENTRIES, iter_max=18),
    Case("bsp", nb_ps=2, nb_workers=4, choices=_QUORUM, iter_max=18),
    Case("bsp", nb_ps=2, journal="auto", choices=_QUORUM, iter_max=18),
)


def possible(plan: Plan, case: Case) -> bool:
    """Return True if a plan is possible in a case."""
    if plan.victim is Victim.OTHER_SHARD and case.nb_ps == 1:
        return False
    return not (plan.fault is Fault.KILL_IN_JOURNAL and case.journal != "on")


@functools.cache
def quiet_seconds(case: Case) -> float:
    """Return the duration of an undisturbed case in virtual seconds; the run is checked as well."""
    outcome = played(case)
    if outcome.error:
        raise AssertionError(f"{case} without a fault: {outcome.error}")
    return outcome.seconds


def played(
    case: Case, *plans: Plan, plant: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Outcome:
    """Play a run with these faults, and check its history.

    Args:
        case: What is run.
        plans: The faults.
        plant: Makes a context in which the product has a bug; the check is outside of it.
    """
    outcome = Outcome(case, plans)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos-", dir=_fast_disk()))
    history = outcome.history
    recorder = Recorder(history.append, lambda: 0.0)
    seconds = quiet_seconds(dataclasses.replace(case, seed=1)) if plans else 0.0
    declared: Declared | None = None
    try:
        with plant(), recorder.installed():
            run = ChaoticRun(case, folder, recorder)
            declared = run.declared
            strikers = [Striker(run, plan, seconds) for plan in plans]
            outcome.reason = run.play_on()
            outcome.seconds = run.clock.now
            outcome.struck = bool(strikers) and all(each.struck for each in strikers)
    except Stuck as error:
        outcome.violations += (Violation("ends", str(error)),)
    except Exception:  # noqa: BLE001 - any exception is a finding
        outcome.violations += (Violation("raises", traceback.format_exc()),)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if declared is not None:
        outcome.violations += tuple(check(history, declared))
    return outcome


def _fast_disk() -> str | None:
    """Return a folder in memory, if there is one: thousands of runs sync their snapshots."""
    shared = pathlib.Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) else None


def outcomes(
    seed: int,
    count: int,
    cases: Sequence[Case] = CASES,
    pairs: Sequence[tuple[Fault, Victim]] = SIMULATED,
) -> Iterator[Outcome]:
    """Play `count` runs: each pair hits each case, one after another."""
    made, number = 0, 0
    while made < count:
        case = cases[number % len(cases)]
        mine = [pair for pair in pairs if possible(Plan(*pair, 0.0, 0), case)]
        if not mine:
            raise ValueError(f"none of these faults can befall {case}")
        turn = number // len(cases)
        plan = list(plans(seed * 1009 + number % len(cases), turn + 1, mine))[-1]
        number += 1
        made += 1
        yield played(case, plan)


def sample(seed: int) -> Iterator[tuple[Case, Plan]]:
    """Return every pair once, each with another case."""
    for number, pair in enumerate(SIMULATED):
        plan = next(plans(seed + number, 1, [pair]))
        turned = (CASES[(number + turn) % len(CASES)] for turn in range(len(CASES)))
        yield next(case for case in turned if possible(plan, case)), plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print a table, and return 1 if anything failed."""
    given = _parser().parse_args(arguments)
    logging.set_verbosity(logging.FATAL)
    python_logging.disable(python_logging.CRITICAL)
    begun, table, failures = time.perf_counter(), Counter(), 0
    for outcome in outcomes(given.seed, given.runs, *_chosen(given)):
        failures += bool(outcome.error)
        tell(outcome)
        (plan,) = outcome.plans
        row = (plan.fault.value, plan.victim.value, outcome.case.name)
        table[row, "runs"] += 1
        table[row, "struck"] += outcome.struck
        table[row, "restarts"] += outcome.restarts
        table[row, "failed"] += bool(outcome.error)
        late = given.seconds is not None and time.perf_counter() - begun > given.seconds
        if late or (failures and given.stop):
            break
    print_table(table)
    seconds = time.perf_counter() - begun
    runs = sum(number for (_, what), number in table.items() if what == "runs")
    say(f"{runs} runs in {seconds:.1f} s, {failures} failed")
    return int(failures > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", help="one method alone")
    parser.add_argument("--journal", choices=("on", "auto"), help="these cases alone")
    parser.add_argument("--fault", choices=[fault.value for fault in Fault], action="append")
    parser.add_argument("--victim", choices=[victim.value for victim in Victim], action="append")
    parser.add_argument("--seconds", type=float, help="begin no run after so many")
    parser.add_argument("--stop", action="store_true", help="at the first failure")
    return parser


def _chosen(given: argparse.Namespace) -> tuple[list[Case], list[tuple[Fault, Victim]]]:
    """Return the requested cases and pairs of fault and victim that fit together."""
    pairs = [
        pair
        for pair in SIMULATED
        if (not given.fault or pair[0].value in given.fault)
        and (not given.victim or pair[1].value in given.victim)
    ]
    cases = [
        case
        for case in CASES
        if given.method in (None, case.name)
        and given.journal in (None, case.journal)
        and any(possible(Plan(*pair, 0.0, 0), case) for pair in pairs)
    ]
    return cases, pairs


def tell(outcome: Outcome) -> None:
    """Print what failed."""
    if outcome.error:
        say(f"FAILED {outcome.case} | {outcome.plans}\n{outcome.error}")


def print_table(table: Counter) -> None:
    """Print counts by fault, victim and method."""
    heads = ("runs", "struck", "restarts", "failed")
    say(f"{'fault':18} {'victim':14} {'method':9}" + "".join(f"{head:>9}" for head in heads))
    for row in sorted({row for row, _ in table}):
        figures = "".join(f"{table[row, what]:9}" for what in heads)
        say("{:18} {:14} {:9}".format(*row) + figures)


def say(text: str) -> None:
    """Write a line and flush."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
