"""Compare the Simulator's FedAvg, FedYogi and FedProx with Flower's simulation, with several seeds.

``python -m bench.studies.federated --runs DIR --flower_python PYTHON --seeds 1,2,3,4,5`` runs each
method with each seed in the Simulator and in Flower. Both sides use the same parts of the data
(Dirichlet), drawn clients, local epochs, initial weights and network. The program skips finished
runs, prints a Markdown table, and writes a line for each run to the file of ``--out``. PYTHON is an
interpreter with flwr[simulation], tensorflow and keras.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from thinwire.data import registry
from thinwire.data.partition import PartitionRule, split, write_positions
from thinwire.models.registry import build_network

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Method -> flags of the Simulator. bench/studies/federated_flower.py has Flower's arguments.
METHODS = {
    "fedavg": ("--method=fedavg",),
    "fedyogi": ("--method=fedopt", "--server_optimizer=yogi", "--global_lr=0.01"),
    "fedprox": ("--method=fedprox", "--prox_mu=0.01"),
}
ALPHA = 0.3


def prepare(given: argparse.Namespace, seed: int) -> pathlib.Path:
    """Write the data, its parts and the initial model for both sides; return their folder."""
    folder = pathlib.Path(given.runs) / f"seed{seed}"
    if (folder / "model.keras").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    data = registry.load(given.dataset, given.data_dir, 28, 1, 10, "standardize", seed)
    rule = PartitionRule("dirichlet", given.clients, seed, dirichlet_alpha=ALPHA)
    write_positions(folder / "parts.txt", split(data.train_labels, rule))
    np.savez(
        folder / "data.npz",
        train_x=data.train_images,
        train_y=data.train_labels,
        test_x=data.test_images,
        test_y=data.test_labels,
    )
    build_network(given.network, 28, 1, 10, seed).save(folder / "model.keras")
    return folder


def simulate(given: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Execute a run of the Simulator; return its accuracy and seconds."""
    folder = prepare(given, seed)
    run_dir = folder / method
    flags = [
        *METHODS[method],
        "--type_node=Simulator",
        f"--nb_workers={given.clients}",
        f"--fraction={given.fraction}",
        f"--local_epochs={given.local_epochs}",
        f"--iter_max={given.rounds}",
        f"--batch_size={given.batch_size}",
        f"--learning_rate={given.learning_rate}",
        f"--dataset={given.dataset}",
        *([f"--data_dir={given.data_dir}"] if given.data_dir else []),
        f"--network={given.network}",
        "--partition=positions",
        f"--partition_file={folder / 'parts.txt'}",
        f"--seed={seed}",
        "--eval_interval_seconds=1e9",
        f"--run_dir={run_dir}",
        "--overwrite",
    ]
    began = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "main.py"), *flags], check=True, cwd=ROOT)
    seconds = time.perf_counter() - began
    summary = json.loads((run_dir / "summary.json").read_text())
    return {"accuracy": summary["test_accuracy"], "seconds": seconds}


def flower(given: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Execute the same run with Flower; return its accuracy and seconds."""
    folder = prepare(given, seed)
    settings = {
        "folder": str(folder),
        "draws": str(folder / method / "draws.txt"),
        "method": method,
        **{
            name: getattr(given, name)
            for name in ("clients", "rounds", "local_epochs", "batch_size", "learning_rate")
        },
    }
    program = ROOT / "bench" / "studies" / "federated_flower.py"
    result = folder / f"{method}.flower.json"
    result.unlink(missing_ok=True)
    began = time.perf_counter()
    subprocess.run(
        [given.flower_python, str(program), json.dumps(settings), str(result)],
        check=True,
        env=os.environ
        | {
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_ADDRESS": "local",  # start a local Ray, even if a Ray cluster is running
            "FLWR_TELEMETRY_ENABLED": "0",
        },
    )
    seconds = time.perf_counter() - began
    return {"accuracy": json.loads(result.read_text())["accuracy"], "seconds": seconds}


def measured(given: argparse.Namespace, method: str, seed: int, side: str) -> dict[str, Any]:
    """Return the stored result of a run; execute and store the run if there is no result."""
    path = pathlib.Path(given.runs) / f"seed{seed}" / f"{method}.{side}.measured.json"
    if not path.exists():
        result = {"here": simulate, "flower": flower}[side](given, method, seed)
        path.write_text(json.dumps(result))
    result = json.loads(path.read_text())
    return dict(result)


def row(method: str, here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    """Return a line of the table: means over seeds, their difference, and its tolerance."""
    accuracies = [[100 * values["accuracy"] for values in side] for side in (here, there)]
    ours, theirs = (statistics.mean(values) for values in accuracies)
    errors = [
        statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        for values in accuracies
    ]
    limit = max(1.0, 2 * math.hypot(*errors)) if len(here) > 1 else 1.0
    seconds = [statistics.median(values["seconds"] for values in side) for side in (here, there)]
    return (
        f"| {method} | {len(here)} | {ours:.2f} | {theirs:.2f} | {ours - theirs:+.2f} "
        f"| {limit:.2f} | {seconds[0]:.1f} | {seconds[1]:.1f} | {seconds[0] / seconds[1]:.2f} |"
    )


def main() -> None:
    """Execute the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", required=True)
    parser.add_argument("--flower_python", required=True)
    parser.add_argument("--out", type=pathlib.Path, help="file for all results, .jsonl")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--dataset", default="fashion_mnist_sample")
    parser.add_argument("--data_dir")
    parser.add_argument("--network", default="cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--local_epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=0.05)
    options = parser.parse_args()
    lines = [
        "| method | seeds | accuracy, % | Flower's | difference | tolerance | seconds | Flower's "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    records = []
    for method in options.methods.split(","):
        sides: dict[str, list[dict[str, Any]]] = {"here": [], "flower": []}
        for seed in map(int, options.seeds.split(",")):
            for side, results in sides.items():
                results.append(measured(options, method, seed, side))
                records.append({"method": method, "seed": seed, "side": side, **results[-1]})
        lines.append(row(method, sides["here"], sides["flower"]))
    sys.stdout.write("\n".join(lines) + "\n")
    if options.out:
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
