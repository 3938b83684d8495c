"""Find out whether a value is a sum over the rows of a mini-batch or a mean over them.

The value is computed for the batch, and for the batch with each row repeated. A mean stays what it
is, and a sum doubles. Where it does neither, a third try shows whether it is the total of both:
then it grows by equal amounts.

Dropout and the like would draw other noise for more rows. So Keras' random functions draw for the
batch, and repeat what they drew.
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

#: A sum in float32 over many rows may differ by so much, relative to its size.
_ROUNDING = 1e-3
#: Keras' random functions by their first argument: a shape, or one value for each row.
_BY_SHAPE = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")
_BY_ROWS = ("dropout", "categorical")


class RowKind(enum.Enum):
    """How a value depends on the number of rows."""

    UNDECIDED = enum.auto()  # nothing has shown it so far
    FIXED = enum.auto()  # a mean over the rows, or the same for any rows
    SUM = enum.auto()  # over the rows
    MIXED = enum.auto()  # the total of both
    OTHER = enum.auto()  # something else, such as a loss that compares rows with each other


def rows_of(data: Any) -> int | None:
    """Return the rows of a mini-batch; None: they are not known while a graph is traced."""
    rows = num_rows(data)
    return rows if isinstance(rows, int) else None


def repeated(data: Any, repeats: int) -> Any:
    """Return a mini-batch with all of its rows so often, one whole after the other."""

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(0, [leaf] * repeats)
        return tf.concat([leaf] * repeats, 0)

    return data if repeats == 1 else map_rows(repeat, data)


def kinds_of(evaluate: Callable[[Any, bool], Sequence[float]], data: Any) -> list[RowKind]:
    """Return the kinds of some values of a mini-batch.

    Args:
        evaluate: Returns the values of a mini-batch; if its second argument is true, at another
            place, for a value that happens to be 0.
        data: The mini-batch.

    Returns:
        A kind for each value; nothing if they cannot be computed for repeated rows.
    """
    try:
        kinds = _kinds_at(lambda rows: evaluate(rows, False), data)
        if RowKind.UNDECIDED in kinds:
            others = _kinds_at(lambda rows: evaluate(rows, True), data)
            pairs = zip(kinds, others, strict=True)
            kinds = [other if kind is RowKind.UNDECIDED else kind for kind, other in pairs]
    except Exception as error:  # noqa: BLE001 - whatever a loss of the script does
        logging.info("a loss cannot be computed for repeated rows: %r", error)
        return []
    return [RowKind.OTHER if kind is RowKind.UNDECIDED else kind for kind in kinds]


def _kinds_at(evaluate: Callable[[Any], Sequence[float]], data: Any) -> list[RowKind]:
    def values(repeats: int) -> Sequence[float]:
        with _same_noise(rows_of(data), repeats):
            return evaluate(repeated(data, repeats))

    once, twice = values(1), values(2)
    kinds = [_kind(*pair, math.nan) for pair in zip(once, twice, strict=True)]
    if RowKind.OTHER in kinds:
        kinds = [_kind(*each) for each in zip(once, twice, values(3), strict=True)]
    return kinds


def moved(values: Any) -> Any:
    """Return floats that differ a little from these, by the same amounts at each call."""
    if not (tf.is_tensor(values) and values.dtype.is_floating):
        return values
    seed = tf.constant([7, 1])
    noise = tf.random.stateless_uniform(tf.shape(values)[1:], seed, 0.1, 0.2, tf.float32)
    return values + tf.cast(noise, values.dtype)


def _kind(once: float, twice: float, thrice: float) -> RowKind:
    """Return the kind of a value by those for rows that are repeated.

    >>> [_kind(2.0, twice, thrice).name for twice, thrice in ((2, 2), (4, 6), (3, 4), (3, 9))]
    ['FIXED', 'SUM', 'MIXED', 'OTHER']
    """
    return _kind_of_vectors(*(np.array([each], np.float64) for each in (once, twice, thrice)))


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
    """Return the kind of a step's gradients.

    Args:
        evaluate: Returns the gradients of a mini-batch whose rows are repeated so often.
        rows: Number of rows in the mini-batch.

    Returns:
        The kind; `OTHER` if the step cannot be taken with repeated rows.
    """

    def joined(repeats: int) -> Float64:
        with _same_noise(rows, repeats):
            gradients = [each for each in evaluate(repeats) if each is not None]
        parts = [np.ravel(tf.convert_to_tensor(each).numpy()) for each in gradients]
        return np.concatenate(parts, dtype=np.float64) if parts else np.zeros(0)

    try:
        once, twice = joined(1), joined(2)
        kind = _kind_of_vectors(once, twice, np.full_like(once, math.nan))
        if kind is RowKind.OTHER:
            kind = _kind_of_vectors(once, twice, joined(3))
    except Exception as error:  # noqa: BLE001 - whatever a train_step of the script does
        logging.info("the train_step cannot be taken with repeated rows: %r", error)
        return RowKind.OTHER
    return RowKind.OTHER if kind is RowKind.UNDECIDED else kind


class _Noise(threading.local):
    """The mini-batch that the random functions of one thread draw for.

    Attributes:
        rows: Its rows before they were repeated; None: nothing is repeated.
        repeats: How often each row is there.
    """

    rows: int | None = None
    repeats = 1


_NOISE = _Noise()


@contextlib.contextmanager
def _same_noise(rows: int | None, repeats: int) -> Iterator[None]:
    """Let Keras draw the same noise for a row each time that it is repeated, in this thread."""
    _watch_noise()
    before = _NOISE.rows, _NOISE.repeats
    _NOISE.rows, _NOISE.repeats = rows, repeats
    try:
        yield
    finally:
        _NOISE.rows, _NOISE.repeats = before


@functools.cache
def _watch_noise() -> None:
    """Let Keras' random functions look at what they draw for, once for the process."""
    for name in (*_BY_SHAPE, *_BY_ROWS):
        setattr(backend.random, name, _repeating(getattr(backend.random, name), name in _BY_SHAPE))


def _repeating(alone: Callable[..., Any], is_by_shape: bool) -> Callable[..., Any]:
    first_name = next(iter(inspect.signature(alone).parameters))  # given by position or by name

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
