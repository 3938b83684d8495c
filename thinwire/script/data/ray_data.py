"""Sharing a ray.data.Dataset: rows of named columns, which Ray reads and prepares as they are used.

Ray is not imported here: who has none of its data sets has no need of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.arrays import DEFAULT_BATCH_SIZE, steps_of_worker
from thinwire.script.data.place import BatchParts, Shared, WorkerPlace
from thinwire.script.data.rounds import dealt_rounds

_MODULE = "ray.data"


def is_ray_dataset(data: Any) -> bool:
    """Return whether this is a data set of Ray Data."""
    module = sys.modules.get(_MODULE)  # else nobody can have made one
    return module is not None and isinstance(data, module.Dataset)


def share_ray_dataset(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of a ray.data.Dataset that `fit` was given as x.

    `y` and `sample_weight` name columns, `y` several in a list; all other columns are x: one as it
    is, several as a dict. Every worker reads all rows, in order, and keeps those of each batch of
    the run that are dealt to it.

    Args:
        arguments: Of Keras' fit, by name.
        place: This worker's.

    Raises:
        ConfigurationError: Columns that are not there or that differ in shape from row to row, or
            fewer rows than workers.
    """
    given, dataset = dict(arguments), arguments["x"]
    if place.is_shared and place.rule.partition != "iid":
        raise ConfigurationError(
            f"--partition={place.rule.partition} deals out arrays, and fit was given a "
            "ray.data.Dataset. Use --partition=iid, or give fit arrays."
        )
    size = given.get("batch_size") or DEFAULT_BATCH_SIZE
    own, run_batch = place.part_of_batch(size), place.run_batch(size)
    total = int(dataset.count())
    workers = place.num_workers if place.is_shared else 1
    if total < workers:
        raise ConfigurationError(
            f"{total} rows of a ray.data.Dataset cannot be shared by {workers} workers; expected "
            f"at least one each. Use --nb_workers={max(total, 1)} at most, or more data."
        )
    columns = _Columns.of(dataset, given)
    given["x"] = _batches(dataset, columns, total, run_batch if place.is_shared else own, place)
    given |= {"y": None, "sample_weight": None, "batch_size": None, "shuffle": False}
    short_by, of_batches, rows = 0, BatchParts.alike(place), None
    if place.is_shared:
        rows = place.dealt_rows(total, run_batch)
        steps = given.get("steps_per_epoch")
        given["steps_per_epoch"] = steps_of_worker(given, total, size, place)
        if steps and given["steps_per_epoch"]:
            of_batches = BatchParts.of_steps(place, steps)
        else:
            short_by = place.short_by(place.steps_of_rows(size, rows))
            of_batches = BatchParts.of_rows(place, size, rows)
    num_examples = total if place.shard == "auto" else None
    rounds = None
    if place.divides_batch:
        rounds = dealt_rounds(place, size, rows, bool(given.get("steps_per_epoch")))
    return Shared(given, size, num_examples, short_by, of_batches, rounds)


def part_of_ray_dataset(dataset: Any, place: WorkerPlace) -> Any:
    """Return a ray.data.Dataset of this worker's rows, which follow each other.

    Raises:
        ConfigurationError: There are fewer rows than workers.
    """
    if not place.is_shared:
        return dataset
    _keep_order(dataset)
    total, number = int(dataset.count()), place.num_workers
    if total < number:
        raise ConfigurationError(
            f"{total} rows of a ray.data.Dataset cannot be shared by {number} workers; expected at "
            f"least one each. Use --nb_workers={max(total, 1)} at most, or more data."
        )
    bounds = [total * worker // number for worker in range(1, number)]
    return dataset.split_at_indices(bounds)[place.worker - 1]


def _keep_order(dataset: Any) -> None:
    """Let Ray give the rows in the same order to every worker."""
    dataset.context.execution_options.preserve_order = True


class _Columns:
    """Which columns of a data set are what, and how a row of each looks."""

    def __init__(self, x: list[str], y: list[str], weight: str | None) -> None:
        self._x, self._y, self._weight = x, y, weight

    @classmethod
    def of(cls, dataset: Any, given: dict[str, Any]) -> _Columns:
        y, weight = given.get("y"), given.get("sample_weight")
        labels = [y] if isinstance(y, str) else list(y or [])
        named = [*labels, *([weight] if weight is not None else [])]
        known = [str(name) for name in dataset.columns()]
        if not all(isinstance(name, str) and name in known for name in named):
            raise ConfigurationError(
                f"fit was given a ray.data.Dataset with the columns {known}, y={y!r:.80} and "
                f"sample_weight={weight!r:.80}; expected names of columns there: the labels' as "
                'y, such as fit(dataset, y="label"). All others are x.'
            )
        return cls([name for name in known if name not in named], labels, weight)

    def element(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return a batch as Keras takes it."""
        x, y = ([(name, batch[name]) for name in names] for names in (self._x, self._y))
        found: tuple[Any, ...] = (x[0][1] if len(x) == 1 else dict(x),)
        if y or self._weight is not None:
            labels = [column for _, column in y]
            found += (labels[0] if len(labels) == 1 else tuple(labels),)
        return found if self._weight is None else (*found, batch[self._weight])


def _batches(dataset: Any, columns: _Columns, total: int, size: int, place: WorkerPlace) -> Any:
    """Return a tf.data.Dataset of this worker's rows of each batch.

    Args:
        dataset: The script's.
        columns: Of it.
        total: Its rows.
        size: Rows of a batch of all workers.
        place: This worker's.
    """
    _keep_order(dataset)
    epochs = itertools.count()

    def rows() -> Iterator[tuple[Any, ...]]:
        epoch = next(epochs)
        batches = dataset.iter_batches(batch_size=size, batch_format="numpy")
        for number, batch in enumerate(batches):
            whole = {name: _checked(name, column) for name, column in batch.items()}
            if place.is_shared:
                num_rows = len(next(iter(whole.values())))
                own = place.positions(num_rows, epoch, number)
                whole = {name: column[own] for name, column in whole.items()}
            if all(len(column) for column in whole.values()):
                yield columns.element(whole)

    sample = columns.element({name: _checked(name, c) for name, c in _sample(dataset).items()})
    signature = tf.nest.map_structure(
        lambda column: tf.TensorSpec((None, *column.shape[1:]), tf.as_dtype(column.dtype)), sample
    )
    full, rest = divmod(total, size)
    number = full + (rest > 0 if not place.is_shared else place.num_dealt(rest) > 0)
    batches = tf.data.Dataset.from_generator(rows, output_signature=signature)
    return batches.apply(tf.data.experimental.assert_cardinality(number)).prefetch(1)


def _sample(dataset: Any) -> dict[str, Any]:
    return dict(dataset.take_batch(1, batch_format="numpy"))


def _checked(name: str, column: Any) -> Any:
    """Return a column of a batch as an array [rows, ...] of numbers or texts."""
    array = np.asarray(column)
    if array.dtype == object and len(array) and not isinstance(array[0], str | bytes):
        shapes = {np.shape(cell) for cell in array}
        if len(shapes) > 1:
            raise ConfigurationError(
                f"the column {name!r} of a ray.data.Dataset has cells of the shapes "
                f"{sorted(shapes)}; expected one shape. Pad them by map_batches."
            )
        array = np.stack(list(array))
    return array
