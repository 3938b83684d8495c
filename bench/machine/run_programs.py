"""Run the ops' XLA programs on jax's first device, and compare the outputs with numpy's.

    python3 bench/machine/run_programs.py FOLDER [--out FOLDER]

FOLDER is the output of ``python -m bench.machine.gpu_programs``. This file needs only numpy and
jax, so that it runs on a machine without TensorFlow and without this repository. It prints a table
and writes it as Markdown and JSON. The exit code is 1 if a program's output differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.extend import backend as extended
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

FORMAT_VERSION = 2
_REPEATS = 20
_COPIED_BYTES = 1 << 30  # maximum size of the plain copy, reads and writes together
_FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Ran:
    """Result of one program."""

    name: str
    error: str  # empty if the outputs equal numpy's within the tolerance
    largest_gap: float
    tolerance: float
    milliseconds: float
    share: float  # the program's bandwidth divided by a plain copy's on the same device


def load(artifact: bytes, device: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Compile a portable StableHLO artifact for a device; return a function that runs it.

    The function uses jax's internal calls, whose names differ between jax versions.
    """
    client, options = device.client, extended.get_compile_options(1, 1)
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, artifact)
        if hasattr(client, "compile_and_load"):
            executable = client.compile_and_load(module, _device_list(device), options)
        else:
            executable = client.compile(module, options)

    def run(arguments: Sequence[Any]) -> list[Any]:
        results = executable.execute_sharded(list(arguments))
        return [shards[0] for shards in results.disassemble_into_single_device_arrays()]

    return run


def _device_list(device: Any) -> Any:
    try:
        from jaxlib import _jax as bindings
    except ImportError:
        from jaxlib import xla_client as bindings
    return bindings.DeviceList((device,))


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call, including the wait for its results."""
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bandwidth(device: Any, size: int) -> float:
    """Return the device's copy bandwidth in bytes per second, for `size` float32 entries."""
    source = jax.device_put(np.zeros(min(size, _COPIED_BYTES // (2 * _FLOAT)), np.float32), device)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(source))
    return 2 * _FLOAT * source.size / seconds_of(lambda: copy(source))


def difference(found: Any, wanted: np.ndarray, tolerance: float) -> tuple[str, float]:
    """Return an error text, empty if the output is correct, and the largest absolute gap."""
    got = np.asarray(found)
    if got.shape != wanted.shape:
        return f"has the shape {got.shape}, numpy's {wanted.shape}", 0.0
    if not wanted.size:
        return "", 0.0
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    gap = float(np.abs(got - wanted).max())
    allowed = tolerance * max(1.0, float(np.abs(wanted).max()))
    return (
        f"differs by up to {gap:.3g} (allowed {allowed:.3g})" if not gap <= allowed else ""
    ), gap


def run_program(folder: pathlib.Path, listed: dict[str, Any], device: Any, peak: float) -> Ran:
    """Run one program of the manifest. A failure on the device becomes the result's `error`."""
    name = listed["name"]
    tolerance = listed["on_gpu" if device.platform == "gpu" else "tolerance"]
    arrays = np.load(folder / f"{name}.npz")
    expected = [arrays[f"out{place}"] for place in range(listed["outputs"])]
    try:
        run = load((folder / f"{name}.stablehlo").read_bytes(), device)
        inputs = [jax.device_put(arrays[f"in{place}"], device) for place in range(listed["inputs"])]
        outputs = jax.block_until_ready(run(inputs))
        seconds = seconds_of(lambda: run(inputs))
    except (RuntimeError, TypeError, ValueError, ir.MLIRError) as refusal:
        text = str(refusal).strip() or repr(refusal)
        return Ran(name, text.splitlines()[0][:200], 0.0, tolerance, 0.0, 0.0)
    compared = [difference(*pair, tolerance) for pair in zip(outputs, expected, strict=True)]
    errors = [f"output {place} {text}" for place, (text, _) in enumerate(compared) if text]
    gap = max(gap for _, gap in compared)
    share = listed["bytes"] / seconds / peak
    return Ran(name, "; ".join(errors), gap, tolerance, 1e3 * seconds, share)


def document(rows: Sequence[Ran], about: dict[str, Any]) -> str:
    """Return the device's facts and the table as Markdown."""
    lines = ["# The ops' XLA programs on a device", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [
        "",
        "| op | ms | of a copy's bandwidth | largest gap | allowed | verdict |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.milliseconds:.3f} | {row.share:.2f} | {row.largest_gap:.2g} | "
        f"{row.tolerance:.2g} | {row.error or 'equal to numpy'} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all programs of a folder; return the exit code."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=pathlib.Path)
    options.add_argument(
        "--out", type=pathlib.Path, help="folder for the results; FOLDER by default"
    )
    arguments = options.parse_args()
    jax.config.update("jax_enable_x64", True)  # positions are int64
    manifest = json.loads((arguments.folder / "manifest.json").read_text())
    if manifest["format"] != FORMAT_VERSION:
        sys.stderr.write(
            f"{arguments.folder}: programs of format {manifest['format']}; expected "
            f"{FORMAT_VERSION}. Write them with this version's gpu_programs.\n"
        )
        return 2
    device = jax.devices()[0]
    peak = bandwidth(device, manifest["size"])
    rows = [
        run_program(arguments.folder, program, device, peak) for program in manifest["programs"]
    ]
    about = {
        "device": f"{device.device_kind} ({device.platform})",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "lowered by TensorFlow": manifest["tensorflow"],
        "entries of a vector": f"{manifest['size']:,}",
        "a copy's bandwidth": f"{peak / 1e9:.1f} GB/s",
    }
    text, out = document(rows, about), arguments.out or arguments.folder
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(text)
    records = {"about": about, "rows": [dataclasses.asdict(row) for row in rows]}
    (out / "results.json").write_text(json.dumps(records, indent=1))
    sys.stdout.write(text)
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
