"""Measure the accuracy of the methods on Fashion-MNIST with several seeds, one table per study.

``python -m bench.studies.accuracy --study adacomp --runs DIR`` runs every arm with every seed,
skips finished runs, and prints a Markdown table. A study takes hours on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from thinwire.supervisor.metrics_log import evaluations_in

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMON = (
    "--type_node=Cluster",
    "--dataset=fashion_mnist",
    "--nb_workers=4",
    "--port=0",
    "--eval_interval_seconds=100000",
)


@dataclasses.dataclass(frozen=True)
class Study:
    """A set of arms (runs of main.py) that differ from each other in a few flags.

    Attributes:
        common: Flags of main.py for all arms.
        arms: Name of an arm -> the arm's own flags.
        updates: Length of a run, in updates of one mini-batch.
        last_evaluations: Number of evaluations at the run's end whose mean accuracy is the result.
            A run has ten evaluations.
    """

    common: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    updates: int
    last_evaluations: int


STUDIES = {
    "adacomp": Study(
        ("--network=cnn", "--batch_size=10", "--learning_rate=0.02"),
        {
            "asgd": ("--method=asgd",),
            "adacomp": ("--method=adacomp",),
            "adacomp int8": ("--method=adacomp", "--value_dtype=int8"),
            "adacomp with error feedback": ("--method=adacomp", "--error_feedback"),
            "top-k without damping": ("--method=adacomp", "--weighting=none"),
            "random-k": ("--method=adacomp", "--codec=random_k"),
            "adacomp c = 0.1": ("--method=adacomp", "--compression_rate=0.1"),
        },
        updates=20_000,
        last_evaluations=3,
    ),
    # 4,690 updates of 64 examples are five epochs of 60,000 examples.
    "dgs": Study(
        ("--network=mnist_cnn", "--batch_size=64", "--learning_rate=0.05"),
        {
            "momentum SGD": ("--type_node=Standalone", "--method=asgd", "--momentum=0.7"),
            "asgd": ("--method=asgd",),
            "gd": ("--method=gd",),
            "dgc": ("--method=dgc", "--dgc_momentum=0.7"),
            "dgs": ("--method=dgs", "--dgs_momentum=0.7"),
            "dgs m = 0.5": ("--method=dgs", "--dgs_momentum=0.5"),
            "dgs m = 0.3": ("--method=dgs", "--dgs_momentum=0.3"),
        },
        updates=4690,
        last_evaluations=1,
    ),
}


def run_arm(study: Study, arm: str, seed: int, folder: pathlib.Path, updates: int) -> pathlib.Path:
    """Run one arm with one seed; return its run directory. main.py skips a finished run."""
    run_dir = folder / f"{arm.replace(' ', '-').replace('=', '')}-{seed}"
    command = [
        sys.executable,
        str(ROOT / "main.py"),
        *COMMON,
        *study.common,
        *study.arms[arm],
        f"--seed={seed}",
        f"--iter_max={updates}",
        f"--run_dir={run_dir}",
        f"--eval_interval_updates={updates // 10}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return run_dir


def last_accuracy(run_dir: pathlib.Path, count: int) -> float:
    """Return the mean accuracy of a run's last `count` evaluations."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    evaluations = evaluations_in(list(map(json.loads, lines)))
    by_version = {
        evaluation.version: evaluation.metrics["accuracy"] or 0.0 for evaluation in evaluations
    }
    return statistics.mean(list(by_version.values())[-count:])


def row(study: Study, arm: str, run_dirs: list[pathlib.Path]) -> str:
    """Return one arm's line of the Markdown table."""
    accuracies = [last_accuracy(run_dir, study.last_evaluations) for run_dir in run_dirs]
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in run_dirs]

    def mean(format_spec: str, *path: str) -> str:
        values = [_find(summary, *path) for summary in summaries]
        return "-" if None in values else format(statistics.mean(values), format_spec)

    seeds = ", ".join(f"{accuracy:.4f}" for accuracy in accuracies)
    columns = [
        arm,
        f"{statistics.mean(accuracies):.4f}",
        seeds,
        mean(".1f", "compression_up"),
        mean(".1f", "compression_down"),
        mean(".2f", "staleness", "mean"),
        mean(".0f", "updates_per_second"),
    ]
    return f"| {' | '.join(columns)} |"


def _find(summary: Any, *path: str) -> Any:
    """Return a nested field of a summary, or None: a Standalone run has no byte counts."""
    for name in path:
        summary = (summary or {}).get(name)
    return summary


def main() -> None:
    """Run the chosen arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", default="adacomp", choices=list(STUDIES))
    parser.add_argument("--runs", type=pathlib.Path, help="default: runs/accuracy/STUDY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--updates", type=int, help="default: the study's")
    options = parser.parse_args()
    study = STUDIES[options.study]
    arms = options.arms or list(study.arms)
    if unknown := set(arms) - set(study.arms):
        parser.error(f"no arms {sorted(unknown)}; expected some of {list(study.arms)}")
    folder = options.runs or pathlib.Path("runs/accuracy") / options.study
    results: dict[str, list[pathlib.Path]] = {arm: [] for arm in arms}
    for seed in options.seeds:  # seed by seed, so that an interrupted study still compares all arms
        for arm in arms:
            run_dir = run_arm(study, arm, seed, folder, options.updates or study.updates)
            results[arm].append(run_dir)
    print("| arm | accuracy | by seed | compression up | down | staleness | updates/s |")
    print("|---|---|---|---|---|---|---|")
    for arm in arms:
        print(row(study, arm, results[arm]), flush=True)


if __name__ == "__main__":
    main()
