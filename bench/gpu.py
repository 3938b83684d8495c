"""Every op on a GPU: equal to numpy, and how near to the GPU's memory bandwidth.

    python -m bench.gpu

Each `tf.function` of `ops.kernels.tensorflow_bodies` runs with all its tensors on the GPU and soft
placement off, so that an operation which only a CPU has is an error. Without a GPU this says so.
``--device cpu`` runs the same on the processor.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ops import kernels
from ops.kernels import compensate as delays

SIZE = 25_000_000
RATE = 0.01
BLOCK = 1024
LEVEL_BITS = 4
_REPEATS = 20
_FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Op:
    """One body: what it is given, what numpy makes of the same, and the bytes it must move."""

    name: str
    body: Callable[..., Any]
    inputs: Sequence[Any]
    expected: Sequence[Any]
    num_bytes: float
    tolerance: float = 0.0  # relative to the largest value; 0: bit for bit


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one op came to on a device."""

    name: str
    error: str  # empty: equal to numpy
    seconds: float
    share: float  # of the bandwidth that a copy has on the same device


def ops(size: int) -> Iterator[Op]:
    """Yield every body with inputs for `size` entries."""
    from ops.kernels import tensorflow_bodies as bodies

    plain, rng = kernels.load("numpy"), np.random.default_rng(0)
    x, y, z = (rng.standard_normal(size, np.float32) for _ in range(3))
    kept = max(1, int(RATE * size))
    where, values = plain.top_k(x, kept)
    rate = np.full(1, 0.02, np.float32)
    yield Op("top_k", bodies._top_k, (x, kept), (where, values), _FLOAT * size)
    changed = y.copy()
    plain.apply_sparse(changed, where, values, 0.02)
    lines = 2 * 64 * kept  # a cache line read for each of the two
    yield Op("apply_sparse", bodies._changed_entries, (y, where, values, rate),
             (changed[where],), lines, 1e-6)  # fmt: skip
    dense = y.copy()
    plain.apply_dense(dense, x, 0.02)
    yield Op("apply_dense", bodies._changed, (y, x, rate), (dense,), 3 * _FLOAT * size, 1e-6)
    yield Op("scale", bodies._product, (rate, x), (plain.scale(x, 0.02),), 2 * _FLOAT * size)
    coded = {name: plain.quantise(x, name) for name in ("bfloat16", "float16", "int8")}
    bits = coded["bfloat16"].data.view(np.uint16)
    yield Op("to_bfloat16", bodies._to_bfloat16, (x,), (bits,), 6 * size)
    yield Op("to_float16", bodies._to_float16, (x,), (coded["float16"].data,), 6 * size)
    yield Op("largest", bodies._largest, (x,), (np.abs(x).max(),), _FLOAT * size)
    scale = np.float32(coded["int8"].scale)
    yield Op("to_int8", bodies._to_int8, (x, scale), (coded["int8"].data,), 5 * size, 1 / 127)
    sigma = rng.integers(0, 5, size)
    yield Op("damp", bodies._damp, (sigma,), (plain.damp(sigma),), 12 * size)
    compensated = plain.compensate(x, y, z, 0.04)
    yield Op("compensate", bodies._compensate, (x, y, z, np.full(1, 0.04, np.float32)),
             (compensated,), 4 * _FLOAT * size, 1e-5)  # fmt: skip
    square = np.abs(y) + np.float32(delays.FLOOR)
    adapted = plain.adapt(square.copy(), x, 0.95, 0.04)
    yield Op("adapt", bodies._adapt, (square, x, np.float32(0.95), np.float32(0.05),
             np.float32(0.04)), adapted, 4 * _FLOAT * size, 1e-5)  # fmt: skip
    averages = np.zeros(-(-size // BLOCK), np.float32)
    scored = plain.contribution(x, BLOCK, averages.copy(), 0.5)
    yield Op("contribution", bodies._contribution, (x, BLOCK, averages, np.float32(0.5),
             np.float32(0.5)), scored, _FLOAT * size, 1e-5)  # fmt: skip
    rows = x[: size // BLOCK * BLOCK].reshape(-1, BLOCK)
    yield Op("to_levels", bodies._to_levels, (rows, LEVEL_BITS),
             plain.to_levels(rows, LEVEL_BITS), 2 * _FLOAT * size + 2 * size, 1e-6)  # fmt: skip
    touched = np.sort(rng.choice(size, kept, replace=False))
    counted = plain.hits([touched.astype(np.int32)], where, np.zeros(size, np.uint16))
    yield Op("count_hits", bodies._count_hits, (np.int32(size), touched, where),
             (counted,), 2 * _FLOAT * size)  # fmt: skip


def difference(op: Op, found: Sequence[Any]) -> str:
    """Return what differs from numpy beyond the tolerance; empty if nothing does."""
    for number, (got, want) in enumerate(zip(found, op.expected, strict=True)):
        got, want = np.asarray(got), np.asarray(want)
        if got.shape != want.shape:
            return f"output {number} has the shape {got.shape}, numpy's {want.shape}"
        gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
        allowed = op.tolerance * max(1.0, float(np.abs(want.astype(np.float64)).max(initial=0)))
        if gap.max(initial=0) > allowed:
            return f"output {number} differs by up to {gap.max():.3g} (allowed {allowed:.3g})"
    return ""


def _seconds(call: Callable[[], Any]) -> float:
    """Return the median of calls whose results are waited for."""
    import tensorflow as tf

    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        tf.test.experimental.sync_devices()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(device: str, size: int) -> Iterator[Measured]:
    """Run every op on a TensorFlow device; yield what came of it.

    Raises:
        tensorflow.errors.InvalidArgumentError: An operation cannot be placed there.
    """
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    with tf.device(device):
        source = tf.zeros(size)
        copied = _seconds(lambda: tf.identity(source + 1.0))
        bandwidth = 2 * _FLOAT * size / copied
        for op in ops(size):
            with tf.device(device):
                inputs = [tf.constant(each) for each in op.inputs]
            found = op.body(*inputs)
            found = found if isinstance(found, list | tuple) else [found]
            error = difference(op, [each.numpy() for each in found])
            seconds = _seconds(lambda op=op, inputs=inputs: op.body(*inputs))
            yield Measured(op.name, error, seconds, op.num_bytes / seconds / bandwidth)


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    options.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    options.add_argument("--size", type=int, default=SIZE, help="entries of a vector")
    arguments = options.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    devices = tf.config.list_logical_devices(arguments.device.upper())
    if not devices:
        sys.stdout.write(f"no GPU: TensorFlow {tf.__version__} sees none on this machine\n")
        return 0
    sys.stdout.write(f"{devices[0].name}, {arguments.size:,} entries, TensorFlow "
                     f"{tf.__version__}\n")  # fmt: skip
    failed = 0
    for each in measure(devices[0].name, arguments.size):
        failed += bool(each.error)
        verdict = each.error or "equal to numpy"
        sys.stdout.write(f"{each.name:14} {1e3 * each.seconds:9.3f} ms  {each.share:5.2f} of a "
                         f"copy's bandwidth  {verdict}\n")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
