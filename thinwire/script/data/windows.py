"""Dealing out the elements of a tf.data.Dataset, or the rows of its batches, window by window.

How the rows of a window are dealt depends on the number of the epoch and on that of the window, so
both are counted while a dataset is iterated over. An epoch is one pass over what is dealt out: each
repetition of a `repeat()` behind it is an epoch. All workers count alike as long as all iterate
equally often.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from thinwire.script.data.place import UnfilledRounds, WorkerPlace
from thinwire.script.data.rows import arrays_of_rows, map_rows

_Dataset = Any  # a tf.data.Dataset: TensorFlow has no types


def count_epochs() -> _Dataset:
    """Return a dataset of one element, which is the number of passes over it before, from 0."""
    numbers = itertools.count()

    def count() -> Any:
        return np.int64(next(numbers))

    def begin(_: Any) -> Any:
        # Counted at the first element: Keras makes iterators that it never reads from.
        return tf.ensure_shape(tf.numpy_function(count, [], tf.int64), [])

    return tf.data.Dataset.from_tensors(0).map(as_traced(begin))


def deal_elements(
    whole: _Dataset,
    window: int,
    place: WorkerPlace,
    *,
    drops_rest: bool,
    is_repeated: bool,
    unfilled: UnfilledRounds | None = None,
) -> _Dataset:
    """Return the elements of a dataset that are this worker's.

    A window is collected before it is dealt out: only then the size of the last one is known.

    Args:
        whole: Gives the same elements in the same order to every worker.
        window: Elements of a full window.
        place: This worker's.
        drops_rest: Whether a last window with fewer elements is left out.
        is_repeated: Whether an epoch of `fit` may go on with the next pass.
        unfilled: Counts the windows that this worker has no elements of.
    """

    def owned(epoch: Any, number: Any, num_elements: Any) -> Any:
        if is_repeated and place.lacks_rows(int(num_elements)):
            raise _short(place, number, num_elements)
        is_own = np.zeros(int(num_elements), np.bool_)
        is_own[place.positions(int(num_elements), int(epoch), int(number))] = True
        if unfilled is not None and not is_own.any():
            unfilled.note()
        return is_own

    def open_window(epoch: Any, numbered: Any) -> _Dataset:
        number, columns = numbered
        size = tf.nest.flatten(columns)[0].cardinality()
        flags = tf.ensure_shape(tf.numpy_function(owned, [epoch, number, size], tf.bool), [None])
        flagged = tf.data.Dataset.zip((tf.data.Dataset.zip(columns), _slices(flags)))
        return flagged.filter(as_traced(_second)).map(as_traced(_first))

    windows = _without_none(whole).window(window, drop_remainder=drops_rest).enumerate()
    dealt = tf.data.Dataset.zip((_epoch_of_each(), windows)).flat_map(as_traced(open_window))
    part, total = _with_none(dealt, whole.element_spec), int(whole.cardinality())
    if total >= 0:
        full, rest = divmod(total, window)
        total = full * place.num_dealt(window) + (0 if drops_rest else place.num_dealt(rest))
    if total == tf.data.UNKNOWN_CARDINALITY:
        return part
    return part.apply(tf.data.experimental.assert_cardinality(total))


def cut_batches(
    whole: _Dataset,
    place: WorkerPlace,
    *,
    rest: int | None,
    is_repeated: bool,
    unfilled: UnfilledRounds | None = None,
) -> _Dataset:
    """Return each batch of a dataset with this worker's rows only.

    Args:
        whole: Gives the same batches in the same order to every worker.
        place: This worker's.
        rest: Rows of a last, short batch, 0 if there is none; None: not known. Only an epoch's last
            batch may have fewer rows than there are workers; those without rows have a step less.
        is_repeated: Whether an epoch of `fit` may go on with the next pass.
        unfilled: Counts the batches that this worker has no rows of.
    """
    short: dict[int, int] = {}  # epoch -> rows of a batch that has to be its last

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

    def cut(epoch: Any, numbered: Any) -> Any:
        number, batch = numbered
        own = tf.numpy_function(positions, [epoch, number, rows_in(batch)], tf.int64)
        return take_rows_of(batch, tf.ensure_shape(own, [None]))

    def has_rows(*batch: Any) -> Any:
        return rows_in(batch) > 0

    part = tf.data.Dataset.zip((_epoch_of_each(), whole.enumerate())).map(as_traced(cut))
    total, lacks = int(whole.cardinality()), rest is None or place.lacks_rows(rest)
    part = part.filter(as_traced(has_rows)) if lacks else part
    if rest is None or total == tf.data.UNKNOWN_CARDINALITY:
        return part
    total -= int(total > 0 and lacks and not place.num_dealt(rest))
    return part.apply(tf.data.experimental.assert_cardinality(total))


def _short(place: WorkerPlace, number: Any, num_rows: Any) -> Exception:
    where = f"batch {int(number) + 1} of the tf.data.Dataset given to fit"
    return place.short_batch(int(num_rows), where)


def _epoch_of_each() -> _Dataset:
    """Return a dataset that gives the number of the present pass again and again."""

    def repeat(epoch: Any) -> _Dataset:
        return tf.data.Dataset.from_tensors(epoch).repeat()

    return count_epochs().flat_map(as_traced(repeat))


def as_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that TensorFlow traces as it is: no `if` or loop in it is for a graph."""
    converted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return converted


