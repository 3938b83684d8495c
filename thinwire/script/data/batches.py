"""Divides a keras.utils.PyDataset, which makes a batch for each index, among workers."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.arrays import steps_of_worker, take_rows
from thinwire.script.data.place import BatchParts, Shared, StepRows, WorkerPlace, deal
from thinwire.script.data.rounds import EvenRounds, UnknownRounds, check_rows
from thinwire.script.data.rows import arrays_of_rows, map_rows, num_rows

#: Number that stands for a whole batch, not a part of one, in a worker's plan of batches.
_WHOLE = -1


def is_py_dataset(data: Any) -> bool:
    """Return True if an object is a keras.utils.PyDataset."""
    return isinstance(data, keras.utils.PyDataset)


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
    fit_arguments, whole = dict(arguments), arguments["x"]
    if not place.is_shared:
        return Shared(fit_arguments, parts=BatchParts.alike(place), rounds=_unshared_rounds(place))
    if place.rule.partition != "iid":
        raise ConfigurationError(
            f"--partition={place.rule.partition} divides only arrays among the workers, but the "
            "script called fit with a PyDataset. Use --partition=iid, or give fit arrays."
        )
    sizes = _Sizes.of(whole)
    if not place.divides_batch and 0 <= (sizes.num_batches or -1) < place.num_workers:
        raise ConfigurationError(
            f"{sizes.num_batches} batches of a PyDataset cannot be divided among "
            f"{place.num_workers} workers; expected at least one batch for each worker. Use "
            f"--nb_workers={sizes.num_batches} at most, or smaller batches."
        )
    place.part_of_batch(sizes.first)
    part = SharedBatches(whole, place, sizes, bool(fit_arguments.get("shuffle", True)))
    fit_arguments["x"], fit_arguments["shuffle"] = part, False
    steps = fit_arguments.get("steps_per_epoch")
    if sizes.num_examples is None:
        fit_arguments["steps_per_epoch"] = place.steps(steps) if steps else None
    else:
        fit_arguments["steps_per_epoch"] = steps_of_worker(
            fit_arguments, sizes.num_examples, sizes.first, place
        )
    if steps and fit_arguments["steps_per_epoch"]:
        short_by, batch_parts = 0, BatchParts.of_steps(place, steps)
    else:
        short_by, batch_parts = part.short_by if place.one_group else 0, part.parts
    rounds = _rounds(part, place, fit_arguments["steps_per_epoch"])
    return Shared(fit_arguments, sizes.first, sizes.num_examples, short_by, batch_parts, rounds)


def _unshared_rounds(place: WorkerPlace) -> StepRows | None:
    """Return the row counts of all workers in each step, for a script that divides its data."""
    if not place.divides_batch:
        return None
    if not place.one_group:
        return EvenRounds(place.num_workers)
    return UnknownRounds("the script gives each worker a different PyDataset")


def _rounds(mine: SharedBatches, place: WorkerPlace, steps: int | None) -> StepRows | None:
    """Return the row counts of all workers in each step; None if workers do not divide batches."""
    if not place.divides_batch:
        return None
    if not place.one_group:
        return EvenRounds(place.num_workers)
    if steps and not mine.is_even:
        return UnknownRounds(
            "fit was given steps_per_epoch and a PyDataset that ends with a short batch"
        )
    return mine


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


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Number of batches of a PyDataset, and number of rows of its first and last batch.

    Attributes:
        num_batches: Number of batches in an epoch; None if the PyDataset has no end.
        first: Number of rows in the first batch of the PyDataset.
        last: Number of rows in the last batch of the PyDataset; equal to `first` if the PyDataset
            has no end.
        of_rows: For each array of a batch, True if the array has one row for each example.
    """

    num_batches: int | None
    first: int
    last: int
    of_rows: tuple[bool, ...]

    @classmethod
    def of(cls, dataset: Any) -> _Sizes:
        number = dataset.num_batches
        if number is not None and number < 1:
            raise ConfigurationError(
                "the PyDataset given to fit has no batches; expected at least one batch."
            )
        batch = dataset[0]
        first, of_rows = num_rows(batch), arrays_of_rows(batch)
        last = first if number is None else num_rows(dataset[number - 1])
        return cls(number, first, last, of_rows)

    @property
    def num_examples(self) -> int | None:
        """Number of rows in an epoch if only its last batch may be short; None: it has no end."""
        if self.num_batches is None:
            return None
        return (self.num_batches - 1) * self.first + self.last


