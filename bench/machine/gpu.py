"""Compare every op on a GPU with numpy's results and with the GPU's memory bandwidth.

    python -m bench.machine.gpu

Each `tf.function` of `ops.kernels` runs with all its tensors on the GPU. Soft placement is off, so
that an operation without a GPU kernel is an error. Without a GPU the program reports `no GPU`.
``--device cpu`` runs the ops on the processor.
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

from thinwire.ops.kernels import load_kernels, numpy_ops, numpy_select
from thinwire.ops.types import CHUNK_ENTRIES

SIZE = 25_000_000
RATE = 0.01
BLOCK = 1024
LEVEL_BITS = 4
CHUNK_KEPT = 64
COLUMNS, RANK = 128, 2  # of the matrix that low-rank ops approximate
_REPEATS = 20
_FLOAT = 4  # bytes
_TF32 = 2e-3  # tolerance for sums of products whose factors have 10 bits of mantissa


@dataclasses.dataclass(frozen=True)
class Op:
    """One op with its inputs, numpy's outputs for these inputs, and its memory traffic.

    Attributes:
        name: Name of the op.
        body: Function that runs the op.
        inputs: Arguments of `body`.
        expected: Outputs of the numpy implementation.
        num_bytes: Number of bytes that the op must read and write.
        tolerance: Tolerance relative to the largest value; 0 requires bit-for-bit equality.
        on_gpu: Tolerance on a GPU, or None if it equals `tolerance`. A GPU multiplies matrices with
            10 bits of mantissa (TF32) unless the user's program forbids it.
        shaping: Indices of the inputs that determine the shapes of outputs, in addition to all
            integer inputs.
    """

    name: str
    body: Callable[..., Any]
    inputs: Sequence[Any]
    expected: Sequence[Any]
    num_bytes: float
    tolerance: float = 0.0
    on_gpu: float | None = None
    shaping: tuple[int, ...] = ()

    def fixed(self) -> list[bool]:
        """Return for each input True if output shapes depend on it: XLA needs it as a constant."""
        arrays = [np.asarray(array) for array in self.inputs]
        numbers = [array.ndim == 0 and array.dtype.kind in "iu" for array in arrays]
        return [number or place in self.shaping for place, number in enumerate(numbers)]

    def tolerance_on(self, gpu: bool) -> float:
        """Return the tolerance on a GPU if `gpu` is True, else on a processor."""
        return self.on_gpu if gpu and self.on_gpu is not None else self.tolerance

    def given(self) -> list[Any]:
        """Return the inputs that are not `fixed`, which are the arguments of an XLA program."""
        pairs = zip(self.inputs, self.fixed(), strict=True)
        return [value for value, fixed in pairs if not fixed]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Result of one op on a device."""

    name: str
    error: str  # empty if the outputs equal numpy's
    seconds: float
    share: float  # the op's bandwidth divided by a plain copy's on the same device


class Given:
    """Inputs of `size` entries that several ops share, and the numpy implementations."""

    def __init__(self, size: int) -> None:
        """Draw three random vectors, and select entries of the first vector."""
        self.size, self.plain = size, load_kernels("numpy")
        self.rng = np.random.default_rng(0)
        self.x, self.y, self.z = (self.rng.standard_normal(size, np.float32) for _ in range(3))
        self.kept = max(1, int(RATE * size))
        self.where, self.values = self.plain.top_k(self.x, self.kept)


def ops(size: int) -> Iterator[Op]:
    """Yield every op with inputs of `size` entries."""
    data = Given(size)
    for some in (
        _selecting,
        _by_magnitude,
        _of_arrays,
        _changing,
        _coding,
        _compensating,
        _of_blocks,
        _of_chunks,
        _of_matrices,
    ):
        yield from some(data)


