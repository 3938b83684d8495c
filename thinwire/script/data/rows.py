"""The rows of a mini-batch: how many there are, and which of its arrays have one of each.

A batch may hold arrays without rows, such as sizes of anchors next to images and boxes. So no
single array shows how many rows there are: weights of rows and labels do, and else most arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array of a batch, with a first axis.

    Attributes:
        length: Length of that axis: a number, or a scalar int64 tensor known in the step.
        rank: Number of its axes.
    """

    length: Any
    rank: int

    @property
    def is_known(self) -> bool:
        """Whether the length is a number."""
        return isinstance(self.length, int)

    @staticmethod
    def of(array: Any) -> _Leaf | None:
        """Return what there is to know of an array; None: it has no first axis."""
        shape = getattr(array, "shape", None)
        if array is None or shape is None:
            return None
        if isinstance(array, tf.RaggedTensor | tf.SparseTensor):
            rows = array.nrows() if isinstance(array, tf.RaggedTensor) else array.dense_shape[0]
            known = shape[0] if shape.rank else None
            known = tf.get_static_value(rows) if known is None else known
            rank = shape.rank or 1
            return _Leaf(tf.cast(rows, tf.int64) if known is None else int(known), rank)
        if getattr(shape, "rank", 0) is None:  # TensorFlow does not know it before the step
            return _Leaf(tf.shape(array, tf.int64)[0], 1)
        if not len(shape):
            return None
        length = tf.shape(array, tf.int64)[0] if shape[0] is None else int(shape[0])
        return _Leaf(length, len(shape))


def num_rows(batch: Any) -> Any:
    """Return the number of rows of a mini-batch, as Keras takes it: x, (x, y) or (x, y, weights).

    The weights of rows decide, without them the labels, and without labels x. Where their arrays
    differ in length, most arrays of the batch decide. If that leaves two lengths, the one counts
    that differs from step to step, and then the length of the array with more axes.

    Returns:
        A number; where only the step knows it a scalar int64 tensor.

    >>> import numpy as np
    >>> num_rows({"anchor_sizes": np.zeros(3), "image": np.zeros((8, 4, 4, 1))})
    8
    """
    try:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    except ValueError:  # a structure of the script's own
        x, y, weights = batch, None, None
    found = [
        [leaf for leaf in map(_Leaf.of, tf.nest.flatten(part)) if leaf is not None]
        for part in (weights, y, x)
    ]
    everything = [leaf for part in found for leaf in part]
    candidates = next((part for part in found if part), [])
    if len(candidates) <= 1:
        return candidates[0].length if candidates else 1
    if all(leaf.is_known for leaf in everything):
        lengths = [leaf.length for leaf in everything]
        return max(candidates, key=lambda leaf: (lengths.count(leaf.length), leaf.rank)).length
    return _most_frequent(candidates, everything)


def _most_frequent(candidates: Sequence[_Leaf], everything: Sequence[_Leaf]) -> Any:
    """Return the length, within the graph of a step."""
    own, lengths = (
        tf.stack([tf.cast(leaf.length, tf.int64) for leaf in leaves])
        for leaves in (candidates, everything)
    )
    votes = tf.reduce_sum(tf.cast(own[:, None] == lengths[None, :], tf.int64), axis=1)
    most = 1 + max(leaf.rank for leaf in candidates)
    preferred = [leaf.rank + most * (not leaf.is_known) for leaf in candidates]
    return own[tf.argmax(2 * most * votes + tf.constant(preferred, tf.int64))]


def arrays_of_rows(batch: Any) -> tuple[bool, ...]:
    """Return, of each array of a mini-batch, whether it has a row of each example.

    The number of rows is open where a last batch may be shorter. An array whose length is known all
    the same has others.

    Args:
        batch: As `num_rows` takes it, or its spec in a data set.
    """
    leaves = [_first_axis(leaf) for leaf in tf.nest.flatten(batch)]
    if None in leaves:
        return tuple(length is None for length in leaves)
    rows = num_rows(batch)
    return tuple(length == rows for length in leaves)


def _first_axis(leaf: Any) -> int | None:
    """Return the length of an array's first axis; None: it is open; -1: there is no axis."""
    shape = tf.TensorShape(getattr(leaf, "shape", ()))
    if shape.rank == 0:
        return -1
    return None if shape.rank is None else shape[0]


def map_rows(take: Callable[[Any], Any], batch: Any, of_rows: Sequence[bool] | None = None) -> Any:
    """Return a mini-batch with `take` applied to the arrays that have a row of each example.

    What is no row of the batch stays as it is.

    Args:
        take: Function of an array that returns its chosen rows.
        batch: As `num_rows` takes it.
        of_rows: As `arrays_of_rows` has it of the batch's spec, or of another batch, whose number
            of rows is another one; not given: of this one, whose lengths may agree by chance.

    >>> import numpy as np
    >>> batch = {"sizes": np.arange(3), "x": np.zeros((4, 1))}
    >>> map_rows(lambda array: array[::2], batch)["sizes"]
    array([0, 1, 2])
    """
    pairs = zip(tf.nest.flatten(batch), of_rows or arrays_of_rows(batch), strict=True)
    taken = [take(array) if is_taken else array for array, is_taken in pairs]
    return tf.nest.pack_sequence_as(batch, taken)


def count_rows(batch: Any) -> Any:
    """Return `num_rows` as a scalar tensor, for the graph of a step."""
    return tf.cast(num_rows(batch), tf.int32)
