"""Sharing arrays: whatever Keras cuts along the first axis, in any nesting."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from numpy.typing import NDArray

from thinwire.data.partition import split
from thinwire.ops.types import ConfigurationError
from thinwire.sharing.fit_counts import mixed_seed
from thinwire.sharing.place import Rounds, Shared, WorkerPlace, deal
from thinwire.sharing.rounds import UnknownRounds, dealt_rounds, full_rounds

#: Keras' batch size where the script gives none.
DEFAULT_BATCH_SIZE = 32
#: The one --partition that looks at nothing but the number of rows.
_EQUAL = "iid"
#: Those that look at labels.
_BY_LABEL = ("class", "dirichlet")


def are_arrays(data: Any) -> bool:
    """Return whether Keras would take a structure as arrays."""
    return bool(can_convert_arrays(data))


def num_rows(data: Any) -> int:
    """Return the length of the first axis of a structure of arrays.

    Raises:
        ConfigurationError: The arrays are not equally long, or there is none.
    """
    lengths = [int(leaf.shape[0]) for leaf in tree.flatten(data) if leaf is not None]
    if not lengths or len(set(lengths)) > 1:
        raise ConfigurationError(
            f"the arrays of a training set have {lengths} rows; expected the same number in each."
        )
    return lengths[0]


def take_rows(data: Any, positions: NDArray[np.int64]) -> Any:
    """Return the rows at some positions of each array of a structure.

    Arrays of NumPy stay such, with their dtype; others are cut as Keras cuts them.
    """
    return tree.map_structure(lambda leaf: _take(leaf, positions), data)


def _take(leaf: Any, positions: NDArray[np.int64]) -> Any:
    if leaf is None or isinstance(leaf, np.ndarray):
        return None if leaf is None else leaf[positions]
    return array_slicing.convert_to_sliceable(leaf)[positions]


def share_arrays(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of arrays that `fit` was given.

    `validation_split` is cut off first, as Keras does. Where one group's workers step together
    their k-th batches are the k-th batch of the script, in its order or in one shuffle's.

    Args:
        arguments: Of Keras' fit, by name.
        place: This worker's.

    Raises:
        ConfigurationError: A part would be empty, or the labels do not fit the partition.
    """
    given = dict(arguments)
    cut_off_validation(given)
    data = given.get("x"), given.get("y"), given.get("sample_weight")
    total, steps = num_rows(data), given.get("steps_per_epoch")
    batch_size = given.get("batch_size")
    if not batch_size:
        batch_size = math.ceil(total / steps) if steps else DEFAULT_BATCH_SIZE
    own = place.part_of_batch(batch_size)
    short_by, sizes = 0, None
    if place.is_shared:
        parts = _parts(data, total, batch_size, bool(_reorders(given.get("shuffle", True))), place)
        sizes = [len(part) for part in parts]
        mine = take_rows(data, parts[place.worker - 1])
        given["x"], given["y"], given["sample_weight"] = mine
        if steps:
            given["steps_per_epoch"] = place.steps(steps)
        else:
            short_by = _short_by(sizes, batch_size, place)
    rounds = _rounds(place, batch_size, total, sizes, bool(steps))
    if own != batch_size or steps or place.is_shared:
        if given.get("validation_data") is not None and not given.get("validation_batch_size"):
            given["validation_batch_size"] = batch_size
        given["batch_size"] = own
    if place.is_shared and _reorders(given.get("shuffle", True)):
        given |= _shuffled(given, place)
    num_examples = total if place.shard == "auto" else None
    return Shared(given, batch_size, num_examples, short_by, rounds)


def _rounds(
    place: WorkerPlace, batch_size: int, total: int, sizes: list[int] | None, repeats: bool
) -> Rounds | None:
    """Return the rows of all workers' steps, where they divide batches.

    Args:
        place: This worker's.
        batch_size: The script's.
        total: Rows that the script has given to this worker.
        sizes: Rows of every worker's part; None: the script itself has shared its rows.
        repeats: Whether the script gives a number of steps.
    """
    if not place.divides_batch:
        return None
    if sizes is not None:
        return dealt_rounds(place, batch_size, sizes, repeats)
    if total % place.part_of_batch(batch_size) == 0:
        return full_rounds(place, batch_size)
    return UnknownRounds(
        f"the script gives each worker rows of its own, and the {total} rows of this one end with "
        "a short batch"
    )


def _reorders(shuffle: Any) -> bool:
    """Return whether Keras shuffles across batches."""
    return bool(shuffle) and shuffle != "batch"


