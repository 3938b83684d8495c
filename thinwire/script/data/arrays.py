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
from thinwire.script.data.place import BatchParts, Rounds, Shared, WorkerPlace
from thinwire.script.data.rounds import UnknownRounds, dealt_rounds, full_rounds
from thinwire.script.data.windows import as_traced, count_epochs

#: Keras' batch size where the script gives none.
DEFAULT_BATCH_SIZE = 32
#: Separates the orders of epochs from what else is drawn with the same seed.
_ORDERS = 1
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
        ConfigurationError: A part would be empty, a batch in the middle of an epoch would have
            fewer rows than workers, or the labels do not fit the partition.
    """
    given = dict(arguments)
    cut_off_validation(given)
    data = given.get("x"), given.get("y"), given.get("sample_weight")
    total, steps = num_rows(data), given.get("steps_per_epoch")
    batch_size = given.get("batch_size")
    if not batch_size:
        batch_size = math.ceil(total / steps) if steps else DEFAULT_BATCH_SIZE
    own = place.part_of_batch(batch_size)
    if own != batch_size or steps or place.is_shared:
        if given.get("validation_data") is not None and not given.get("validation_batch_size"):
            given["validation_batch_size"] = batch_size
        given["batch_size"] = own
    short_by, of_batches, sizes = 0, BatchParts.alike(place), None
    if place.is_shared:
        shares = _Shares.of(data[1], total, batch_size, place)
        if shares.is_dealt:
            given["steps_per_epoch"] = steps_of_worker(given, total, batch_size, place)
        elif steps:
            given["steps_per_epoch"] = place.steps(steps)
        if steps and given["steps_per_epoch"]:
            of_batches = BatchParts.of_steps(place, steps)
        else:
            short_by = shares.short_by
            of_batches = BatchParts.of_rows(place, batch_size, shares.sizes)
        sizes = shares.sizes
        given |= _batches(given, shares, place)
    num_examples = total if place.shard == "auto" else None
    rounds = _rounds(place, batch_size, total, sizes, bool(given.get("steps_per_epoch")))
    return Shared(given, batch_size, num_examples, short_by, of_batches, rounds)


def steps_of_worker(
    given: dict[str, Any],
    total: int,
    batch_size: int,
    place: WorkerPlace,
    is_repeated: bool = False,
) -> int | None:
    """Return this worker's steps_per_epoch, where one pass over the data has `total` rows.

    Where the last batch of a pass has fewer rows than workers, a worker without rows has a step
    less. Keras would then begin the next pass in the place of the missing step.

    Args:
        given: Arguments of Keras' fit.
        total: Rows of one pass.
        batch_size: The script's.
        place: This worker's.
        is_repeated: Whether the data repeats its batches itself.

    Raises:
        ConfigurationError: Such a batch stands in the middle of an epoch of `fit`.
    """
    steps, rest, num_batches = (
        given.get("steps_per_epoch"),
        total % batch_size,
        -(-total // batch_size),
    )
    if place.lacks_rows(rest) and (steps or is_repeated):
        if steps == num_batches and not is_repeated:
            return None  # every epoch of `fit` is one pass
        num_epochs = (given.get("epochs") or 1) - (given.get("initial_epoch") or 0)
        if steps is None or steps * num_epochs >= num_batches:
            with_steps = f"(steps_per_epoch={steps})" if steps else ""
            raise place.short_batch(
                rest, f"batch {num_batches} of the data given to fit{with_steps}"
            )
    return place.steps(steps) if steps else None


def _rounds(
    place: WorkerPlace, batch_size: int, total: int, sizes: tuple[int, ...] | None, repeats: bool
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
    """Return whether Keras shuffles across batches; "batch" shuffles the rows within each one."""
    return bool(shuffle) and shuffle != "batch"


@dataclasses.dataclass(frozen=True)
class _Shares:
    """How the rows of arrays become this worker's batches.

    Attributes:
        rows: [n] int64 the rows of an epoch, in the script's order: of all workers where each
            window is dealt out in each epoch, else only this worker's own.
        window: Rows of a full window of these; each window gives this worker one batch.
        is_dealt: Whether the rows of a window are dealt out among the workers.
        sizes: Rows of each worker in an epoch.
        num_batches: This worker's batches of an epoch.
        short_by: As that of `Shared`.
    """

    rows: NDArray[np.int64]
    window: int
    is_dealt: bool
    sizes: tuple[int, ...]
    num_batches: int
    short_by: int

    @classmethod
    def of(cls, targets: Any, total: int, batch_size: int, place: WorkerPlace) -> _Shares:
        """Share `total` rows by the partition of the run. Raises ConfigurationError."""
        rule = dataclasses.replace(place.rule, batch_size=place.part_of_batch(batch_size, worker=1))
        if rule.partition == _EQUAL:
            if total < place.num_workers:
                raise ConfigurationError(
                    f"{total} rows cannot be shared by {place.num_workers} workers; expected at "
                    f"least one each. Use --nb_workers={total} at most, or give fit more rows."
                )
            window = place.run_batch(batch_size)
            sizes = place.dealt_rows(total, window)
            rows = np.arange(total, dtype=np.int64)
        else:
            parts = split(labels_of(targets, total, rule.partition), rule)
            sizes = tuple(len(part) for part in parts)
            rows, window = parts[place.worker - 1], place.part_of_batch(batch_size)
        steps = place.steps_of_rows(batch_size, sizes)
        own, short_by = steps[place.worker - 1], place.short_by(steps)
        return cls(rows, window, rule.partition == _EQUAL, sizes, own, short_by)

    def num_own(self, place: WorkerPlace) -> int:
        """Return how many of the rows are this worker's in an epoch."""
        if not self.is_dealt:
            return len(self.rows)
        whole, rest = divmod(len(self.rows), self.window)
        return whole * place.num_dealt(self.window) + place.num_dealt(rest)

    def rows_of_epoch(self, epoch: int, shuffle: Any, place: WorkerPlace) -> NDArray[np.int64]:
        """Return the rows of this worker's batches of an epoch, one batch behind the other.

        Args:
            epoch: Its number within the fit, from 0.
            shuffle: As `fit` has it: True, False or "batch".
            place: This worker's.
        """
        rows = self.rows
        if _reorders(shuffle):
            whose = 0 if self.is_dealt else place.worker
            seed = [place.rule.seed, place.fits_before, epoch, whose, _ORDERS]
            rows = np.random.default_rng(seed).permutation(rows)
        if self.is_dealt:
            total, window = len(rows), self.window
            rows = np.concatenate(
                [
                    rows[start + place.positions(min(window, total - start), epoch, number)]
                    for number, start in enumerate(range(0, total, window))
                ]
            )
        return rows


