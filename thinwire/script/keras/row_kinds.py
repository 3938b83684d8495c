"""Finds out if a loss is a sum over the rows of a mini-batch or a mean over the rows.

To distinguish a sum from a mean, the loss is computed for a batch, and for the batch with each row
twice. If each row of the batch occurs twice, a loss that is a mean stays equal, and a loss that is
a sum doubles. A loss that neither stays equal nor doubles with doubled rows is computed again with
each row three times. If the loss is the total of a sum and a mean, it grows by equal amounts with
each repetition of the rows.

Dropout would draw different noise for the repeated rows of a batch. So Keras' random functions draw
noise once for the original rows, and repeat it for the repeated rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging
from keras import ops
from keras.src import backend as of_keras

from thinwire.script.backends.present import backend
from thinwire.script.data.rows import map_rows, num_rows

#: Allowed rounding error of a float32 sum over many rows, relative to the sum.
_ROUNDING = 1e-3
#: Names of Keras' random functions. The first argument of a function in `_BY_SHAPE` is a shape. The
#: first argument of a function in `_BY_ROWS` is a tensor with one entry for each row.
_BY_SHAPE = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")
_BY_ROWS = ("dropout", "categorical")


class RowKind(enum.Enum):
    """Kind of dependence of a loss or gradient on a mini-batch's rows, for example a sum."""

    # kind of a loss that is not known, because its value was 0, infinite or NaN, or was not
    # computed
    UNDECIDED = enum.auto()
    # kind of a loss that is a mean over the rows, or does not depend on the rows
    FIXED = enum.auto()
    SUM = enum.auto()  # kind of a loss that is a sum over the rows
    MIXED = enum.auto()  # kind of a loss that is the total of a sum and a mean over the rows
    # kind of a loss that is no sum and no mean, for example one that compares rows
    OTHER = enum.auto()


def rows_of(data: Any) -> int | None:
    """Return the number of rows of a mini-batch; None if a trace does not know the number."""
    rows = num_rows(data)
    return rows if isinstance(rows, int) else None


def repeated(data: Any, repeats: int) -> Any:
    """Return a mini-batch that consists of `repeats` copies of a whole mini-batch."""
    if repeats == 1:
        return data
    return map_rows(lambda leaf: backend().repeat_rows(leaf, repeats), data)


def kinds_of(rows: int | None, *attempts: Callable[[int], Sequence[Any]]) -> list[RowKind]:
    """Return for each of several losses or gradients if it is a sum or a mean over rows.

    Args:
        rows: Number of rows in the mini-batch; None if unknown.
        attempts: Functions of a number n that return the losses or gradients of a mini-batch in
            which each row occurs n times. A later function computes them at slightly changed
            predictions or weights, and is called only if a value of the functions before it may be
            0 by chance.

    Returns:
        A kind for each value; an empty list if the values cannot be computed for repeated rows.
    """
    kinds: list[RowKind] = []
    try:
        for evaluate in attempts:
            if not kinds or RowKind.UNDECIDED in kinds:
                found = _kinds_at(rows, evaluate)
                pairs = zip(kinds or found, found, strict=True)
                kinds = [other if kind is RowKind.UNDECIDED else kind for kind, other in pairs]
    except Exception as error:  # noqa: BLE001 - a script's loss may raise any error
        logging.info("the model cannot compute a batch of repeated rows: %r", error)
        return []
    return [RowKind.OTHER if kind is RowKind.UNDECIDED else kind for kind in kinds]


def _kinds_at(rows: int | None, evaluate: Callable[[int], Sequence[Any]]) -> list[RowKind]:
    def values(repeats: int) -> Sequence[Any]:
        with _same_noise(rows, repeats):
            return evaluate(repeats)

    once, twice = values(1), values(2)
    kinds = [_kind(*pair, math.nan) for pair in zip(once, twice, strict=True)]
    if RowKind.OTHER in kinds:
        kinds = [_kind(*three) for three in zip(once, twice, values(3), strict=True)]
    return kinds


def moved(values: Any) -> Any:
    """Add small noise, equal in each call, to a float tensor; return other values unchanged."""
    if not (ops.is_tensor(values) and "float" in of_keras.standardize_dtype(values.dtype)):
        return values
    # not by Keras' random functions, which repeat noise for repeated rows here
    noise = np.random.default_rng(7).uniform(0.1, 0.2, ops.shape(values)[1:])
    return values + ops.cast(noise, values.dtype)


def _kind(once: Any, twice: Any, thrice: Any) -> RowKind:
    """Return the kind of a number or vector, given its values for each row once, twice and thrice.

    >>> [_kind(2.0, twice, thrice).name for twice, thrice in ((2, 2), (4, 6), (3, 4), (3, 9))]
    ['FIXED', 'SUM', 'MIXED', 'OTHER']
    """
    once, twice, thrice = (np.asarray(value, np.float64) for value in (once, twice, thrice))
    size = float(np.linalg.norm(once))
    if not (
        size and once.shape == twice.shape and math.isfinite(size) and np.isfinite(twice).all()
    ):
        return RowKind.UNDECIDED
    for change, kind in (
        (twice - once, RowKind.FIXED),
        (twice - 2 * once, RowKind.SUM),
        (thrice - 2 * twice + once, RowKind.MIXED),
    ):
        if np.linalg.norm(change) <= _ROUNDING * size:
            return kind
    return RowKind.OTHER


#: Number of rows of the mini-batch for which Keras' random functions draw noise, and number of
#: times that each row occurs. The number of rows is None outside of a trial with repeated rows.
_NOISE: contextvars.ContextVar[tuple[int | None, int]] = contextvars.ContextVar(
    "noise", default=(None, 1)
)


@contextlib.contextmanager
def _same_noise(rows: int | None, repeats: int) -> Iterator[None]:
    """Let Keras draw the same noise for all copies of a mini-batch's row, in this thread."""
    _watch_noise()
    before = _NOISE.set((rows, repeats))
    try:
        yield
    finally:
        _NOISE.reset(before)


@functools.cache
def _watch_noise() -> None:
    """Patch Keras' random functions to repeat noise for repeated rows, once per process."""
    for name in (*_BY_SHAPE, *_BY_ROWS):
        alone = getattr(of_keras.random, name)
        setattr(of_keras.random, name, _repeating(alone, name in _BY_SHAPE))


def _repeating(alone: Callable[..., Any], is_by_shape: bool) -> Callable[..., Any]:
    signature = inspect.signature(alone)

    @functools.wraps(alone)
    def draw(*others: Any, **keywords: Any) -> Any:
        rows, repeats = _NOISE.get()
        if rows is None or repeats == 1:
            return alone(*others, **keywords)
        given = signature.bind(*others, **keywords).arguments
        name, first = next(iter(given.items()))
        sizes = first if is_by_shape else first.shape
        if not len(sizes) or int(sizes[0]) != rows * repeats:
            return alone(*others, **keywords)
        part = (rows, *sizes[1:]) if is_by_shape else first[:rows]
        return ops.concatenate([alone(**(given | {name: part}))] * repeats, 0)

    return draw
