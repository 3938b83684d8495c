"""Measure whole runs with JAX and with torch on one machine, with or without a GPU.

    python -m bench.machine.gpu_runs --out FOLDER

PS and two workers share the machine and its GPU. For each framework the program trains a
convolutional network alone and with each method. It writes steps per second, accuracy and the bytes
that an exchange sends, as Markdown and JSON. It needs the framework, Keras and thinwire, but no
TensorFlow. Runs that do not begin within ``--seconds`` are left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
_SCRIPT = pathlib.Path(__file__).with_name("gpu_script.py")
FRAMEWORKS = ("torch", "jax")
#: Method -> flags of the run.
METHODS: dict[str, Sequence[str]] = {
    "alone": (),
    "bsp": ("--method=bsp",),
    "dgs": ("--method=dgs",),
    "diloco": ("--method=diloco", "--local_steps=10"),
}
_PACKAGES = ("numpy", "jax", "torch", "keras", "grpcio", "protobuf")


def measure(framework: str, method: str, steps: int, size: int) -> dict[str, Any]:
    """Train with a method in a framework; return what was measured, or the reason for none.

    Args:
        framework: "torch", or "jax" for Keras on JAX.
        method: Key of `METHODS`.
        steps: Number of training steps of each worker.
        size: Number of examples in a worker's mini-batch.
    """
    words = [str(_SCRIPT), framework, method, str(steps), str(size)]
    environment = os.environ | {"KERAS_BACKEND": framework, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        if method != "alone":
            run = ["-m", "thinwire", "run", "--nb_workers=2", f"--run_dir={folder}/run"]
            words = [*run, *METHODS[method], *words]
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        rows = [
            json.loads(line.partition("measured ")[2])
            for line in done.stdout.splitlines()
            if "measured {" in line
        ]
        summary_file = pathlib.Path(folder, "run", "summary.json")
        summary = json.loads(summary_file.read_text()) if summary_file.exists() else {}
    if done.returncode or not rows:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return {"framework": framework, "method": method, "error": " ".join(reason)[:300]}
    return {
        **rows[0],
        "steps_per_second": statistics.mean(row["steps_per_second"] for row in rows),
        "accuracy": statistics.mean(row["accuracy"] for row in rows),
        "bytes_up": summary.get("bytes_up", 0) / max(1, steps) / max(1, len(rows)),
        "bytes_down": summary.get("bytes_down", 0) / max(1, steps) / max(1, len(rows)),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return measured rows as a Markdown table."""
    lines = [
        "| framework | method | device | steps/s of a worker | of alone | accuracy "
        "| bytes up, a step | bytes down, a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone = {row["framework"]: row for row in rows if row["method"] == "alone"}
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['framework']} | {row['method']} | {row['error']} | | | | | |")
            continue
        base = alone.get(row["framework"], {}).get("steps_per_second")
        share = f"{row['steps_per_second'] / base:.2f}" if base else ""
        lines.append(
            f"| {row['framework']} | {row['method']} | {row['device']} "
            f"| {row['steps_per_second']:.1f} | {share} | {row['accuracy']:.3f} "
            f"| {row['bytes_up']:,.0f} | {row['bytes_down']:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def versions() -> str:
    """Return the versions of Python and of the packages that the figures depend on."""
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return f"{', '.join(found)}; {platform.machine()}, {os.cpu_count()} cores"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", required=True, help="folder of the results")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--seconds", type=float, default=300.0)
    options.add_argument("--frameworks", nargs="*", default=list(FRAMEWORKS))
    options.add_argument("--methods", nargs="*", default=list(METHODS))
    given = options.parse_args()
    out, begun, rows = pathlib.Path(given.out), time.monotonic(), []
    out.mkdir(parents=True, exist_ok=True)
    for method in given.methods:
        for framework in given.frameworks:
            if time.monotonic() - begun > given.seconds:
                rows.append({"framework": framework, "method": method, "error": "no time left"})
                continue
            rows.append(measure(framework, method, given.steps, given.batch))
            text = f"{versions()}\n\n{table(rows)}"
            (out / "gpu-runs.md").write_text(text)
            (out / "gpu-runs.json").write_text(json.dumps(rows, indent=1))
    sys.stdout.write(f"{versions()}\n\n{table(rows)}")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