def _selecting(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import tensorflow_select as bodies

    size, x, count = given.size, given.x, given.kept
    planned = bodies.plan(size, count)
    padded = given.where, given.values, np.int32(count)
    yield Op("top_k", bodies._top_k, (x, *planned), padded, _FLOAT * size)
    # The product with -0.5 is exact, so that a fused multiply-add and separate roundings are equal.
    half = np.float32(-0.5)
    residual = given.y.copy()
    where, values, _ = given.plain.feedback_top_k(residual, x, count, half)
    yield Op(
        "feedback_top_k",
        bodies._feedback_top_k,
        (given.y, x, half, *planned),
        (residual, where, values, np.int32(count)),
        3 * _FLOAT * size,
    )
    total = given.y.copy()
    given.plain.accumulate(total, x, 0.3, 0.9)
    yield Op(
        "accumulate",
        bodies._accumulated,
        (given.y, x, np.float32(0.3), np.float32(0.9)),
        (total,),
        3 * _FLOAT * size,
        1e-6,
    )


def _by_magnitude(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import tensorflow_select as bodies

    size, x, count = given.size, given.x, given.kept
    threshold, capacity = np.float32(np.abs(given.values).min()), min(size, 2 * count)
    # Several entries may equal the threshold, so that more than `count` entries can be selected.
    where, values = numpy_select.at_least(x, threshold, count)
    padded = np.full(capacity, size), np.zeros(capacity, np.float32)
    padded[0][: where.size], padded[1][: where.size] = where, values
    yield Op(
        "reaching",
        bodies._reaching,
        (x, threshold, capacity),
        (*padded, np.int32(where.size)),
        _FLOAT * size,
    )


def _of_arrays(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import device
    from thinwire.ops.kernels import tensorflow_ops as bodies

    size, x, count = given.size, given.x, given.kept
    yield Op("is_finite", bodies._is_finite, (x,), (np.bool_(True),), _FLOAT * size)
    length = np.linalg.norm(x.astype(np.float64))
    yield Op("norm", bodies._norm, (x,), (length,), _FLOAT * size, 1e-12)
    changed = x.copy()
    changed[given.where] = 0
    cleared = np.zeros_like(given.values)
    yield Op("put", device._put, (x, given.where, cleared), (changed,), 2 * _FLOAT * size)
    yield Op("taken", device._taken, (x, given.where), (given.values,), 64 * count)


def _changing(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import tensorflow_ops as bodies

    size, x, y = given.size, given.x, given.y
    rate = np.full(1, 0.02, np.float32)
    dense = y.copy()
    given.plain.apply_dense(dense, x, 0.02)
    yield Op("apply_dense", bodies._changed, (y, x, rate), (dense,), 3 * _FLOAT * size, 1e-6)
    scaled = given.plain.scale(x, 0.02)
    yield Op("scale", bodies._product, (rate, x), (scaled,), 2 * _FLOAT * size)
    sigma = given.rng.integers(0, 5, size)
    yield Op("damp", bodies._damp, (sigma,), (given.plain.damp(sigma),), 12 * size)


def _coding(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import tensorflow_ops as bodies

    size, x = given.size, given.x
    coded = {name: given.plain.quantise(x, name) for name in ("bfloat16", "float16", "int8")}
    bits = coded["bfloat16"].data.view(np.uint16)
    yield Op("to_bfloat16", bodies._to_bfloat16, (x,), (bits,), 6 * size)
    yield Op("to_float16", bodies._to_float16, (x,), (coded["float16"].data,), 6 * size)
    yield Op("largest", bodies._largest, (x,), (np.abs(x).max(),), _FLOAT * size)
    scale = np.float32(coded["int8"].scale)
    yield Op("to_int8", bodies._to_int8, (x, scale), (coded["int8"].data,), 5 * size, 1 / 127)


def _compensating(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import tensorflow_ops as bodies

    size, x, y, z = given.size, given.x, given.y, given.z
    compensated = given.plain.compensate(x, y, z, 0.04)
    yield Op(
        "compensate",
        bodies._compensate,
        (x, y, z, np.full(1, 0.04, np.float32)),
        (compensated,),
        4 * _FLOAT * size,
        1e-5,
    )
    square = np.abs(y) + np.float32(numpy_ops.FLOOR)
    adapted = given.plain.adapt(square.copy(), x, 0.95, 0.04)
    yield Op(
        "adapt",
        bodies._adapt,
        (square, x, np.float32(0.95), np.float32(0.05), np.float32(0.04)),
        adapted,
        4 * _FLOAT * size,
        1e-5,
    )


def _of_blocks(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import tensorflow_ops as bodies

    size, x = given.size, given.x
    averages = np.zeros(-(-size // BLOCK), np.float32)
    scored = given.plain.contribution(x, BLOCK, averages.copy(), 0.5)
    yield Op(
        "contribution",
        bodies._contribution,
        (x, BLOCK, averages, np.float32(0.5), np.float32(0.5)),
        scored,
        _FLOAT * size,
        1e-5,
    )
    rows = x[: size // BLOCK * BLOCK].reshape(-1, BLOCK)
    coded = given.plain.to_levels(rows, LEVEL_BITS)
    yield Op("to_levels", bodies._to_levels, (rows, LEVEL_BITS), coded, 10 * size, 1e-6)
    classes, sums = np.ones(averages.size, np.uint8), scored[1]
    order = given.plain.best_first([scored[0]], classes).astype(np.int32)
    inputs = scored[0], classes
    moved = 10 * averages.size
    yield Op("best_first", bodies._best_first, inputs, (order,), moved, shaping=(1,))
    flags = given.plain.block_flags(sums)
    yield Op("block_flags", bodies._block_flags, (sums,), flags, 6 * sums.size)
    numbers = np.arange(0, len(rows), 2)
    taken = rows[numbers]
    inputs = x, numbers, BLOCK
    yield Op("take_blocks", bodies._take_blocks, inputs, (taken,), 2 * taken.nbytes)
    blocks = given.plain.code_blocks(x, numbers, BLOCK, LEVEL_BITS)
    inputs = x, numbers, BLOCK, LEVEL_BITS
    yield Op("code_blocks", bodies._code_blocks, inputs, blocks, 10 * size, 1e-6)
    levels = given.plain.to_levels(rows, 4)[0].astype(np.uint16)
    octets = levels.astype(np.uint8)
    yield Op("octets", bodies._octets, (levels,), (octets,), 3 * levels.size)
    pairs = octets[:, ::2] | octets[:, 1::2] << np.uint8(4)
    yield Op("nibbles", bodies._nibbles, (levels,), (pairs,), 3 * levels.size)


def _of_chunks(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import few_bits, numpy_chunks
    from thinwire.ops.kernels import tensorflow_ops as bodies
    from thinwire.ops.kernels.tensorflow_select import _chunk_top_k

    size, x = given.size, given.x
    edges = few_bits.edges_of(None, size, CHUNK_ENTRIES)
    starts, lengths = edges[:-1], np.diff(edges)
    where, values = given.plain.chunk_top_k(x, CHUNK_KEPT, CHUNK_ENTRIES)
    padded = np.full(lengths.size * CHUNK_KEPT, size), np.zeros(lengths.size * CHUNK_KEPT)
    padded[0][: where.size], padded[1][: where.size] = where, values
    last = numpy_chunks.kept_of_last(size, CHUNK_KEPT, CHUNK_ENTRIES)
    yield Op(
        "chunk_top_k",
        _chunk_top_k,
        (x, CHUNK_KEPT, CHUNK_ENTRIES, last),
        (*padded, np.int32(where.size)),
        _FLOAT * size,
    )
    chunks, magnitudes = np.repeat(np.arange(lengths.size), lengths), np.abs(x)
    exact = magnitudes.astype(np.float64)
    sums = np.add.reduceat(exact, starts)
    above = magnitudes > (sums / lengths).astype(np.float32)[chunks]
    largest = np.maximum.reduceat(magnitudes, starts)
    upper = np.add.reduceat(np.where(above, exact, 0), starts)
    figures = largest, sums, above, upper, np.add.reduceat(above.astype(np.int64), starts)
    yield Op(
        "chunk_figures",
        bodies._chunk_figures,
        (x, chunks, np.int32(lengths.size)),
        figures,
        _FLOAT * size,
        1e-6,
    )
    boundaries = np.array(few_bits.boundaries("int2"), np.float32)
    limits = largest[chunks][:, None] * boundaries[None]
    levels = (magnitudes[:, None] >= limits).sum(1).astype(np.uint8)
    inputs = x, chunks, largest, boundaries
    yield Op("uniform_levels", bodies._uniform_levels, inputs, (levels,), 5 * size)
    yield Op("is_negative", bodies._is_negative, (x,), (np.signbit(x),), 5 * size)


def _of_matrices(given: Given) -> Iterator[Op]:
    from thinwire.ops.kernels import tensorflow_ops as bodies

    rows = given.size // COLUMNS
    size = rows * COLUMNS
    x, left, right = given.x[:size], given.y[: rows * RANK], given.z[: COLUMNS * RANK]
    left, right, matrix = left.reshape(rows, RANK), right.reshape(-1, RANK), x.reshape(rows, -1)
    exact = matrix.astype(np.float64)
    moved = _FLOAT * size
    yield Op("image", bodies._image, (x, right), (exact @ right,), moved, 1e-5, _TF32)
    yield Op("following", bodies._following, (x, left), (exact.T @ left,), moved, 1e-5, _TF32)
    down, across = np.ascontiguousarray(left[:, 0]), np.ascontiguousarray(right[:, 0])
    grown = matrix + down[:, None] * across
    given_to_it = matrix, down, across
    yield Op("plus_outer", bodies._plus_outer, given_to_it, (grown,), 2 * moved, 1e-6)


def difference(op: Op, found: Sequence[Any], on_gpu: bool = False) -> str:
    """Return a text about the first output that differs from numpy's; empty if all are equal."""
    tolerance = op.tolerance_on(on_gpu)
    for number, (got, want) in enumerate(zip(found, op.expected, strict=True)):
        got, want = np.asarray(got), np.asarray(want)
        if got.shape != want.shape:
            return f"output {number} has the shape {got.shape}, numpy's {want.shape}"
        gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
        allowed = tolerance * max(1.0, float(np.abs(want.astype(np.float64)).max(initial=0)))
        if gap.max(initial=0) > allowed:
            return f"output {number} differs by up to {gap.max():.3g} (allowed {allowed:.3g})"
    return ""


def _seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call, including the wait for its results."""
    import tensorflow as tf

    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        tf.test.experimental.sync_devices()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(device: str, size: int) -> Iterator[Measured]:
    """Run every op on a TensorFlow device; yield the results.

    Raises:
        tensorflow.errors.InvalidArgumentError: The device cannot run an operation.
    """
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    with tf.device(device):
        source = tf.zeros(size)
        copied = _seconds(lambda: tf.identity(source + 1.0))
        bandwidth = 2 * _FLOAT * size / copied
        for op in ops(size):
            with tf.device(device):
                inputs = [tf.constant(value) for value in op.inputs]
            outputs = op.body(*inputs)
            outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
            on_gpu = "GPU" in device.upper()
            error = difference(op, [value.numpy() for value in outputs], on_gpu)
            seconds = _seconds(lambda op=op, inputs=inputs: op.body(*inputs))
            yield Measured(op.name, error, seconds, op.num_bytes / seconds / bandwidth)


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.machine.gpu", description=__doc__)
    options.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    options.add_argument("--size", type=int, default=SIZE, help="number of entries of each vector")
    arguments = options.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    devices = tf.config.list_logical_devices(arguments.device.upper())
    if not devices:
        sys.stdout.write(f"no GPU: TensorFlow {tf.__version__} sees none on this machine\n")
        return 0
    sys.stdout.write(
        f"{devices[0].name}, {arguments.size:,} entries, TensorFlow {tf.__version__}\n"
    )
    failed = 0
    for result in measure(devices[0].name, arguments.size):
        failed += bool(result.error)
        verdict = result.error or "equal to numpy"
        sys.stdout.write(
            f"{result.name:14} {1e3 * result.seconds:9.3f} ms  {result.share:5.2f} of a "
            f"copy's bandwidth  {verdict}\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
