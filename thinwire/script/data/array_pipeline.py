"""Gathers the batches of arrays by a tf.data pipeline, for Keras' backend TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras import tree
from keras.src.trainers.data_adapters import array_slicing

from thinwire.script.data.row_order import RowOrder
from thinwire.script.data.windows import as_traced, count_epochs, cut_batches


def gather_by_pipeline(arrays: Any, order: RowOrder) -> Any:
    """Return a tf.data.Dataset of this worker's batches of a script's arrays.

    Args:
        arrays: Arrays [N, ...] in any nesting, which Keras can slice.
        order: Order of the rows in each epoch, and their division among workers.
    """
    arrays = tree.lists_to_tuples(
        array_slicing.convert_to_sliceable(arrays, target_backend="tensorflow")
    )
    window, num_windows = order.window, order.num_windows
    # A model may need a static batch size. As in Keras, the batch size is static if all batches are
    # full.
    shape = [None if order.num_rows % order.batch_size else order.batch_size]

    @as_traced
    def windows_of_epoch(epoch: Any) -> Any:
        numbers = tf.numpy_function(lambda number: order.of_epoch(int(number)), [epoch], tf.int64)

        @as_traced
        def window_at(number: Any) -> Any:
            return tf.ensure_shape(numbers[number * window : (number + 1) * window], [None])

        return tf.data.Dataset.range(num_windows).map(window_at)

    fixed_length = tf.data.experimental.assert_cardinality(num_windows)
    part = count_epochs().flat_map(windows_of_epoch).apply(fixed_length)
    if order.is_dealt:
        part = cut_batches(part, order.place, rest=order.num_remaining, is_repeated=False)
    part = part.map(as_traced(lambda numbers: tf.ensure_shape(numbers, shape)))
    batches = tf.data.Dataset.zip((part, tf.data.Dataset.from_tensors(arrays).repeat())).map(
        as_traced(_gather), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    return batches.prefetch(tf.data.AUTOTUNE)


def _gather(rows: Any, arrays: Any) -> Any:
    """Return the rows with the given numbers from each array in a structure."""

    def gather(array: Any) -> Any:
        if isinstance(array, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(array, rows)
        if isinstance(array, list | tuple | dict):
            return None  # `traverse` descends into a container, which is not an array
        return tf.gather(array, rows, axis=0) if tf.is_tensor(array) else array

    return tree.traverse(gather, arrays)
