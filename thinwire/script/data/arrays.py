"""Division of arrays, and of all data that Keras slices along the first axis, among workers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
from keras import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from numpy.typing import NDArray

from thinwire.data.partition import split
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import Shared, WorkerPlace
from thinwire.script.data.row_order import RowOrder

#: Batch size in rows that Keras' `fit` uses if the script gives none.
DEFAULT_BATCH_SIZE = 32
#: Value of --partition that depends only on the number of rows.
_EQUAL = "iid"
#: Values of --partition that give rows to workers by label.
_BY_LABEL = ("class", "dirichlet")


def are_arrays(data: Any) -> bool:
    """Return True if Keras' `fit` would accept a (nested) structure as arrays."""
    return bool(can_convert_arrays(data))


def num_rows(data: Any) -> int:
    """Return the number of rows (length of the first axis) of a structure of arrays.

    Raises:
        ConfigurationError: The arrays of the structure differ in length, or the structure has no
            array.
    """
    lengths = [int(leaf.shape[0]) for leaf in tree.flatten(data) if leaf is not None]
    if not lengths or len(set(lengths)) > 1:
        raise ConfigurationError(
            f"the arrays of a training set have {lengths} rows; expected equal numbers of rows."
        )
    return lengths[0]


def take_rows(data: Any, positions: NDArray[np.int64]) -> Any:
    """Return the rows at the given positions of each array in a structure.

    NumPy arrays stay NumPy arrays of the same dtype; Keras' own slicing takes the rows of all other
    arrays.
    """
    return tree.map_structure(lambda leaf: _take(leaf, positions), data)


def _take(leaf: Any, positions: NDArray[np.int64]) -> Any:
    if leaf is None or isinstance(leaf, np.ndarray):
        return None if leaf is None else leaf[positions]
    return array_slicing.convert_to_sliceable(leaf)[positions]