class SharedBatches(keras.utils.PyDataset):
    """A PyDataset with one worker's part of the batches of the script's PyDataset.

    A window is n successive batches of the script in a run of n workers. If workers train on whole
    batches, each worker gets one batch of each window of n batches. If workers divide batches, a
    worker has as many steps as the script has batches. Without shuffling, every worker makes each
    batch and keeps its part of the rows, so that the workers' k-th steps together are the script's
    k-th batch. With shuffling, a worker makes one batch of each window and trains on the n parts of
    this batch in n steps, so that only one worker makes each batch. If fewer than n batches are
    left for the last window, their rows are divided among all n workers.
    """

    def __init__(
        self, whole: keras.utils.PyDataset, place: WorkerPlace, sizes: _Sizes, shuffled: bool
    ) -> None:
        """Plan the steps of the first epoch of a worker.

        Args:
            whole: PyDataset that the script passes to `fit`.
            place: This worker's number in the run, and the rules that divide the training data
                among workers.
            sizes: Number and sizes of the batches of the PyDataset `whole`.
            shuffled: True if `fit` shuffles the batches of each epoch.
        """
        super().__init__(whole.workers, whole.use_multiprocessing, whole.max_queue_size)
        self._whole, self._place, self._shuffled = whole, place, shuffled
        self._of_rows = sizes.of_rows
        # Worker 1 takes a last batch with fewer rows than the run has workers; it is not divided.
        self._last_is_short = place.divides_batch and sizes.last < place.num_workers
        self._sizes = sizes
        self._epoch = 0
        self._plan = self._plan_of(place.worker)
        # For each worker, its plan of batches for the epoch; None until `num_rows` needs the plans.
        self._plans: list[list[tuple[int, int]] | None] | None = None
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
        return None if self._plan is None else len(self._plan)

    @property
    def short_by(self) -> int:
        """Number of steps by which this worker's epoch is shorter than the longest worker's."""
        number = self._whole.num_batches
        if number is None or self._plan is None:
            return 0
        place = self._place
        longest = number if place.divides_batch else -(-number // place.num_workers)
        short: int = longest - len(self._plan)
        return short

    @property
    def parts(self) -> BatchParts:
        """Number of parts of the script's batch in each step of this worker, for rate schedules."""
        place = self._place
        if not (self._last_is_short and place.worker == 1):
            return BatchParts.alike(place)
        return BatchParts(place.parts_of_batch, self.num_batches, place.num_workers)

    def __getitem__(self, step: int) -> Any:
        """Return the rows that this worker trains on in one step of the epoch, as a batch."""
        place, plan = self._place, self._plan
        index, part = self._endless(step, place.worker) if plan is None else plan[step]
        if part == _WHOLE:
            return self._whole[index]
        workers = place.num_workers
        with self._lock:
            cached_batch = self._made.setdefault(index, _MadeBatch())
            cached_batch.num_parts += 1
            if cached_batch.num_parts == (workers if self._shuffled else 1):
                del self._made[index]
        batch = cached_batch.get(self._whole, index)
        rows = num_rows(batch)
        if rows < workers:
            raise place.short_batch(rows, f"batch {index} of the PyDataset given to fit")
        positions = self._positions(rows, index, part)
        return map_rows(lambda array: take_rows(array, positions), batch, self._of_rows)

    def on_epoch_begin(self) -> None:
        """Run the script's `on_epoch_begin` with the same random numbers on all workers."""
        with same_randomness(self._whole, self._place, 2 * self._epoch):
            self._whole.on_epoch_begin()
        number = self._whole.num_batches
        if self._shuffled and number is not None:
            # At this point Keras would draw the order of the batches. Drawing an order of the same
            # length leaves Python's random generator in the state that it has without Thinwire, so
            # that a model that the script builds later gets the same initial weights.
            random.shuffle(list(range(number)))

    def on_epoch_end(self) -> None:
        """Run the script's `on_epoch_end` with the same random numbers on all workers."""
        with same_randomness(self._whole, self._place, 2 * self._epoch + 1):
            self._whole.on_epoch_end()
        self._epoch += 1
        self._plan, self._plans = self._plan_of(self._place.worker), None
        self._made = {}

    @property
    def is_even(self) -> bool:
        """True if the script's last batch has as many rows as the script's first batch."""
        return self._sizes.last == self._sizes.first

    def num_rows(self, step: int, own: int) -> int:
        """Return the number of rows that all workers together train on in a step."""
        place = self._place
        plans = self._plans
        if plans is None:
            plans = self._plans = [self._plan_of(n + 1) for n in range(place.num_workers)]
        rows = [self._rows_of(plan, worker, step) for worker, plan in enumerate(plans, 1)]
        check_rows(step, own, rows[place.worker - 1])
        return sum(rows)

    def _rows_of(self, plan: list[tuple[int, int]] | None, worker: int, step: int) -> int:
        """Return the number of rows in a worker's step; 0 after the worker's last step."""
        if plan is None:
            index, part = self._endless(step, worker)
        elif step < len(plan):
            index, part = plan[step]
        else:
            return 0
        number, sizes = self._whole.num_batches, self._sizes
        rows = sizes.last if number is not None and index == number - 1 else sizes.first
        return rows if part == _WHOLE else len(range(part, rows, self._place.num_workers))

    def _positions(self, num_rows: int, index: int, part: int) -> NDArray[np.int64]:
        """Return the positions of one worker's rows within a batch."""
        seed = (self._place.rule.seed, self._place.fits_before, self._epoch, index)
        return np.flatnonzero(deal(num_rows, self._place.num_workers, seed) == part + 1)

    def _dealt(self, window: int, num_batches: int, worker: int) -> list[int]:
        """Return the positions of one worker's batches within a window of successive batches."""
        place = dataclasses.replace(self._place, worker=worker)
        positions: list[int] = place.positions(num_batches, self._epoch, window).tolist()
        return positions

    def _plan_of(self, worker: int) -> list[tuple[int, int]] | None:
        """Return a worker's steps in an epoch as pairs (batch, part); None if it has no end."""
        number = self._whole.num_batches
        if number is None:
            return None
        place, last = self._place, number - 1
        part, workers = worker - 1, place.num_workers
        order = list(range(last if self._last_is_short else number))
        if self._shuffled:
            seed = [place.rule.seed, self._epoch, place.fits_before]
            order = np.random.default_rng(seed).permutation(order).tolist()
        windows = [order[start : start + workers] for start in range(0, len(order), workers)]
        if place.divides_batch and not self._shuffled:
            plan = [(index, part) for index in order]
        else:
            plan = []
            for window, indices in enumerate(windows):
                if place.divides_batch and len(indices) < workers:
                    plan += [(index, part) for index in indices]
                    continue
                for position in self._dealt(window, len(indices), worker):
                    parts = range(workers) if place.divides_batch else [_WHOLE]
                    plan += [(indices[position], part_number) for part_number in parts]
        if self._last_is_short and part == 0:
            plan.append((last, _WHOLE))
        return plan

    def _endless(self, step: int, worker: int) -> tuple[int, int]:
        """Return the pair (batch, part) of a worker's step, for a PyDataset without end."""
        place = self._place
        workers = place.num_workers
        if place.divides_batch and not self._shuffled:
            return step, worker - 1
        window, part = divmod(step, workers) if place.divides_batch else (step, _WHOLE)
        return window * workers + self._dealt(window, workers, worker)[0], part


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


@contextlib.contextmanager
def same_randomness(dataset: Any, place: WorkerPlace, number: int) -> Iterator[None]:
    """Make all random generators draw the same numbers on every worker in the `with` block.

    The random generators are the global generators of Python and NumPy, and the random generators
    in attributes of the PyDataset. At the end of the `with` block, the random generators return to
    their states before the block. Workers compute different batches, so the states of their random
    generators differ. So the random generators get new, common seeds in each `with` block, which
    make the draws of all workers equal.

    Args:
        dataset: PyDataset whose attributes may be random generators.
        place: This worker's place in the run, with the number of the call of `fit`. Python and
            NumPy draw different numbers in each `fit`. The dataset's random generators draw
            different numbers in each `fit` on the same dataset. A dataset that the script creates
            for each `fit` draws equal numbers in each `fit`, as it does without Thinwire.
        number: Number of the `with` block within one call of `fit`. Each number gives different
            random draws.
    """
    seed = place.rule.seed
    generators = [value for value in vars(dataset).values() if isinstance(value, _GENERATORS)]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    states = [_state(generator) for generator in generators]
    uses = 0 if place.fit is None else place.fit.uses
    common = np.random.SeedSequence([seed, number, place.fits_before])
    sequence = np.random.SeedSequence([seed, number, uses])
    random.seed(f"{seed} {number} {place.fits_before}")
    np.random.seed(common.generate_state(4))
    for generator, child in zip(generators, sequence.spawn(len(generators)), strict=True):
        _reseed(generator, child)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in zip(generators, states, strict=True):
            _restore(generator, state)


_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _reseed(generator: Any, sequence: np.random.SeedSequence) -> None:
    if isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(sequence).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(sequence.generate_state(4))
    else:
        generator.seed(int(sequence.generate_state(1)[0]))
