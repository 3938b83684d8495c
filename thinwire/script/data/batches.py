"""Divides a keras.utils.PyDataset, which makes a batch for each index, among workers."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from typing import Any

import keras
import numpy as np

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.arrays import steps_of_worker, take_rows
from thinwire.script.data.common_randomness import same_randomness
from thinwire.script.data.place import BatchParts, Shared, StepRows, WorkerPlace
from thinwire.script.data.rows import arrays_of_rows, map_rows, num_rows

#: Number that stands for a whole batch, not a part of one, in a worker's plan of batches.
_WHOLE = -1


def share_batches(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of a PyDataset that the script passes to `fit` as x.

    Args:
        arguments: Arguments of the call of Keras' `fit`, by name.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Raises:
        ConfigurationError: The flag --partition is not iid, the PyDataset has fewer batches than
            workers, or a batch that workers divide has fewer rows than the run has workers.
    """
    fit_arguments, whole, rounds = dict(arguments), arguments["x"], None
    if not place.is_shared:
        if place.divides_batch:
            rounds = StepRows(place, None, "the script gives each worker a different PyDataset")
        return Shared(fit_arguments, parts=BatchParts.alike(place), rounds=rounds)
    place.check_partition("PyDataset")
    part = SharedBatches(whole, place, bool(fit_arguments.get("shuffle", True)))
    if not place.divides_batch and 0 <= (whole.num_batches or -1) < place.num_workers:
        raise ConfigurationError(
            f"{whole.num_batches} batches of a PyDataset cannot be divided among "
            f"{place.num_workers} workers; expected at least one batch for each worker. Use "
            f"--nb_workers={whole.num_batches} at most, or smaller batches."
        )
    place.part_of_batch(part.first)
    fit_arguments["x"], fit_arguments["shuffle"] = part, False
    steps, short_by, batch_parts = arguments.get("steps_per_epoch"), 0, part.parts
    own_steps = steps_of_worker(fit_arguments, part.num_examples, part.first, place)
    fit_arguments["steps_per_epoch"] = own_steps
    if steps and own_steps:
        batch_parts = BatchParts.of_steps(place, steps)
    elif place.one_group:
        short_by = part.short_by
    if place.divides_batch and own_steps and part.last != part.first:
        reason = "fit was given steps_per_epoch and a PyDataset that ends with a short batch"
        rounds = StepRows(place, None, reason)
    elif place.divides_batch:
        rounds = StepRows(place, part.rows_of_step)
    return Shared(fit_arguments, part.first, part.num_examples, short_by, batch_parts, rounds)


def part_of_batches(dataset: keras.utils.PyDataset, place: WorkerPlace) -> keras.utils.PyDataset:
    """Return a PyDataset of this worker's batches, in the order of the script's PyDataset.

    Raises:
        ConfigurationError: The flag --partition is not iid, or the PyDataset has fewer batches than
            workers.
    """
    alone = dataclasses.replace(place, batch="worker")
    part: keras.utils.PyDataset = share_batches({"x": dataset, "shuffle": False}, alone).arguments[
        "x"
    ]
    return part


