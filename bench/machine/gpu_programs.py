"""Export the ops as XLA programs, with inputs and expected outputs, for use without TensorFlow.

    python -m bench.machine.gpu_programs FOLDER

For every `tf.function` that `bench.machine.gpu` checks, this program writes the StableHLO module
for one size, its inputs, and numpy's outputs. ``bench/machine/run_programs.py FOLDER``, which needs
only numpy and jax, runs these modules on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np

from bench.machine import gpu

SIZE = 200_000
MANIFEST = "manifest.json"
#: Version of the folder's format; run_programs.py accepts only its own version.
FORMAT_VERSION = 2


def write(folder: pathlib.Path, size: int) -> dict[str, Any]:
    """Write every op's program, inputs and expected outputs to a new folder; return the manifest.

    ``NAME.stablehlo`` is a portable StableHLO artifact. ``NAME.npz`` holds the program's arguments
    ``in0``, ``in1`` ... and the expected outputs ``out0`` ... . Inputs that determine output shapes
    are constants in the program.

    Raises:
        FileExistsError: The folder exists.
    """
    import tensorflow as tf

    folder.mkdir(parents=True)
    listed = []
    for op in gpu.ops(size):
        inputs = [np.asarray(array) for array in op.given()]
        expected = [np.asarray(array) for array in op.expected]
        (folder / f"{op.name}.stablehlo").write_bytes(lowered(op))
        arrays = {f"in{place}": array for place, array in enumerate(inputs)}
        arrays |= {f"out{place}": array for place, array in enumerate(expected)}
        np.savez_compressed(folder / f"{op.name}.npz", **arrays)
        listed.append(
            {
                "name": op.name,
                "inputs": len(inputs),
                "outputs": len(expected),
                "bytes": op.num_bytes,
                "tolerance": op.tolerance,
                "on_gpu": op.tolerance_on(gpu=True),
            }
        )
    manifest = {
        "format": FORMAT_VERSION,
        "size": size,
        "tensorflow": tf.__version__,
        "programs": listed,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def lowered(op: gpu.Op) -> bytes:
    """Return the op's StableHLO module. Inputs that determine output shapes are constants."""
    import tensorflow as tf
    from tensorflow.compiler.mlir.stablehlo import stablehlo

    body: Any = op.body

    def whole(*given: Any) -> Any:
        remaining = iter(given)
        arguments = [
            tf.constant(value) if fixed else next(remaining)
            for value, fixed in zip(op.inputs, op.fixed(), strict=True)
        ]
        return body.python_function(*arguments)

    program = tf.function(whole, jit_compile=True)
    given = [tf.constant(value) for value in op.given()]
    module = program.experimental_get_compiler_ir(*given)(stage="stablehlo_serialized")
    artifact: bytes = stablehlo.serialize_portable_artifact_str(
        module, stablehlo.get_minimum_version()
    )
    return artifact


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m bench.machine.gpu_programs", description=__doc__
    )
    options.add_argument("folder", type=pathlib.Path, help="new folder for the programs")
    options.add_argument("--size", type=int, default=SIZE, help="number of entries of each vector")
    arguments = options.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    manifest = write(arguments.folder, arguments.size)
    total = sum(path.stat().st_size for path in arguments.folder.iterdir())
    sys.stdout.write(
        f"{len(manifest['programs'])} programs of {arguments.size:,} entries, "
        f"{total / 2**20:.1f} MiB: {arguments.folder}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
