"""Compare the Simulator with real runs, and its cost with a hundred times the workers.

    python -m bench.studies.simulator --only predict --seconds 60
    python -m bench.studies.simulator --only scale --updates 10000

``predict``: for each method a real run of one worker measures the time of a step in addition to the
emulated device and link. A simulation of four workers with this overhead is compared with a real
run of four workers. Rates are measured while all workers train. ``scale``: the program simulates
AdaComp on LeNet with 10 and with 1,000 workers and compares the processor time of an update.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.table import Row, render

ROOT = pathlib.Path(__file__).resolve().parents[2]
METHODS = ("asgd", "bsp", "adacomp")
#: Seconds that the emulated devices of the four workers take for a mini-batch.
DEVICES = (0.1, 0.2, 0.3, 0.4)
LINK_MBPS = 20
_ALONE_SECONDS = 30.0
_CROWDS = (10, 1000)
_COST = re.compile(r"took [\d.]+ s of real and ([\d.]+) s of processor time")


def rows(seconds: float = 60.0, updates: int = 10_000) -> list[Row]:
    """Measure ``predict`` and ``scale``, and return the rows of the table."""
    return [*predict(seconds), *scale(updates)]


def predict(seconds: float, methods: Sequence[str] = METHODS) -> list[Row]:
    """Compare simulated runs of four workers with real runs; return the rows."""
    return [row for method in methods for row in _predict(method, seconds)]


def _predict(method: str, seconds: float) -> list[Row]:
    overhead = step_overhead(method)
    common = [
        f"--method={method}",
        f"--nb_workers={len(DEVICES)}",
        f"--link_mbps={LINK_MBPS}",
        f"--max_seconds={seconds}",
        "--eval_interval_seconds=1000",
    ]
    devices = ",".join(map(str, DEVICES))
    steps = ",".join(f"{device + overhead:.4f}" for device in DEVICES)
    real = _rates("Cluster", *common, "--port=0", f"--step_seconds={devices}")
    simulated = _rates("Simulator", *common, f"--sim_step_seconds={steps}")
    return [
        Row(
            f"{method} {name}",
            simulated[name],
            unit,
            real[name],
            abs(simulated[name] / real[name] - 1),
            0.15,
            "lower",
            f"{1e3 * overhead:.1f} ms more than the device's time" if name == "updates" else "",
        )
        for name, unit in (("updates", "1/s"), ("bytes_up", "B/s"), ("bytes_down", "B/s"))
    ]


def step_overhead(method: str) -> float:
    """Return the seconds of a lone worker's update, without its sleeping device and its link."""
    common = (
        f"--method={method}",
        "--nb_workers=1",
        f"--link_mbps={LINK_MBPS}",
        f"--max_seconds={_ALONE_SECONDS}",
    )
    real = _rates("Cluster", *common, "--port=0", f"--step_seconds={DEVICES[0]}")
    ideal = _rates("Simulator", *common, f"--sim_step_seconds={DEVICES[0]}")
    return max(0.0, 1 / real["updates"] - 1 / ideal["updates"])


def _rates(role: str, *flags: str) -> dict[str, float]:
    """Execute a run; return its updates and bytes per second while all workers train."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _play(folder, f"--type_node={role}", *flags)
        return steady((folder / "metrics.jsonl").read_text())


def steady(metrics: str) -> dict[str, float]:
    """Return updates and bytes per second between two status lines of a metrics.jsonl.

    The first status line is the first after every worker has pushed; the second status line is the
    last before the end of the run.
    """
    lines: list[dict[str, Any]] = [json.loads(line) for line in metrics.splitlines()]
    lines = [line for line in lines if line["kind"] == "status" and line["stop_reason"] is None]
    all_in = [
        line
        for line in lines
        if len(line["workers"]) == line["nb_workers"]
        and all(worker["pushes"] for worker in line["workers"])
    ]
    if len(all_in) < 2:
        raise RuntimeError(f"only {len(all_in)} of {len(lines)} status lines have all workers")
    first, last = all_in[0], all_in[-1]
    seconds = last["seconds"] - first["seconds"]
    names = {"updates": "version", "bytes_up": "bytes_up", "bytes_down": "bytes_down"}
    return {name: (last[field] - first[field]) / seconds for name, field in names.items()}


def scale(updates: int) -> list[Row]:
    """Compare the cost of an update with few workers and with many; return the row."""
    few, many = (_cost(workers, updates) for workers in _CROWDS)
    name = f"adacomp, LeNet, {_CROWDS[1]:,} workers / {_CROWDS[0]}"
    return [
        Row(
            name,
            1e3 * many,
            "ms of processor time per update",
            1e3 * few,
            many / few,
            1.3,
            "lower",
            f"{updates} updates: {many * updates:.0f} s",
        ),
    ]


def _cost(workers: int, updates: int) -> float:
    """Return the processor seconds of one update of a simulation."""
    with tempfile.TemporaryDirectory() as name:
        output = _play(
            pathlib.Path(name),
            "--type_node=Simulator",
            "--method=adacomp",
            "--network=lenet",
            f"--nb_workers={workers}",
            f"--iter_max={updates}",
            "--sim_step_seconds=lognormal:0.2,0.3",
            "--eval_interval_seconds=100000",
        )
        match = _COST.search(output)
        if match is None:
            raise RuntimeError(f"the simulation did not report its cost: {output[-2000:]}")
        return float(match[1]) / updates


def _play(folder: pathlib.Path, *flags: str) -> str:
    """Run main.py to its end; return its output.

    Raises:
        RuntimeError: main.py failed.
    """
    command = [sys.executable, str(ROOT / "main.py"), f"--run_dir={folder}", "--overwrite", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"main.py: exit code {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--only", choices=("predict", "scale"))
    options.add_argument("--methods", nargs="+", default=METHODS, help="methods of predict")
    options.add_argument(
        "--seconds", type=float, default=60.0, help="length of each real run of predict"
    )
    options.add_argument(
        "--updates", type=int, default=10_000, help="updates of each simulation of scale"
    )
    arguments = options.parse_args()
    table_rows = []
    if arguments.only != "scale":
        table_rows += predict(arguments.seconds, arguments.methods)
    if arguments.only != "predict":
        table_rows += scale(arguments.updates)
    sys.stdout.write(render(table_rows))


if __name__ == "__main__":
    main()