def _first(first: Any, second: Any) -> Any:
    del second
    return first


def _second(first: Any, second: Any) -> Any:
    del first
    return second


def _slices(values: Any) -> _Dataset:
    return tf.data.Dataset.from_tensor_slices(values)


# -- components of None, which a window cannot hold ------------------------------------------------


def _without_none(dataset: _Dataset) -> _Dataset:
    specs = tf.nest.flatten(dataset.element_spec)
    if not any(isinstance(spec, tf.NoneTensorSpec) for spec in specs):
        return dataset

    def pack(*element: Any) -> Any:
        return tuple(leaf for leaf in tf.nest.flatten(element) if leaf is not None)

    return dataset.map(as_traced(pack))


def _with_none(dataset: _Dataset, spec: Any) -> _Dataset:
    """Return the elements of `_without_none` in the structure of `spec` again."""
    leaves = tf.nest.flatten(spec)
    if not any(isinstance(leaf, tf.NoneTensorSpec) for leaf in leaves):
        return dataset

    def unpack(*element: Any) -> Any:
        values = iter(element)
        every = [None if isinstance(leaf, tf.NoneTensorSpec) else next(values) for leaf in leaves]
        return tf.nest.pack_sequence_as(spec, every)

    return dataset.map(as_traced(unpack))


# -- rows of a batch -------------------------------------------------------------------------------


def rows_in(batch: Any, of_rows: Sequence[bool] | None = None) -> Any:
    """Return the number of rows of a batch, a scalar; `of_rows` as `take_rows_of`."""
    kinds = of_rows or arrays_of_rows(batch)
    rows = tf.nest.flatten(batch)[kinds.index(True)]
    if isinstance(rows, tf.SparseTensor):
        return rows.dense_shape[0]
    if isinstance(rows, tf.RaggedTensor):
        return tf.cast(rows.nrows(), tf.int64)
    return tf.shape(rows, tf.int64)[0]


def take_rows_of(batch: Any, positions: Any, of_rows: Sequence[bool] | None = None) -> Any:
    """Return the rows of a batch at ascending positions.

    Args:
        batch: Tensors, ragged and sparse ones, in any nesting.
        positions: [n] int64.
        of_rows: As `map_rows` takes it.
    """
    return map_rows(lambda rows: _take(rows, positions), batch, of_rows)


def _take(rows: Any, positions: Any) -> Any:
    """Return rows of a tensor, ragged or sparse."""
    if not isinstance(rows, tf.SparseTensor):
        return tf.gather(rows, positions)
    num_taken = tf.size(positions, tf.int64)
    place_of = tf.scatter_nd(
        positions[:, None], tf.range(1, num_taken + 1), rows.dense_shape[:1]
    )  # [rows] int64, 0 for those that are not taken
    new_row = tf.gather(place_of, rows.indices[:, 0]) - 1
    is_taken = new_row >= 0
    indices = tf.concat([new_row[:, None], rows.indices[:, 1:]], axis=1)
    shape = tf.concat([num_taken[None], rows.dense_shape[1:]], axis=0)
    part = tf.SparseTensor(
        tf.boolean_mask(indices, is_taken), tf.boolean_mask(rows.values, is_taken), shape
    )
    part.set_shape([None, *rows.shape[1:]])
    return part
