"""Accuracy of AdaComp and its controls: Fashion-MNIST, AdaComp's CNN, 4 workers, 20,000 updates.

``python -m bench.accuracy --runs DIR`` runs every arm with every seed, skips what is finished, and
prints one Markdown table. Takes hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMON = ("--type_node=Cluster", "--dataset=fashion_mnist", "--network=cnn", "--nb_workers=4",
          "--batch_size=10", "--learning_rate=0.02", "--eval_interval_seconds=100000",
          "--port=0")  # fmt: skip
#: Name of an arm -> what makes it differ.
ARMS = {
    "asgd": ("--method=asgd",),
    "adacomp": ("--method=adacomp",),
    "adacomp int8": ("--method=adacomp", "--value_dtype=int8"),
    "top-k without damping": ("--method=adacomp", "--weighting=none"),
    "random-k": ("--method=adacomp", "--codec=random_k"),
    "adacomp c = 0.1": ("--method=adacomp", "--compression_rate=0.1"),
}
LAST_EVALUATIONS = 3


def run_arm(arm: str, seed: int, folder: pathlib.Path, updates: int) -> pathlib.Path:
    """Run one arm with one seed unless it is finished; return its run directory."""
    run_dir = folder / f"{arm.replace(' ', '-').replace('=', '')}-{seed}"
    command = [sys.executable, str(ROOT / "main.py"), *COMMON, *ARMS[arm], f"--seed={seed}",
               f"--iter_max={updates}", f"--eval_interval_updates={updates // 10}",
               f"--run_dir={run_dir}"]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return run_dir


def last_accuracy(run_dir: pathlib.Path) -> float:
    """Return the mean accuracy of the last evaluations."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    evaluations = [entry for entry in map(json.loads, lines) if entry["kind"] == "eval"]
    by_version = {entry["version"]: entry["accuracy"] for entry in evaluations}
    return statistics.mean(list(by_version.values())[-LAST_EVALUATIONS:])


def row(arm: str, run_dirs: list[pathlib.Path]) -> str:
    """Return one line of the table."""
    accuracies = [last_accuracy(run_dir) for run_dir in run_dirs]
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in run_dirs]

    def mean(name: str) -> float:
        return statistics.mean(summary[name] for summary in summaries)

    seeds = ", ".join(f"{accuracy:.4f}" for accuracy in accuracies)
    staleness = statistics.mean(summary["staleness"]["mean"] for summary in summaries)
    return (
        f"| {arm} | {statistics.mean(accuracies):.4f} | {seeds} | {mean('compression_up'):.1f} | "
        f"{mean('compression_down'):.1f} | {staleness:.2f} | {mean('updates_per_second'):.0f} |"
    )


def main() -> None:
    """Run what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/accuracy"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--updates", type=int, default=20_000)
    options = parser.parse_args()
    print("| arm | accuracy | by seed | compression up | down | staleness | updates/s |")
    print("|---|---|---|---|---|---|---|")
    results: dict[str, list[pathlib.Path]] = {arm: [] for arm in options.arms}
    for seed in options.seeds:  # all arms of one seed first: a cut-off run still compares
        for arm in options.arms:
            results[arm].append(run_arm(arm, seed, options.runs, options.updates))
    for arm in options.arms:
        print(row(arm, results[arm]), flush=True)


if __name__ == "__main__":
    main()
