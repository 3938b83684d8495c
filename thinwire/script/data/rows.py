"""Number of rows (examples) in a mini-batch, and its arrays that have one row per example.

A mini-batch may hold arrays that do not have one row per example, for example anchor sizes next to
images and boxes. So the length of an arbitrary array of a mini-batch need not be the number of
rows. The length of the sample weights or of the labels is the number of rows of a mini-batch. If
several labels or sample weights differ in length, the most frequent length in the mini-batch is the
number of rows.

The arrays may be NumPy arrays or tensors of TensorFlow, JAX or PyTorch. The module does not import
TensorFlow: only a script that has imported TensorFlow has tensors whose length is known only when
the step runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras


class _Leaf(NamedTuple):
    """Length and number of axes of an array in a mini-batch, which has at least one axis.

    Attributes:
        length: Length of the array's first axis: a number, or a scalar int64 tensor whose value is
            known only when the step runs.
        rank: Number of axes of an array in a mini-batch.
    """

    length: Any
    rank: int

    @staticmethod
    def of(array: Any) -> _Leaf | None:
        """Return the length and rank of an array; None if the array has no first axis.

        None also for a symbolic tensor of Keras with an unknown length.
        """
        shape = _shape(array)
        if shape == ():
            return None
        if shape is not None and shape[0] is not None:
            return _Leaf(int(shape[0]), len(shape))
        tf = sys.modules.get("tensorflow")
        if tf is None:
            return None
        if isinstance(array, tf.SparseTensor):
            length = array.dense_shape[0]
        elif isinstance(array, tf.RaggedTensor):
            length = tf.cast(array.nrows(), tf.int64)
        else:
            length = tf.shape(array, tf.int64)[0]
        static_length = tf.get_static_value(length)
        # TensorFlow may know the array's rank only when the step runs
        rank = len(shape) if shape else 1
        return _Leaf(length if static_length is None else int(static_length), rank)


def _shape(array: Any) -> tuple[Any, ...] | None:
    """Return the lengths of an array's axes, each None if unknown; None if the rank is unknown."""
    shape: Any = getattr(array, "shape", ())
    if hasattr(shape, "as_list"):  # a shape of TensorFlow, which may not know the rank
        return None if shape.rank is None else tuple(shape.as_list())
    return tuple(shape)


def num_rows(batch: Any) -> Any:
    """Return the number of rows of a mini-batch in Keras' form: x, (x, y) or (x, y, weights).

    The length of the sample weights is the number of rows; without weights the length of the
    labels, without labels the length of x. If the sample weights, or the labels, are several arrays
    of different lengths, the most frequent length in the whole batch is the number of rows. If two
    lengths are equally frequent, the number of rows is a length that varies from step to step, or
    else the length of the array with more axes.

    Returns:
        A number, or a scalar int64 tensor of TensorFlow if the number is known only when the step
        runs. On JAX and PyTorch a step knows all lengths.

    >>> import numpy as np
    >>> num_rows({"anchor_sizes": np.zeros(3), "image": np.zeros((8, 4, 4, 1))})
    8
    """
    try:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    except ValueError:  # the batch does not have a structure that Keras can unpack
        x, y, weights = batch, None, None
    leaves_of_parts = [
        [leaf for leaf in map(_Leaf.of, keras.tree.flatten(part)) if leaf is not None]
        for part in (weights, y, x)
    ]
    everything = [leaf for part in leaves_of_parts for leaf in part]
    candidates = next((part for part in leaves_of_parts if part), [])
    if len(candidates) <= 1:
        return candidates[0].length if candidates else 1
    if all(isinstance(leaf.length, int) for leaf in everything):
        lengths = [leaf.length for leaf in everything]
        return max(candidates, key=lambda leaf: (lengths.count(leaf.length), leaf.rank)).length
    return _most_frequent(candidates, everything)


def _most_frequent(candidates: Sequence[_Leaf], everything: Sequence[_Leaf]) -> Any:
    """Return the one of some array lengths that is most frequent in a batch, in a step's graph."""
    tf = sys.modules["tensorflow"]
    candidate_lengths, lengths = (
        tf.stack([tf.cast(leaf.length, tf.int64) for leaf in leaves])
        for leaves in (candidates, everything)
    )
    votes = tf.reduce_sum(tf.cast(candidate_lengths[:, None] == lengths[None, :], tf.int64), axis=1)
    rank_bound = 1 + max(leaf.rank for leaf in candidates)
    preferred = [leaf.rank + rank_bound * tf.is_tensor(leaf.length) for leaf in candidates]
    return candidate_lengths[tf.argmax(2 * rank_bound * votes + tf.constant(preferred, tf.int64))]


def arrays_of_rows(batch: Any) -> tuple[bool, ...]:
    """Return, for each array of a mini-batch, True if the array has one row for each example.

    In a dataset whose last batch may be shorter, TensorFlow does not know the length of arrays with
    one row per example. So in a dataset whose last batch may be shorter, an array with a static
    length does not have one row per example.

    Args:
        batch: A mini-batch in a form that `num_rows` accepts, or the element_spec of a dataset.
    """
    leaves = [_first_axis(leaf) for leaf in keras.tree.flatten(batch)]
    if None in leaves:
        return tuple(length is None for length in leaves)
    rows = num_rows(batch)
    return tuple(length == rows for length in leaves)


def _first_axis(leaf: Any) -> int | None:
    """Return the length of an array's first axis; None if unknown, -1 if the array has no axis."""
    shape = _shape(leaf)
    if shape == ():
        return -1
    return None if shape is None else shape[0]


def map_rows(take: Callable[[Any], Any], batch: Any, of_rows: Sequence[bool] | None = None) -> Any:
    """Return a mini-batch with `take` applied to the arrays that have one row for each example.

    `map_rows` does not change arrays that do not have one row per example.

    Args:
        take: Function of one array that returns the chosen rows of the array.
        batch: Mini-batch in Keras' form: x, (x, y) or (x, y, weights).
        of_rows: For each array of the batch, True if it has one row per example, as
            `arrays_of_rows` returns. None: computed from this batch, in which an array without a
            row per example may by chance be as long as the batch.

    >>> import numpy as np
    >>> batch = {"sizes": np.arange(3), "x": np.zeros((4, 1))}
    >>> map_rows(lambda array: array[::2], batch)["sizes"]
    array([0, 1, 2])
    """
    pairs = zip(keras.tree.flatten(batch), of_rows or arrays_of_rows(batch), strict=True)
    taken = [take(array) if is_taken else array for array, is_taken in pairs]
    return keras.tree.pack_sequence_as(batch, taken)


def count_rows(batch: Any) -> Any:
    """Return the number of rows of a mini-batch, in a training step.

    Returns:
        With Keras' backend TensorFlow a scalar int32 tensor; with another backend an int, because
        the step knows the shapes of its arrays.
    """
    rows = num_rows(batch)
    if keras.backend.backend() != "tensorflow":
        return rows
    tf = sys.modules["tensorflow"]
    return tf.cast(rows, tf.int32)
