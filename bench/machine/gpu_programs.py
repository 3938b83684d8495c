"""The ops' XLA programs, for machines without TensorFlow: with their inputs and answers.

    python -m bench.machine.gpu_programs FOLDER

Of every `tf.function` that `bench.machine.gpu` checks, the StableHLO module for one size is
written, beside its inputs and what numpy makes of them. ``bench/machine/run_programs.py FOLDER``,
which needs only numpy and jax, then runs them on any device.
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
#: What runs elsewhere reads these.
FORMAT_VERSION = 2


def write(folder: pathlib.Path, size: int) -> dict[str, Any]:
    """Write every op's program, inputs and expected outputs to a new folder; return the manifest.

    ``NAME.stablehlo`` is a portable StableHLO artifact; ``NAME.npz`` holds its arguments ``in0``,
    ``in1`` ... (what shapes follow from is part of the program), and ``out0`` ... .

    Raises:
        FileExistsError: The folder is there.
    """
    import tensorflow as tf

    folder.mkdir(parents=True)
    listed = []
    for op in gpu.ops(size):
        inputs = [np.asarray(each) for each in op.given()]
        expected = [np.asarray(each) for each in op.expected]
        (folder / f"{op.name}.stablehlo").write_bytes(lowered(op))
        arrays = {f"in{place}": each for place, each in enumerate(inputs)}
        arrays |= {f"out{place}": each for place, each in enumerate(expected)}
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
    """Return the op's StableHLO module; what shapes follow from is a constant of it."""
    import tensorflow as tf
    from tensorflow.compiler.mlir.stablehlo import stablehlo

    body: Any = op.body

    def whole(*given: Any) -> Any:
        left = iter(given)
        arguments = [
            tf.constant(each) if fixed else next(left)
            for each, fixed in zip(op.inputs, op.fixed(), strict=True)
        ]
        return body.python_function(*arguments)

    program = tf.function(whole, jit_compile=True)
    given = [tf.constant(each) for each in op.given()]
    module = program.experimental_get_compiler_ir(*given)(stage="stablehlo_serialized")
    artifact: bytes = stablehlo.serialize_portable_artifact_str(
        module, stablehlo.get_minimum_version()
    )
    return artifact


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m bench.machine.gpu_programs", description=__doc__
    )
    options.add_argument("folder", type=pathlib.Path, help="is made")
    options.add_argument("--size", type=int, default=SIZE, help="entries of a vector")
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
