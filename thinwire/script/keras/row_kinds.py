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
import enum
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging
from keras.src import backend

from thinwire.script.data.rows import map_rows, num_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

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

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(0, [leaf] * repeats)
        return tf.concat([leaf] * repeats, 0)

    return data if repeats == 1 else map_rows(repeat, data)


def kinds_of(evaluate: Callable[[Any, bool], Sequence[float]], data: Any) -> list[RowKind]:
    """Return for each of several losses if it is a sum or a mean over a mini-batch's rows.

    Args:
        evaluate: Function of a mini-batch and a bool that returns the losses. If the bool is True,
            the losses are computed at slightly changed predictions or weights, because a loss may
            be 0 by chance.
        data: Mini-batch whose rows are repeated to compare the losses.

    Returns:
        A kind for each loss; an empty list if the losses cannot be computed for repeated rows.
    """
    try:
        kinds = _kinds_at(lambda rows: evaluate(rows, False), data)
        if RowKind.UNDECIDED in kinds:
            moved_kinds = _kinds_at(lambda rows: evaluate(rows, True), data)
            pairs = zip(kinds, moved_kinds, strict=True)
            kinds = [other if kind is RowKind.UNDECIDED else kind for kind, other in pairs]
    except Exception as error:  # noqa: BLE001 - a script's loss may raise any error
        logging.info("a loss of the model cannot be computed for repeated rows: %r", error)
        return []
    return [RowKind.OTHER if kind is RowKind.UNDECIDED else kind for kind in kinds]


def _kinds_at(evaluate: Callable[[Any], Sequence[float]], data: Any) -> list[RowKind]:
    def values(repeats: int) -> Sequence[float]:
        with _same_noise(rows_of(data), repeats):
            return evaluate(repeated(data, repeats))

    once, twice = values(1), values(2)
    kinds = [_kind(*pair, math.nan) for pair in zip(once, twice, strict=True)]
    if RowKind.OTHER in kinds:
        kinds = [
            _kind(*values_of_loss) for values_of_loss in zip(once, twice, values(3), strict=True)
        ]
    return kinds


def moved(values: Any) -> Any:
    """Add small noise, equal in each call, to a float tensor; return other values unchanged."""
    if not (tf.is_tensor(values) and values.dtype.is_floating):
        return values
    seed = tf.constant([7, 1])
    noise = tf.random.stateless_uniform(tf.shape(values)[1:], seed, 0.1, 0.2, tf.float32)
    return values + tf.cast(noise, values.dtype)


def _kind(once: float, twice: float, thrice: float) -> RowKind:
    """Return if a loss is a sum or a mean, given its values for each row once, twice and thrice.

    >>> [_kind(2.0, twice, thrice).name for twice, thrice in ((2, 2), (4, 6), (3, 4), (3, 9))]
    ['FIXED', 'SUM', 'MIXED', 'OTHER']
    """
    return _kind_of_vectors(*(np.array([value], np.float64) for value in (once, twice, thrice)))


def _kind_of_vectors(once: Float64, twice: Float64, thrice: Float64) -> RowKind:
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


def kind_of_gradients(evaluate: Callable[[int], Sequence[Any]], rows: int | None) -> RowKind:
    """Return if a step's gradients are sums or means over the rows of a mini-batch.

    Args:
        evaluate: Function of a number n that returns the gradients of a mini-batch in which each
            row occurs n times.
        rows: Number of rows in the mini-batch; None if unknown.

    Returns:
        The kind of all gradients together; `OTHER` if the step cannot be taken with repeated rows.
    """

    def joined(repeats: int) -> Float64:
        with _same_noise(rows, repeats):
            gradients = [gradient for gradient in evaluate(repeats) if gradient is not None]
        parts = [np.ravel(tf.convert_to_tensor(gradient).numpy()) for gradient in gradients]
        return np.concatenate(parts, dtype=np.float64) if parts else np.zeros(0)

    try:
        once, twice = joined(1), joined(2)
        kind = _kind_of_vectors(once, twice, np.full_like(once, math.nan))
        if kind is RowKind.OTHER:
            kind = _kind_of_vectors(once, twice, joined(3))
    except Exception as error:  # noqa: BLE001 - a script's train_step may raise any error
        logging.info("the model's train_step cannot run with a batch of repeated rows: %r", error)
        return RowKind.OTHER
    return RowKind.OTHER if kind is RowKind.UNDECIDED else kind


class _Noise(threading.local):
    """Sizes of the mini-batch for which one thread's Keras random functions draw noise.

    Attributes:
        rows: Number of rows of the batch before its rows were repeated; None outside of a trial
            with repeated rows.
        repeats: Number of times that each row occurs in the batch.
    """

    rows: int | None = None
    repeats = 1


_NOISE = _Noise()


@contextlib.contextmanager
def _same_noise(rows: int | None, repeats: int) -> Iterator[None]:
    """Let Keras draw the same noise for all copies of a mini-batch's row, in this thread."""
    _watch_noise()
    before = _NOISE.rows, _NOISE.repeats
    _NOISE.rows, _NOISE.repeats = rows, repeats
    try:
        yield
    finally:
        _NOISE.rows, _NOISE.repeats = before


@functools.cache
def _watch_noise() -> None:
    """Patch Keras' random functions to repeat noise for repeated rows, once per process."""
    for name in (*_BY_SHAPE, *_BY_ROWS):
        setattr(backend.random, name, _repeating(getattr(backend.random, name), name in _BY_SHAPE))


def _repeating(alone: Callable[..., Any], is_by_shape: bool) -> Callable[..., Any]:
    # name of this argument of Keras' random function in a call by keyword
    first_name = next(iter(inspect.signature(alone).parameters))

    @functools.wraps(alone)
    def draw(*others: Any, **keywords: Any) -> Any:
        rows, repeats = _NOISE.rows, _NOISE.repeats
        if rows is None or repeats == 1:
            return alone(*others, **keywords)
        first = others[0] if others else keywords[first_name]
        sizes = first if is_by_shape else first.shape
        if not len(sizes) or int(sizes[0]) != rows * repeats:
            return alone(*others, **keywords)
        part = (rows, *sizes[1:]) if is_by_shape else first[:rows]
        if others:
            once = alone(part, *others[1:], **keywords)
        else:
            once = alone(**(keywords | {first_name: part}))
        return tf.concat([once] * repeats, 0)

    return draw