class SharedBatches(keras.utils.PyDataset):
    """A PyDataset with one worker's part of the batches of the script's PyDataset.

    A window is n successive batches of the script in a run of n workers. If workers train on whole
    batches, each worker gets one batch of each window of n batches. If workers divide batches, a
    worker has as many steps as the script has batches. Without shuffling, every worker makes each
    batch and keeps its part of the rows, so that the workers' k-th steps together are the script's
    k-th batch. With shuffling, a worker makes one batch of each window and trains on the n parts of
    this batch in n steps, so that only one worker makes each batch. If fewer than n batches are
    left for the last window, their rows are divided among all n workers.

    Attributes:
        first: Number of rows in the first batch of the script's PyDataset.
        last: Number of rows in its last batch; equal to `first` if the PyDataset has no end.
        num_examples: Number of rows in an epoch if only its last batch may be short; None if the
            PyDataset has no end.
    """

    def __init__(self, whole: keras.utils.PyDataset, place: WorkerPlace, shuffled: bool) -> None:
        """Prepare the steps of the first epoch of a worker.

        Args:
            whole: PyDataset that the script passes to `fit`.
            place: This worker's number in the run, and the rules that divide the training data
                among workers.
            shuffled: True if `fit` shuffles the batches of each epoch.
        """
        super().__init__(whole.workers, whole.use_multiprocessing, whole.max_queue_size)
        self._whole, self._place, self._shuffled = whole, place, shuffled
        number = whole.num_batches
        if number is not None and number < 1:
            raise ConfigurationError(
                "the PyDataset given to fit has no batches; expected at least one batch."
            )
        batch, self.num_examples = whole[0], None
        self.first = self.last = num_rows(batch)
        # for each array of a batch, True if the array has one row for each example
        self._of_rows = arrays_of_rows(batch)
        if number is not None:
            self.last = num_rows(whole[number - 1])
            self.num_examples = (number - 1) * self.first + self.last
        # Worker 1 takes a last batch with fewer rows than the run has workers; it is not divided.
        self._last_is_short = place.divides_batch and self.last < place.num_workers
        self._epoch = 0
        self._order = self._order_of_epoch()
        self._made: dict[int, _MadeBatch] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the PyDataset's state for a loading process, without computed batches and lock."""
        return {**self.__dict__, "_made": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def num_batches(self) -> int | None:
        """Number of this worker's steps in an epoch; None if the PyDataset has no end."""
        if self._whole.num_batches is None:
            return None
        if not self._place.divides_batch:
            return self._place.num_dealt(len(self._order))
        return len(self._order) + (self._last_is_short and self._place.worker == 1)

    @property
    def short_by(self) -> int:
        """Number of steps by which this worker's epoch is shorter than the longest worker's."""
        number, own, place = self._whole.num_batches, self.num_batches, self._place
        if number is None or own is None:
            return 0
        longest: int = number if place.divides_batch else place.num_dealt(number, worker=1)
        return longest - own

    @property
    def parts(self) -> BatchParts:
        """Number of parts of the script's batch in each step of this worker, for rate schedules."""
        place = self._place
        if not (self._last_is_short and place.worker == 1):
            return BatchParts.alike(place)
        return BatchParts(place.parts_of_batch, self.num_batches, place.num_workers)

    def __getitem__(self, step: int) -> Any:
        """Return the rows that this worker trains on in one step of the epoch, as a batch."""
        place, workers = self._place, self._place.num_workers
        index, part = self._parts_of_step(step)[place.worker - 1]
        if part == _WHOLE:
            return self._whole[index]
        with self._lock:
            cached_batch = self._made.setdefault(index, _MadeBatch())
            cached_batch.num_parts += 1
            if cached_batch.num_parts == (workers if self._shuffled else 1):
                del self._made[index]
        batch = cached_batch.get(self._whole, index)
        rows = num_rows(batch)
        if rows < workers:
            raise place.short_batch(rows, f"batch {index} of the PyDataset given to fit")
        positions = np.flatnonzero(place.owners(rows, self._epoch, index) == part + 1)
        return map_rows(lambda array: take_rows(array, positions), batch, self._of_rows)

    def on_epoch_begin(self) -> None:
        """Run the script's `on_epoch_begin` with the same random numbers on all workers."""
        with same_randomness([self._whole], self._place, 2 * self._epoch):
            self._whole.on_epoch_begin()
        number = self._whole.num_batches
        if self._shuffled and number is not None:
            # At this point Keras would draw the order of the batches. Drawing an order of the same
            # length leaves Python's random generator in the state that it has without Thinwire, so
            # that a model that the script builds later gets the same initial weights.
            random.shuffle(list(range(number)))

    def on_epoch_end(self) -> None:
        """Run the script's `on_epoch_end` with the same random numbers on all workers."""
        with same_randomness([self._whole], self._place, 2 * self._epoch + 1):
            self._whole.on_epoch_end()
        self._epoch += 1
        self._order = self._order_of_epoch()
        self._made = {}

    def rows_of_step(self, step: int) -> list[int]:
        """Return the number of rows of each worker in a step; 0 after a worker's last step."""
        number, workers = self._whole.num_batches, self._place.num_workers
        rows = [0] * workers
        for worker, (index, part) in enumerate(self._parts_of_step(step)):
            size = self.last if number is not None and index == number - 1 else self.first
            rows[worker] = size if part == _WHOLE else len(range(part, size, workers))
        return rows

    def _order_of_epoch(self) -> Any:
        """Return the indices of the script's batches in an epoch, without a last batch that is not
        divided.
        """
        place, number = self._place, self._whole.num_batches
        if number is None:
            return range(sys.maxsize)
        order = range(number - self._last_is_short)
        if not self._shuffled:
            return order
        seed = [place.rule.seed, self._epoch, place.fits_before]
        return np.random.default_rng(seed).permutation(order).tolist()

    def _parts_of_step(self, step: int) -> list[tuple[int, int]]:
        """Return the pairs (batch, part) of the first workers, which have rows in a step."""
        place, workers, order = self._place, self._place.num_workers, self._order
        if place.divides_batch and step == len(order) and self._last_is_short:
            return [(step, _WHOLE)]
        is_rest = step >= len(order) // workers * workers
        if place.divides_batch and (not self._shuffled or is_rest):
            return [(index, part) for index in order[step : step + 1] for part in range(workers)]
        window, part = divmod(step, workers) if place.divides_batch else (step, _WHOLE)
        indices = order[window * workers : (window + 1) * workers]
        # in a window of at most n batches, each of the first workers has one batch
        owners = place.owners(len(indices), self._epoch, window)
        return [(indices[position], part) for position in np.argsort(owners)]


class _MadeBatch:
    """A batch from which several steps take rows; the first of these steps computes the batch."""

    def __init__(self) -> None:
        self.num_parts = 0  # number of parts of the batch that steps have trained on so far
        self._lock = threading.Lock()
        self._batch: Any = None

    def get(self, dataset: Any, index: int) -> Any:
        with self._lock:
            if self._batch is None:
                self._batch = dataset[index]
            return self._batch