def _batches(given: dict[str, Any], shares: _Shares, place: WorkerPlace) -> dict[str, Any]:
    """Return the arguments of `fit` that replace the arrays by this worker's batches of them.

    Each epoch deals the rows in another way, so that no worker's part can be cut off beforehand.
    The arrays stay whole, and are not copied: a batch gathers its rows. The epoch is counted here,
    because Keras repeats its own shuffle in each epoch where TensorFlow's seed is set, as the
    launcher sets it.
    """
    adapter = ArrayDataAdapter(
        given.get("x"),
        given.get("y"),
        sample_weight=given.get("sample_weight"),
        class_weight=given.get("class_weight"),
        batch_size=given["batch_size"],
    )
    arrays = tree.lists_to_tuples(
        array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    )
    size, shuffle = given["batch_size"], given.get("shuffle", True)
    # A model may need the size of a batch; as in Keras it is fixed where all batches have it.
    shape = [size if shares.num_own(place) % size == 0 else None]

    def rows_of_epoch(epoch: Any) -> NDArray[np.int64]:
        return shares.rows_of_epoch(int(epoch), shuffle, place)

    def batches_of_epoch(epoch: Any) -> Any:
        rows = tf.numpy_function(rows_of_epoch, [epoch], tf.int64)

        def batch(number: Any) -> Any:
            return tf.ensure_shape(rows[number * size : (number + 1) * size], shape)

        return tf.data.Dataset.range(shares.num_batches).map(as_traced(batch))

    rows = count_epochs().flat_map(as_traced(batches_of_epoch))
    batches = tf.data.Dataset.zip((rows, tf.data.Dataset.from_tensors(arrays).repeat())).map(
        as_traced(_gather), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    known = tf.data.experimental.assert_cardinality(shares.num_batches)
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
