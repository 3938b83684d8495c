"""Steps of real processes over emulated links against those that the Simulator predicts.

    python -m bench.dgt_real --seconds 30

mnist_cnn, k = 0.5, two workers of one thread on devices that take half a second a step, so that two
cores have time for what coding and training really take. The emulated links are those of a worker
process: a token bucket, priorities, loss, background.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from bench.dgt_arms import Case, case
from bench.table import Row, render

ROOT = pathlib.Path(__file__).resolve().parents[1]
CASES = (
    case("mnist_cnn", "1 % lost", "reliable", ""),
    case("mnist_cnn", "1 % lost", "diff", "0.5"),
    case("mnist_cnn", "1 % lost", "drop, wait", "0.5"),
    case("mnist_cnn", "congested", "reliable", ""),
    case("mnist_cnn", "congested", "diff", "0.5"),
)
_DEVICE = "--step_seconds=0.5"
_LEAST_STEPS = 9
_SKIPPED = 3  # first steps: TensorFlow compiles


def rows(seconds: float) -> list[Row]:
    """Measure, and return the rows of the table."""
    from bench.dgt_play import Player  # imports TensorFlow

    player = Player()
    found = []
    for each in CASES:
        played = player.play(dataclasses.replace(each, learns=False), (_DEVICE, "--iter_max=30"))
        steps = [after - before for before, after in itertools.pairwise(played["times"])]
        predicted = statistics.median(steps)
        real = real_step(each, max(seconds, _LEAST_STEPS * predicted))
        off = abs(predicted / real - 1)
        name = f"step of {each.arm} {each.k}, {each.link}"
        found.append(Row(name, predicted, "s", real, off, 0.15, "lower"))
    return found


def real_step(each: Case, seconds: float) -> float:
    """Return the median step of a run of processes."""
    flags = [flag for flag in each.flags() if not flag.startswith(("--type_node", "--iter_max"))]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "main.py"),
            *flags,
            "--type_node=Cluster",
            _DEVICE,
            "--port=0",
            "--worker_threads=1",
            f"--max_seconds={seconds}",
            "--quiet",
            "--eval_interval_updates=0",
            f"--run_dir={folder}",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"main.py ended with {done.returncode}: {done.stdout[-2000:]}")
        return median_step((pathlib.Path(folder) / "measure" / "worker-1.jsonl").read_text())


def median_step(rounds: str) -> float:
    """Return the median seconds between rounds of a worker, its first ones left out.

    Raises:
        RuntimeError: There are too few.
    """
    ends = [json.loads(line)["total_time"] for line in rounds.splitlines()][_SKIPPED:]
    if len(ends) < 2:
        raise RuntimeError(f"a worker got only {len(ends)} steps behind its first {_SKIPPED}")
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--seconds", type=float, default=30.0, help="of each real run")
    sys.stdout.write(render(rows(options.parse_args().seconds)))


if __name__ == "__main__":
    main()
