"""Divides the elements of a tf.data.Dataset, or the rows of its batches, among workers.

A window is a number of successive elements, or one batch, of which each worker gets a random part.
The seed by which a window of elements is divided contains the numbers of the epoch and of the
window. The dataset of a worker's part counts epochs and windows while it is iterated. An epoch is
one pass over the divided elements, so each repetition of a later `repeat()` is an epoch. All
workers count the same epochs and windows if they iterate over the dataset equally often.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from thinwire.script.data.place import UnfilledRounds, WorkerPlace
from thinwire.script.data.rows import arrays_of_rows, map_rows

_Dataset = Any  # type of a tf.data.Dataset: TensorFlow has no type annotations
_Function = Callable[..., Any]

#: Marks a function so that TensorFlow traces it without AutoGraph.
as_traced: Callable[[_Function], _Function] = tf.autograph.experimental.do_not_convert


def count_epochs() -> _Dataset:
    """Return a tf.data.Dataset of one number: how often the dataset has been iterated before."""
    numbers = itertools.count()

    @as_traced
    def begin(_: Any) -> Any:
        # Count a pass over the data when its element is read, not when an iterator is made: Keras
        # makes iterators that it never reads, and their number differs between workers.
        epoch = tf.numpy_function(lambda: np.int64(next(numbers)), [], tf.int64)
        return tf.ensure_shape(epoch, [])

    return tf.data.Dataset.from_tensors(0).map(begin)


def deal_elements(
    whole: _Dataset,
    window: int,
    place: WorkerPlace,
    *,
    drops_rest: bool,
    is_repeated: bool,
    unfilled: UnfilledRounds | None = None,
) -> _Dataset:
    """Return a dataset of this worker's elements of a given dataset.

    A window of elements is read in full before it is divided among the workers, because the last
    window may be shorter than the other windows.

    Args:
        whole: Dataset with the same elements in the same order on every worker.
        window: Number of successive dataset elements that are divided among all workers at a time.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
        drops_rest: True to drop the last elements of the dataset if they do not fill a window.
        is_repeated: True if one epoch of `fit` may continue into the next pass over the training
            data.
        unfilled: Counter of windows in which this worker gets no element; None: do not count such
            windows.
    """

    def owned(epoch: Any, number: Any, num_elements: Any) -> Any:
        is_own = np.zeros(int(num_elements), np.bool_)
        if drops_rest and num_elements < window:
            return is_own
        if is_repeated and place.lacks_rows(int(num_elements)):
            raise _short(place, number, num_elements)
        is_own[place.positions(int(num_elements), int(epoch), int(number))] = True
        if unfilled is not None and not is_own.any():
            unfilled.note()
        return is_own

    @as_traced
    def own_elements(number: Any, elements: _Dataset) -> _Dataset:
        epochs = elements.take(1).map(as_traced(lambda epoch, _: epoch))
        answers = [epochs.get_single_element(), number, elements.cardinality()]
        flags = tf.ensure_shape(tf.numpy_function(owned, answers, tf.bool), [None])
        flagged = tf.data.Dataset.zip((elements, tf.data.Dataset.from_tensor_slices(flags)))
        mine = flagged.filter(as_traced(lambda element, is_own: is_own))
        return mine.map(as_traced(lambda element, is_own: element[1][1]))

    numbered = tf.data.Dataset.zip((_epoch_of_each(), whole.enumerate()))
    part = numbered.group_by_window(
        as_traced(lambda epoch, element: element[0] // window), own_elements, window
    )
    total = int(whole.cardinality())
    if total >= 0:
        dropped = total % window if drops_rest else 0
        total = place.dealt_rows(total - dropped, window)[place.worker - 1]
    return _with_length(part, total)


def cut_batches(
    whole: _Dataset,
    place: WorkerPlace,
    *,
    rest: int | None,
    is_repeated: bool,
    unfilled: UnfilledRounds | None = None,
) -> _Dataset:
    """Return a dataset of batches in which each batch has only this worker's rows.

    Args:
        whole: Dataset with the same batches in the same order on every worker.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
        rest: Number of rows in a short last batch; 0 if all batches are full, None if unknown. Only
            the last batch of an epoch may have fewer rows than the run has workers; a worker
            without rows then has one step fewer.
        is_repeated: True if one epoch of `fit` may continue into the next pass over the training
            data.
        unfilled: Counter of batches in which this worker gets no row; None: do not count such
            batches.
    """
    # maps an epoch to the number of rows in its short batch, which must be the last batch
    short: dict[int, int] = {}

    def positions(epoch: Any, number: Any, num_rows: Any) -> Any:
        if int(epoch) in short:
            raise _short(place, number - 1, short[int(epoch)])
        if num_rows < place.num_workers:
            if is_repeated:
                raise _short(place, number, num_rows)
            short[int(epoch)] = int(num_rows)
            if unfilled is not None and not place.num_dealt(int(num_rows)):
                unfilled.note()
        return place.positions(int(num_rows), int(epoch), int(number))

    @as_traced
    def cut(epoch: Any, numbered: Any) -> Any:
        number, batch = numbered
        taken = tf.numpy_function(positions, [epoch, number, rows_in(batch)], tf.int64)
        return take_rows_of(batch, tf.ensure_shape(taken, [None]))

    part = tf.data.Dataset.zip((_epoch_of_each(), whole.enumerate())).map(cut)
    total, may_be_empty = int(whole.cardinality()), rest is None or 0 < rest < place.num_workers
    if may_be_empty:
        part = part.filter(as_traced(lambda *batch: rows_in(batch) > 0))
    if rest is None:
        return part
    return _with_length(part, total - (total > 0 and may_be_empty and not place.num_dealt(rest)))


def read_windows(
    windows: Callable[[], Iterator[Any]], sample: Any, total: int, size: int, place: WorkerPlace
) -> _Dataset:
    """Return a dataset of batches of this worker's rows from windows that a generator reads.

    Args:
        windows: Function that begins a pass over the data and returns its windows, as structures of
            arrays [rows, ...].
        sample: A window with at least one row.
        total: Number of rows in one pass over the data.
        size: Number of rows in a full window.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
    """
    signature = tf.nest.map_structure(
        lambda column: tf.TensorSpec((None, *column.shape[1:]), tf.as_dtype(column.dtype)), sample
    )
    batches = tf.data.Dataset.from_generator(windows, output_signature=signature)
    batches = batches.apply(tf.data.experimental.assert_cardinality(-(-total // size)))
    if place.is_shared:
        batches = cut_batches(batches, place, rest=total % size, is_repeated=False)
    return batches.prefetch(1)


def _with_length(dataset: _Dataset, length: int) -> _Dataset:
    """Return a dataset with an assertion of its number of elements, if the number is known."""
    if length == tf.data.UNKNOWN_CARDINALITY:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def _short(place: WorkerPlace, number: Any, num_rows: Any) -> Exception:
    where = f"batch {int(number) + 1} of the tf.data.Dataset given to fit"
    return place.short_batch(int(num_rows), where)


def _epoch_of_each() -> _Dataset:
    """Return an endless tf.data.Dataset of one number: how often it has been iterated before."""
    return count_epochs().flat_map(
        as_traced(lambda epoch: tf.data.Dataset.from_tensors(epoch).repeat())
    )


# -- rows of a batch -------------------------------------------------------------------------------


def rows_in(batch: Any, of_rows: Sequence[bool] | None = None) -> Any:
    """Return the number of rows of a batch as a scalar int64 tensor.

    Args:
        batch: Mini-batch of tensors, ragged tensors and sparse tensors, in any nesting.
        of_rows: For each array of the batch, True if it has one row per example, as
            `arrays_of_rows` returns; None: computed from `batch`.
    """
    kinds = of_rows or arrays_of_rows(batch)
    rows = keras.tree.flatten(batch)[kinds.index(True)]
    if isinstance(rows, tf.SparseTensor):
        return rows.dense_shape[0]
    if isinstance(rows, tf.RaggedTensor):
        return tf.cast(rows.nrows(), tf.int64)
    return tf.shape(rows, tf.int64)[0]


def take_rows_of(batch: Any, positions: Any, of_rows: Sequence[bool] | None = None) -> Any:
    """Return the rows of a batch at the given positions.

    Args:
        batch: Mini-batch of tensors, ragged tensors and sparse tensors, in any nesting.
        positions: [n] int64 numbers of the rows to return, ascending.
        of_rows: For each array of the batch, True if it has one row per example, as
            `arrays_of_rows` returns; None: computed from `batch`.
    """
    return map_rows(lambda rows: _take(rows, positions), batch, of_rows)


def _take(rows: Any, positions: Any) -> Any:
    """Return the rows of a tensor, ragged tensor or sparse tensor at ascending positions."""
    if not isinstance(rows, tf.SparseTensor):
        return tf.gather(rows, positions)
    num_taken = tf.size(positions, tf.int64)
    place_of = tf.scatter_nd(
        positions[:, None], tf.range(1, num_taken + 1), rows.dense_shape[:1]
    )  # [rows] int64: for each row of the batch, its new number + 1, or 0 if the row is not taken
    new_row = tf.gather(place_of, rows.indices[:, 0]) - 1
    is_taken = new_row >= 0
    indices = tf.concat([new_row[:, None], rows.indices[:, 1:]], axis=1)
    shape = tf.concat([num_taken[None], rows.dense_shape[1:]], axis=0)
    part = tf.SparseTensor(
        tf.boolean_mask(indices, is_taken), tf.boolean_mask(rows.values, is_taken), shape
    )
    part.set_shape([None, *rows.shape[1:]])
    return part
