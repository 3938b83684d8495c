"""Compare selection, applying and index coding with their lower limits.

The memory limit is measured in the same run, alternating with the work. Arrays of 1.2 M entries are
taken in rotation from a set larger than the last-level cache. This corresponds to training, where
the forward and backward passes evict the gradient from the cache before the selection reads it.

    python -m bench.machine.kernels
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator

import numpy as np

from bench.table import Row, quartiles, render, times
from thinwire.ops.kernels import Kernels, load_kernels
from thinwire.ops.types import Block, CodedValues
from thinwire.ops.wire.blocks import IndexChooser

RATE = 0.01
SIZES = {"1.2 M": 1_200_000, "25 M": 25_000_000}
UPDATES_BEHIND = 3  # staleness of a push with four workers of equal speed
_ROTATION_ENTRIES = 25_000_000  # total of all copies of one array: 100 MB
_POOL_SURPLUS = 4_000_000  # range of the start positions of gradients in the pool, in entries
_LINE = 16  # entries of a cache line
_REPEATS = 15


def rows(with_tensorflow: bool = True) -> list[Row]:
    """Measure, and return the table's rows, with TensorFlow's ratios if `with_tensorflow`."""
    contenders = [load_kernels("numpy")]
    if with_tensorflow:
        contenders.append(load_kernels("tf"))
    select = [_select_row(name, size, contenders) for name, size in SIZES.items()]
    return [*select, _apply_row(contenders), *_index_rows()]


def _select_row(name: str, size: int, contenders: list[Kernels]) -> Row:
    """Compare an error-feedback step with its memory traffic: read r and g, write r.

    The step is r += g, select, take, r[idx] = 0 with residual r and gradient g. As in the codec, a
    step starts from the previous step's threshold. Residuals are from a long run, because the
    threshold moves with every step at the start of a run. Each gradient is a slice of a random pool
    at a random start: gradients that repeat would add up in the residual and move the threshold.
    """
    rng = np.random.default_rng(0)
    copies = max(1, _ROTATION_ENTRIES // size)
    pool = rng.standard_normal(_ROTATION_ENTRIES + _POOL_SURPLUS, np.float32)
    count = int(RATE * size)
    settled = _settled_residual(contenders[0], rng)
    started = np.tile(settled, -(-size // settled.size))[:size]
    residuals = {body.name: np.tile(started, (copies, 1)) for body in contenders}
    summed = residuals[contenders[0].name].copy()
    hints = {body.name: np.zeros(copies) for body in contenders}

    def gradient() -> np.ndarray:
        first = _LINE * int(rng.integers((pool.size - size) // _LINE))
        return pool[first : first + size]

    def floor() -> None:
        for residual in summed:
            np.add(residual, gradient(), out=residual)

    def step(body: Kernels) -> None:
        hint = hints[body.name]
        for number, residual in enumerate(residuals[body.name]):
            threshold = float(hint[number])
            hint[number] = body.feedback_top_k(residual, gradient(), count, hint=threshold)[2]

    seconds = times([floor, *(lambda b=body: step(b) for body in contenders)], _REPEATS)
    return _timed_row(f"select 1 % with error feedback, {name}", seconds, copies, 2.5)


def _settled_residual(body: Kernels, rng: np.random.Generator) -> np.ndarray:
    """Return the residual that remains after many steps with random gradients."""
    residual, hint = np.zeros(100_000, np.float32), 0.0
    for _ in range(200):
        gradient = rng.standard_normal(residual.size, np.float32)
        hint = body.feedback_top_k(residual, gradient, int(RATE * residual.size), hint=hint)[2]
    return residual


def _apply_row(contenders: list[Kernels]) -> Row:
    """Compare a damped sparse update with the traffic of the cache lines it must touch.

    The work computes each entry's staleness from the updates since the push's base version, damps
    the entries and applies them.
    """
    size = SIZES["25 M"]
    count = int(RATE * size)
    rng = np.random.default_rng(1)
    theta = rng.standard_normal(size, np.float32)
    other = rng.standard_normal(size, np.float32)
    values = rng.standard_normal(count, np.float32)
    *window, indices = (
        contenders[0].random_k(size, count, rng).astype(dtype)
        for dtype in [np.int32] * UPDATES_BEHIND + [np.int64]
    )
    scratch = np.zeros(size, np.uint16)

    def stream() -> None:
        np.add(theta, other, out=theta)

    def apply(body: Kernels) -> None:
        damped = values * body.damp(body.hits(window, indices, scratch))
        body.apply_sparse(theta, indices, damped, 0.02)

    seconds = times([stream, *(lambda b=body: apply(b) for body in contenders)], _REPEATS)
    line = 64
    scatter = 8 + 4 + 2 * line  # bytes: index, value, the weight's cache line read and written
    # Bytes: one counter's line read; per missed update an index, and a counter's line incremented.
    staleness = line + UPDATES_BEHIND * (4 + 2 * line)
    # Scale the stream's time by the bytes that the update must move / the bytes of the stream.
    share = count * (scatter + staleness) / (12 * size)
    seconds[0] = [share * duration for duration in seconds[0]]
    row = _timed_row(f"apply 1 % with per-entry staleness {UPDATES_BEHIND}, 25 M", seconds, 1, 2.0)
    bare = row.ratio * (scatter + staleness) / scatter
    note = f"{row.note + '; ' if row.note else ''}lines of the scatter alone: {bare:.1f}"
    return dataclasses.replace(row, note=note)


def _timed_row(work: str, seconds: list[list[float]], copies: int, goal: float) -> Row:
    """Return a row from the seconds of all calls: [floor, numpy] or [floor, numpy, TensorFlow]."""
    floor, ours, *tensorflow = (
        statistics.median(durations) / copies * 1e3 for durations in seconds
    )
    note = "".join(f"tf.function: {other / floor:.1f}" for other in tensorflow)
    ratios = quartiles(durations / least for least, durations in zip(*seconds[:2], strict=True))
    return Row(work, ours, "ms", floor, ours / floor, goal, "lower", note, ratios)


def _index_rows() -> Iterator[Row]:
    size = SIZES["1.2 M"]
    for rate in (0.01, 0.001):
        count = int(rate * size)
        indices = load_kernels("numpy").random_k(size, count, np.random.default_rng(2))
        values = CodedValues("float32", np.zeros(count, np.float32))
        coded = IndexChooser().encode(Block(0, size, indices, values))
        ours, limit = len(coded.index_bytes) / count, entropy_bytes(size, count) / count
        work = f"index bytes at {rate:.1%}, random positions"
        note = coded.coding.name.lower()
        yield Row(work, ours, "B/entry", limit, ours / limit, 1.10, "lower", note)


def entropy_bytes(size: int, kept: int) -> float:
    """Return log2 of the number of ways to choose `kept` of `size` positions, in bytes."""
    ways = math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)
    return ways / math.log(2) / 8


if __name__ == "__main__":
    sys.stdout.write(render(rows()))
