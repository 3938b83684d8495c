"""Divides a ray.data.Dataset, whose rows have named columns, among workers.

This module does not import Ray, so that a script without Ray data sets does not need Ray.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.arrays import DEFAULT_BATCH_SIZE, steps_of_worker
from thinwire.script.data.passes import PassAdapter
from thinwire.script.data.place import Shared, WorkerPlace

_MODULE = "ray.data"


def is_ray_dataset(data: Any) -> bool:
    """Return True if an object is a ray.data.Dataset."""
    # a script that has made a Ray data set has already imported Ray
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(data, module.Dataset)


def share_ray_dataset(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of a ray.data.Dataset that the script passes to `fit` as x.

    The script passes names of columns to `fit`: `y` is a column or a list of columns,
    `sample_weight` is a column. All columns that are neither labels nor weights are the input x: an
    array for one column, a dict for several. Every worker reads all rows of the Ray data set, in
    order, and keeps its own rows of each window (the rows for one batch of each worker).

    Args:
        arguments: Arguments of the call of Keras' `fit`, by name.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Raises:
        ConfigurationError: A named column does not exist, a column's cells differ in shape, or the
            data set has fewer rows than the run has workers.
    """
    fit_arguments, dataset = dict(arguments), arguments["x"]
    if place.is_shared:
        place.check_partition("ray.data.Dataset")
    size = fit_arguments.get("batch_size") or DEFAULT_BATCH_SIZE
    worker_batch, run_batch = place.part_of_batch(size), place.run_batch(size)
    total, rows = _num_rows(dataset, place), None
    columns = _Columns.of(dataset, fit_arguments)
    window = run_batch if place.is_shared else worker_batch
    fit_arguments["x"] = _batches(dataset, columns, total, window, place)
    fit_arguments |= {"y": None, "sample_weight": None, "batch_size": None, "shuffle": False}
    if place.is_shared:
        rows = place.dealt_rows(total, run_batch)
        fit_arguments["steps_per_epoch"] = steps_of_worker(fit_arguments, total, size, place)
    return Shared.of_rows(fit_arguments, place, size, total, rows, arguments.get("steps_per_epoch"))


def _num_rows(dataset: Any, place: WorkerPlace) -> int:
    """Return a Ray data set's number of rows; raise an error if there are fewer than workers."""
    total, workers = int(dataset.count()), place.num_workers if place.is_shared else 1
    if total < workers:
        raise ConfigurationError(
            f"{total} rows of a ray.data.Dataset cannot be shared by {workers} workers; expected "
            f"at least one row each. Use --nb_workers={max(total, 1)} at most, or more data."
        )
    return total


def part_of_ray_dataset(dataset: Any, place: WorkerPlace) -> Any:
    """Return a ray.data.Dataset of this worker's rows, which are one contiguous range of all rows.

    Raises:
        ConfigurationError: The Ray data set has fewer rows than the run has workers.
    """
    if not place.is_shared:
        return dataset
    _keep_order(dataset)
    total, number = _num_rows(dataset, place), place.num_workers
    bounds = [total * worker // number for worker in range(1, number)]
    return dataset.split_at_indices(bounds)[place.worker - 1]


def _keep_order(dataset: Any) -> None:
    """Configure Ray to deliver a data set's rows in the same order to every worker."""
    dataset.context.execution_options.preserve_order = True


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Columns of a Ray data set that are the input x, the labels y and the sample weights."""

    x: list[str]
    y: list[str]
    weight: str | None

    @classmethod
    def of(cls, dataset: Any, given: dict[str, Any]) -> _Columns:
        y, weight = given.get("y"), given.get("sample_weight")
        labels = [y] if isinstance(y, str) else list(y or [])
        named = [*labels, *([weight] if weight is not None else [])]
        known = [str(name) for name in dataset.columns()]
        if not all(isinstance(name, str) and name in known for name in named):
            raise ConfigurationError(
                f"fit received a ray.data.Dataset with the columns {known}, y={y!r:.80} and "
                f"sample_weight={weight!r:.80}; expected names of columns of the data set as y and "
                'sample_weight, for example fit(dataset, y="label"). All other columns are x.'
            )
        return cls([name for name in known if name not in named], labels, weight)

    def element(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return the columns of a batch in Keras' form: (x,), (x, y) or (x, y, weight)."""
        columns = {name: _checked(name, column) for name, column in batch.items()}
        x = {name: columns[name] for name in self.x}
        y = tuple(columns[name] for name in self.y)
        parts: tuple[Any, ...] = (columns[self.x[0]] if len(x) == 1 else x,)
        if y or self.weight is not None:
            parts += (y[0] if len(y) == 1 else y,)
        return parts if self.weight is None else (*parts, columns[self.weight])


def _batches(dataset: Any, columns: _Columns, total: int, size: int, place: WorkerPlace) -> Any:
    """Return a data set, of a type that Keras reads fast, of batches of this worker's rows.

    Args:
        dataset: ray.data.Dataset that the script passes to `fit`.
        columns: Names of the columns of `dataset` that are x, labels and weights.
        total: Number of rows in the Ray data set `dataset`.
        size: Number of rows that all workers divide for one batch of each worker.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
    """
    _keep_order(dataset)

    def windows() -> Iterator[tuple[Any, ...]]:
        for batch in dataset.iter_batches(batch_size=size, batch_format="numpy"):
            yield columns.element(batch)

    if keras.backend.backend() == "tensorflow":
        from thinwire.script.data.windows import read_windows

        sample = columns.element(dataset.take_batch(1, batch_format="numpy"))
        return read_windows(windows, sample, total, size, place)
    if not place.is_shared:
        return PassAdapter(lambda number, backend: windows(), -(-total // size), size, total % size)

    def batches(number: int, backend: str) -> Iterator[tuple[Any, ...]]:
        for window, element in enumerate(windows()):
            rows = place.positions(len(keras.tree.flatten(element)[0]), number, window)
            if len(rows):
                yield keras.tree.map_structure(lambda column, rows=rows: column[rows], element)

    own_rows, own_size = place.dealt_rows(total, size)[place.worker - 1], place.num_dealt(size)
    return PassAdapter(batches, -(-own_rows // own_size), own_size, own_rows % own_size)


def _checked(name: str, column: Any) -> Any:
    """Return a column of a batch as an array [rows, ...] of numbers or texts.

    Raises:
        ConfigurationError: The cells of the data set's column differ in shape.
    """
    array = np.asarray(column)
    if array.dtype == object and len(array) and not isinstance(array[0], str | bytes):
        shapes = {np.shape(cell) for cell in array}
        if len(shapes) > 1:
            raise ConfigurationError(
                f"the column {name!r} of a ray.data.Dataset has values of the shapes "
                f"{sorted(shapes)}; expected one shape. Pad the values with map_batches."
            )
        array = np.stack(list(array))
    return array