def _shuffled(given: dict[str, Any], place: WorkerPlace) -> dict[str, Any]:
    """Return the arguments of `fit` that replace a worker's arrays by shuffled batches of them.

    Keras itself shuffles them in the same order in each epoch where TensorFlow's seed is set, as
    the launcher sets it; and each worker then in the same order as the others.
    """
    adapter = ArrayDataAdapter(
        given.get("x"),
        given.get("y"),
        sample_weight=given.get("sample_weight"),
        class_weight=given.get("class_weight"),
        batch_size=given["batch_size"],
    )
    total, size = adapter._num_samples, given["batch_size"]
    arrays = tree.lists_to_tuples(
        array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    )

    def batches_of_epoch(drawn: Any) -> Any:
        seed = tf.stack([drawn, tf.cast(place.worker, drawn.dtype)])
        order = tf.random.experimental.stateless_shuffle(tf.range(total, dtype=tf.int64), seed)
        numbers = tf.data.Dataset.range(adapter.num_batches)
        return numbers.map(lambda number: order[number * size : (number + 1) * size])

    seed_of_fit = mixed_seed(place.rule.seed, place.fits_before)
    epochs = tf.data.Dataset.random(seed_of_fit, rerandomize_each_iteration=True).take(1)
    rows = epochs.flat_map(batches_of_epoch)
    batches = tf.data.Dataset.zip((rows, tf.data.Dataset.from_tensors(arrays).repeat())).map(
        _gather, num_parallel_calls=tf.data.AUTOTUNE
    )
    known = tf.data.experimental.assert_cardinality(adapter.num_batches)
    return {
        "x": batches.apply(known).prefetch(tf.data.AUTOTUNE),
        "y": None,
        "batch_size": None,  # KerasHub's fit refuses one beside batches
        "sample_weight": None,
        "class_weight": None,
        "shuffle": False,
    }


def _gather(rows: Any, arrays: Any) -> Any:
    """Return some rows of each array of a structure, as Keras cuts them."""

    def gather(array: Any) -> Any:
        if isinstance(array, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(array, rows)
        if isinstance(array, list | tuple | dict):
            return None  # not a leaf: `traverse` goes on
        return tf.gather(array, rows, axis=0) if tf.is_tensor(array) else array

    return tree.traverse(gather, arrays)


def cut_off_validation(given: dict[str, Any]) -> None:
    """Turn `validation_split` into validation data, in place, as Keras' fit does."""
    fraction = given.get("validation_split")
    if not fraction or given.get("validation_data") is not None:
        return
    data = given.get("x"), given.get("y"), given.get("sample_weight")
    train, validation = array_slicing.train_validation_split(data, validation_split=fraction)
    given["x"], given["y"], given["sample_weight"] = train
    given["validation_data"], given["validation_split"] = validation, 0.0


def _parts(
    data: tuple[Any, Any, Any], total: int, batch_size: int, shuffled: bool, place: WorkerPlace
) -> list[NDArray[np.int64]]:
    """Return the positions of every worker's rows."""
    rule = dataclasses.replace(place.rule, batch_size=place.part_of_batch(batch_size, worker=1))
    if not (place.one_group and rule.partition == _EQUAL):
        return split(labels_of(data[1], total, rule.partition), rule)
    if total < place.num_workers:
        raise ConfigurationError(
            f"{total} rows cannot be shared by {place.num_workers} workers; expected at least one "
            f"each. Use --nb_workers={total} at most, or give fit more rows."
        )
    order = np.arange(total, dtype=np.int64)
    if shuffled:
        order = np.random.default_rng([rule.seed, total]).permutation(total)
    run_batch = place.run_batch(batch_size)
    workers = range(1, place.num_workers + 1)
    dealt = [order[deal(total, run_batch, worker, place.num_workers)] for worker in workers]
    return [np.sort(part) for part in dealt] if shuffled else dealt


def labels_of(targets: Any, total: int, partition: str) -> NDArray[np.integer]:
    """Return one label per row, for partitions that look at them; else zeros.

    Args:
        targets: What `fit` was given as y: classes [N] or [N, 1], or one-hot [N, C].
        total: N.
        partition: A name of ``data.PARTITIONS``.

    Raises:
        ConfigurationError: There is not one class per row.
    """
    if partition not in _BY_LABEL:
        return np.zeros(total, np.int64)
    if targets is None or tree.is_nested(targets):
        raise ConfigurationError(
            f"--partition={partition} deals rows out by their label, and fit was given "
            f"{'no y' if targets is None else 'several'}; expected one class per row. Use "
            "--partition=iid."
        )
    labels = np.asarray(targets)
    if labels.ndim == 2:
        labels = labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0]
    if labels.ndim != 1 or (labels.dtype.kind == "f" and np.any(labels != np.round(labels))):
        raise ConfigurationError(
            f"--partition={partition} deals rows out by their label, and y has shape "
            f"{np.shape(targets)} and dtype {np.asarray(targets).dtype}; expected one class per "
            "row. Use --partition=iid."
        )
    return labels.astype(np.int64) if labels.dtype.kind == "f" else labels


def _short_by(sizes: list[int], batch_size: int, place: WorkerPlace) -> int:
    """Return by how many steps this worker's epoch is shorter than the longest."""
    if not place.one_group:
        return 0
    numbers = range(1, place.num_workers + 1)
    steps = [
        math.ceil(size / place.part_of_batch(batch_size, number))
        for size, number in zip(sizes, numbers, strict=True)
    ]
    return max(steps) - steps[place.worker - 1]
