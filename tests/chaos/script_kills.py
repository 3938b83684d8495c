"""Kill -9 of a script's workers, evaluator and PS in every standing of their model in the run.

``python -m tests.chaos.script_kills --kills 200 --seed 0 --out kills.jsonl`` kills one node in each
run. The file keeps the results, and the same command continues after the last kill in the file. The
exit code is 1 if a run did not end as the table "How a run ends" of docs/guide/scripts.md says.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence

from tests.chaos.script_hook import KILL
from tests.forked import forker
from tests.object_storage import environment_of
from tests.scripts import quality

LIVES = ("models", "loop")
METHODS = ("bsp", "asgd", "dgs")
VICTIMS = ("worker-1", "worker-2", "evaluator", "ps-0")
SCRIPT = pathlib.Path(__file__).with_name("script_life.py")
#: Accuracy that every life reaches, alone and after a kill; a model that learns nothing has 0.5.
LEARNT = 0.75
#: Exit code of a run whose PS has died; the same command resumes it.
_PS_DIED = 3

Instants = Mapping[int, Sequence[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kill of one node at one event of a worker.

    Attributes:
        life: Name of the script's life, of `LIVES`.
        method: Training method of the run.
        worker: Id of the worker whose events count.
        standing: Standing of the worker's model at that event in a run without a kill.
        event: Name of the event there.
        count: Number of the event among the worker's events in this standing, from 1.
        victim: Name of the node that is killed, of `VICTIMS`.
        restarts: True if the launcher starts a killed worker again.
    """

    life: str
    method: str
    worker: int
    standing: str
    event: str
    count: int
    victim: str
    restarts: bool

    @classmethod
    def drawn(cls, seed: int, number: int, instants: Mapping[str, Instants]) -> Plan:
        """Return a seeded plan: a standing first, so that rare standings are as frequent."""
        dice = random.Random(f"{seed} {number}")
        life, worker = dice.choice(LIVES), dice.choice((1, 2))
        by_standing = collections.defaultdict(list)
        for standing, event in instants[life][worker]:
            by_standing[standing].append(event)
        standing = dice.choice(sorted(by_standing))
        # A method may pass through fewer events than the recorded one, but through half of them.
        count = dice.randint(1, (len(by_standing[standing]) + 1) // 2)
        event = by_standing[standing][count - 1]
        method, victim = dice.choice(METHODS), dice.choice(VICTIMS)
        return cls(life, method, worker, standing, event, count, victim, dice.random() < 0.5)


def recorded(life: str) -> Instants:
    """Return each worker's standings and events in a run without a kill.

    Raises:
        AssertionError: The run fails.
    """
    with tempfile.TemporaryDirectory() as name:
        trace = pathlib.Path(name, "trace")
        finished = _run(life, METHODS[0], (), pathlib.Path(name, "run"), {"trace": str(trace)})
        assert not finished.problems(2), finished.output[-3000:]
        found = collections.defaultdict(list)
        for line in trace.read_text().splitlines():
            worker, standing, event = json.loads(line)
            found[worker].append((standing, event))
    return found


def _run(
    life: str, method: str, flags: Sequence[str], run_dir: pathlib.Path, kill: Mapping[str, object]
) -> quality.Finished:
    with environment_of({"LIFE": life, KILL: json.dumps(kill)}):
        return quality.run(
            SCRIPT,
            method=method,
            flags=["--seed=1", *flags],
            run_dir=run_dir,
            timeout=170,
            python=forker().python,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of one run with a kill."""

    struck: bool
    problems: tuple[str, ...]
    seconds: float
    output: str


def play(plan: Plan) -> Outcome:
    """Run a life, kill as planned, and compare the end with the table of scripts.md."""
    with tempfile.TemporaryDirectory() as name:
        struck, run_dir = pathlib.Path(name, "struck"), pathlib.Path(name, "run")
        fields = ("worker", "standing", "count", "victim")
        kill = {field: getattr(plan, field) for field in fields} | {"struck": str(struck)}
        # The scripts wait this long for a worker that dies before it has joined (see limits.md).
        flags = ["--start_timeout_seconds=20", *["--restart_workers=2"] * plan.restarts]
        finished = _run(plan.life, plan.method, flags, run_dir, kill)
        output, seconds, problems = finished.output, finished.seconds, []
        if struck.exists() and plan.victim == "ps-0":
            if finished.code not in (0, _PS_DIED):  # 0: it had nothing to do any more
                problems.append(f"exit code {finished.code} after the death of the PS")
            problems += _left(finished)
            finished = _run(plan.life, plan.method, flags, run_dir, kill)
            output, seconds = output + finished.output, seconds + finished.seconds
        problems += _problems(plan, finished, struck.exists())
        return Outcome(struck.exists(), tuple(problems), seconds, output)


def _left(finished: quality.Finished) -> list[str]:
    found = ["did not end"] if finished.timed_out else []
    found += [f"process left: {line}" for line in finished.processes]
    return found + [f"file left: {name}" for name in finished.files]


def _problems(plan: Plan, finished: quality.Finished, is_struck: bool) -> list[str]:
    """Return how the end of a run differs from the end that the table promises."""
    found, output = _left(finished), finished.output
    if finished.code:
        found.append(f"exit code {finished.code}")
    if "this run is finished" in output:
        return found
    kills_worker = is_struck and plan.victim.startswith("worker-")
    may_miss = kills_worker and (not plan.restarts or "continue without this worker" in output)
    expected = (1, 2) if may_miss else (2,)
    if len(finished.values) not in expected:
        found.append(f"{len(finished.values)} results instead of {expected}")
    if kills_worker and not plan.restarts and plan.victim not in output[-2000:]:
        found.append(f"the last lines do not name {plan.victim}")
    return found + [f"accuracy {value}" for value in finished.values if value < LEARNT]


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("script_kills.jsonl"))
    given = parser.parse_args(arguments)
    rows = _read(given.out, given.seed)
    instants = {life: recorded(life) for life in LIVES}
    for number in range(given.kills):
        if number in rows:
            continue
        plan = Plan.drawn(given.seed, number, instants)
        outcome = play(plan)
        row = {"seed": given.seed, "number": number, **dataclasses.asdict(plan)}
        row |= {"struck": outcome.struck, "problems": list(outcome.problems)}
        row |= {"seconds": round(outcome.seconds, 1)}
        if outcome.problems:
            row["output"] = outcome.output[-4000:]
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows[number] = row
        sys.stdout.write(f"{_line(row)}\n")
        sys.stdout.flush()
    sys.stdout.write(summary(list(rows.values())))
    return 1 if any(row["problems"] for row in rows.values()) else 0


def _read(path: pathlib.Path, seed: int) -> dict[int, dict[str, object]]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [row for row in map(json.loads, lines) if row["seed"] == seed]
    return {row["number"]: row for row in rows}


def _line(row: Mapping[str, object]) -> str:
    what = "{number:>4} {life:<7}{method:<5}{victim:<10}worker {worker} {standing} {event}"
    end = "; ".join(row["problems"]) or ("as promised" if row["struck"] else "was not struck")  # type: ignore[arg-type]
    return f"{what.format_map(row)}: {end}"


def summary(rows: Sequence[Mapping[str, object]]) -> str:
    """Return how many runs were struck in each standing, and how many ended otherwise."""
    struck = [row for row in rows if row["struck"]]
    counts = collections.Counter(str(row["standing"]) for row in struck)
    wrong = sum(bool(row["problems"]) for row in rows)
    by_standing = ", ".join(f"{standing} {count}" for standing, count in sorted(counts.items()))
    return f"{len(struck)} of {len(rows)} runs struck ({by_standing}); {wrong} broke a promise\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