def share_arrays(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return the rows of this worker from the arrays that the script passes to `fit`.

    The rows for `validation_split` are cut off before the training rows are divided among workers.
    If all workers step together, the k-th batches of all workers together form the script's k-th
    batch. All workers use the same order of rows: the script's order, or a shuffled order from a
    common seed.

    Args:
        arguments: Arguments of the call of Keras' `fit`, by name.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Raises:
        ConfigurationError: A worker would have no rows, a batch in the middle of an epoch would
            have fewer rows than the run has workers, or the labels do not fit the flag --partition.
    """
    fit_arguments = dict(arguments)
    cut_off_validation(fit_arguments)
    data = fit_arguments.get("x"), fit_arguments.get("y"), fit_arguments.get("sample_weight")
    total, steps = num_rows(data), fit_arguments.get("steps_per_epoch")
    batch_size = fit_arguments.get("batch_size")
    if not batch_size:
        batch_size = math.ceil(total / steps) if steps else DEFAULT_BATCH_SIZE
    worker_batch = place.part_of_batch(batch_size)
    if worker_batch != batch_size or steps or place.is_shared:
        if fit_arguments.get("validation_data") is not None:
            own_size = fit_arguments.get("validation_batch_size")
            fit_arguments["validation_batch_size"] = own_size or batch_size
        fit_arguments["batch_size"] = worker_batch
    sizes = None
    if place.is_shared:
        order = _row_order(data[1], total, batch_size, place, fit_arguments.get("shuffle", True))
        if order.is_dealt:
            own_steps = steps_of_worker(fit_arguments, total, batch_size, place)
            fit_arguments["steps_per_epoch"] = own_steps
        elif steps:
            fit_arguments["steps_per_epoch"] = place.steps(steps)
        sizes = order.sizes
        fit_arguments |= _batches(fit_arguments, order)
    return Shared.of_rows(fit_arguments, place, batch_size, total, sizes, steps)


def steps_of_worker(
    given: dict[str, Any],
    total: int | None,
    batch_size: int,
    place: WorkerPlace,
    is_repeated: bool = False,
) -> int | None:
    """Return this worker's steps_per_epoch for data with `total` rows; None to let Keras count.

    If the last batch of a pass over the data has fewer rows than the run has workers, a worker
    without rows has one step fewer in that pass. With steps_per_epoch, Keras would replace the step
    that a worker without rows lacks by a step of the next pass over the data. If a worker took a
    step of the next pass early, the workers' k-th steps would belong to different batches of the
    script.

    Args:
        given: Arguments of the call of Keras' `fit`, by name.
        total: Number of rows in one pass over the training data; None if unknown, or if no batch
            can be short.
        batch_size: Batch size that the script passes to `fit`, in rows.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
        is_repeated: True if the data repeats its batches after the first pass.

    Raises:
        ConfigurationError: A batch in the middle of an epoch has fewer rows than the run has
            workers.
    """
    steps = given.get("steps_per_epoch")
    num_batches, num_remaining = -(-(total or 0) // batch_size), (total or 0) % batch_size
    if place.lacks_rows(num_remaining) and (steps or is_repeated):
        if steps == num_batches and not is_repeated:
            # an epoch of `fit` without steps_per_epoch is one pass, whose end Keras finds itself
            return None
        num_epochs = (given.get("epochs") or 1) - (given.get("initial_epoch") or 0)
        if steps is None or steps * num_epochs >= num_batches:
            with_steps = f"(steps_per_epoch={steps})" if steps else ""
            raise place.short_batch(
                num_remaining, f"batch {num_batches} of the data given to fit{with_steps}"
            )
    return place.steps(steps) if steps else None


def _row_order(
    targets: Any, total: int, batch_size: int, place: WorkerPlace, shuffle: Any
) -> RowOrder:
    """Divide `total` rows among workers by --partition's rule. Raises ConfigurationError.

    Args:
        targets: Argument `y` of `fit`.
        total: Number of rows in the training data.
        batch_size: Batch size that the script passes to `fit`, in rows.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
        shuffle: Argument `shuffle` of `fit`; "batch" moves no rows between batches.
    """
    rule = dataclasses.replace(place.rule, batch_size=place.part_of_batch(batch_size, worker=1))
    is_shuffled = bool(shuffle) and shuffle != "batch"
    if rule.partition == _EQUAL:
        if total < place.num_workers:
            raise ConfigurationError(
                f"{total} training rows are too few for {place.num_workers} workers; expected "
                f"at least one each. Use --nb_workers={total} at most, or give fit more rows."
            )
        window = place.run_batch(batch_size)
        sizes = place.dealt_rows(total, window)
        return RowOrder(place, np.arange(total), window, True, sizes, is_shuffled)
    parts = split(labels_of(targets, total, rule.partition), rule)
    sizes = tuple(len(part) for part in parts)
    rows, window = parts[place.worker - 1], place.part_of_batch(batch_size)
    return RowOrder(place, rows, window, False, sizes, is_shuffled)


def _batches(given: dict[str, Any], order: RowOrder) -> dict[str, Any]:
    """Return arguments of `fit` with an x that yields this worker's batches.

    Each epoch divides the rows differently among the workers, so a worker's rows cannot be selected
    before `fit`. The script's arrays are not copied: each batch gathers its rows from the arrays.
    The x that `_batches` returns shuffles its rows itself, because all workers need the same order,
    on every backend. (Keras' own shuffle on TensorFlow would also repeat its order in each epoch if
    TensorFlow's global seed is set, and the launcher sets that seed.)
    """
    adapter = ArrayDataAdapter(
        given.get("x"),
        given.get("y"),
        sample_weight=given.get("sample_weight"),
        class_weight=given.get("class_weight"),
        batch_size=given["batch_size"],
    )
    return {
        "x": _gathered(adapter._inputs, order),
        "y": None,
        "batch_size": None,  # KerasHub's `fit` rejects a batch_size together with a dataset as x
        "sample_weight": None,
        "class_weight": None,
        "shuffle": False,
    }


def _gathered(arrays: Any, order: RowOrder) -> Any:
    """Return a data set, of a type that Keras reads fast, of the rows of arrays in an order."""
    if keras.backend.backend() == "tensorflow":
        from thinwire.script.data.array_pipeline import gather_by_pipeline

        return gather_by_pipeline(arrays, order)
    from thinwire.script.data.array_batches import gather_by_batches

    return gather_by_batches(arrays, order)


def cut_off_validation(given: dict[str, Any]) -> None:
    """Replace `validation_split` in `fit`'s arguments by `validation_data`, as Keras' fit does."""
    fraction = given.get("validation_split")
    if not fraction or given.get("validation_data") is not None:
        return
    data = given.get("x"), given.get("y"), given.get("sample_weight")
    train, validation = array_slicing.train_validation_split(data, validation_split=fraction)
    given["x"], given["y"], given["sample_weight"] = train
    given["validation_data"], given["validation_split"] = validation, 0.0


def labels_of(targets: Any, total: int, partition: str) -> NDArray[np.integer]:
    """Return the label of each row, or zeros for a value of --partition that uses no labels.

    Args:
        targets: Argument `y` of `fit`: classes [N] or [N, 1], or one-hot vectors [N, C].
        total: Number N of rows in the training data.
        partition: Value of the flag --partition, the rule that divides rows among workers.

    Raises:
        ConfigurationError: The argument `y` of `fit` does not give one class per row.
    """
    if partition not in _BY_LABEL:
        return np.zeros(total, np.int64)
    if targets is None or tree.is_nested(targets):
        raise ConfigurationError(
            f"--partition={partition} divides rows among the workers by their label, but the "
            f"script called fit with {'no y' if targets is None else 'several'} as labels; "
            "expected an array y with one class per row. Use --partition=iid."
        )
    labels = np.asarray(targets)
    if labels.ndim == 2:
        labels = labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0]
    if labels.ndim != 1 or (labels.dtype.kind == "f" and np.any(labels != np.round(labels))):
        raise ConfigurationError(
            f"--partition={partition} divides rows among the workers by their label, but y has "
            f"shape {np.shape(targets)} and dtype {np.asarray(targets).dtype}; expected one class "
            "per row. Use --partition=iid."
        )
    return labels.astype(np.int64) if labels.dtype.kind == "f" else labels
