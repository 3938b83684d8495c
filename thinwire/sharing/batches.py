"""Sharing a keras.utils.PyDataset, which makes batches of its own, by their index."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from thinwire.ops.types import ConfigurationError
from thinwire.sharing.arrays import take_rows
from thinwire.sharing.place import Rounds, Shared, WorkerPlace
from thinwire.sharing.rounds import EvenRounds, UnknownRounds, check_rows

#: A whole batch, instead of the number of a part of its rows.
_WHOLE = -1


def is_py_dataset(data: Any) -> bool:
    """Return whether Keras would take this as a PyDataset."""
    return isinstance(data, keras.utils.PyDataset)


def share_batches(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of a PyDataset that `fit` was given as x.

    Args:
        arguments: Of Keras' fit, by name.
        place: This worker's.

    Raises:
        ConfigurationError: There are fewer batches than workers, or fewer rows in one.
    """
    given, whole = dict(arguments), arguments["x"]
    if not place.is_shared:
        return Shared(given, rounds=_unshared_rounds(place))
    if place.rule.partition != "iid":
        raise ConfigurationError(
            f"--partition={place.rule.partition} deals out arrays, and fit was given a PyDataset. "
            "Use --partition=iid, or give fit arrays."
        )
    sizes = _Sizes.of(whole)
    if not place.divides_batch and 0 <= (sizes.num_batches or -1) < place.num_workers:
        raise ConfigurationError(
            f"{sizes.num_batches} batches of a PyDataset cannot be shared by {place.num_workers} "
            f"workers; expected at least one each. Use --nb_workers={sizes.num_batches} at most, "
            "or smaller batches."
        )
    place.part_of_batch(sizes.first)
    mine = SharedBatches(whole, place, sizes, bool(given.get("shuffle", True)))
    given["x"], given["shuffle"] = mine, False
    steps = given.get("steps_per_epoch")
    if steps:
        given["steps_per_epoch"] = place.steps(steps)
    short_by = 0 if steps or not place.one_group else mine.short_by
    return Shared(given, sizes.first, sizes.num_examples, short_by, _rounds(mine, place, steps))


def _unshared_rounds(place: WorkerPlace) -> Rounds | None:
    """Return the rows of all workers' steps where the script gives each worker its own batches."""
    if not place.divides_batch:
        return None
    if not place.one_group:
        return EvenRounds(place.num_workers)
    return UnknownRounds("the script gives each worker a PyDataset of its own")


def _rounds(mine: SharedBatches, place: WorkerPlace, steps: int | None) -> Rounds | None:
    """Return the rows of all workers' steps, where they divide batches."""
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
    """Return a PyDataset of this worker's batches, in their order.

    Raises:
        ConfigurationError: As `share_batches`.
    """
    alone = dataclasses.replace(place, batch="worker")
    part: keras.utils.PyDataset = share_batches({"x": dataset, "shuffle": False}, alone).arguments[
        "x"
    ]
    return part


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Rows of a PyDataset's first and last batch, and how many batches there are."""

    num_batches: int | None  # None: no end
    first: int
    last: int

    @classmethod
    def of(cls, dataset: Any) -> _Sizes:
        number = dataset.num_batches
        if number is not None and number < 1:
            raise ConfigurationError(
                "the PyDataset given to fit has no batches; expected at least one."
            )
        first = _num_rows(dataset[0])
        return cls(number, first, first if number is None else _num_rows(dataset[number - 1]))

    @property
    def num_examples(self) -> int | None:
        """Rows in all, where every batch but the last is as the first; None if there is no end."""
        if self.num_batches is None:
            return None
        return (self.num_batches - 1) * self.first + self.last


def _num_rows(batch: Any) -> int:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return int(leaves[0].shape[0] if hasattr(leaves[0], "shape") else len(leaves[0]))


class SharedBatches(keras.utils.PyDataset):
    """A worker's part of a PyDataset.

    Where each worker trains on whole batches, these are every n-th of an epoch's order. Where it
    takes a part of each batch, there are two ways. With the script's own order every worker makes
    each batch and keeps its part of the rows, so that a step is the script's. Else a worker makes
    every n-th batch only and trains on that in n steps; the few that are left over are shared by
    rows. Both have as many steps as the script.
    """

    def __init__(
        self, whole: keras.utils.PyDataset, place: WorkerPlace, sizes: _Sizes, shuffled: bool
    ) -> None:
        """Begin the first epoch.

        Args:
            whole: The script's.
            place: This worker's.
            sizes: Of the script's.
            shuffled: Whether `fit` shuffles the batches of each epoch.
        """
        super().__init__(whole.workers, whole.use_multiprocessing, whole.max_queue_size)
        self._whole, self._place, self._shuffled = whole, place, shuffled
        # A last batch with fewer rows than workers is one worker's.
        self._last_is_short = place.divides_batch and sizes.last < place.num_workers
        self._sizes = sizes
        self._epoch = 0
        self._plan = self._plan_of(place.worker)
        self._plans: list[list[tuple[int, int]] | None] | None = None  # of all, in this epoch
        self._made: dict[int, _MadeBatch] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Go to another process without the batches made here."""
        return {**self.__dict__, "_made": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def num_batches(self) -> int | None:
        """This worker's steps of an epoch; None if there is no end."""
        return None if self._plan is None else len(self._plan)

    @property
    def short_by(self) -> int:
        """Steps by which this worker's epoch is shorter than the longest."""
        number = self._whole.num_batches
        if number is None or self._plan is None:
            return 0
        place = self._place
        longest = number if place.divides_batch else -(-number // place.num_workers)
        short: int = longest - len(self._plan)
        return short

    def __getitem__(self, step: int) -> Any:
        """Return what this worker trains on in a step of the epoch."""
        place, plan = self._place, self._plan
        index, part = self._endless(step, place.worker) if plan is None else plan[step]
        if part == _WHOLE:
            return self._whole[index]
        workers = place.num_workers
        with self._lock:
            made = self._made.setdefault(index, _MadeBatch())
            made.num_parts += 1
            if made.num_parts == (workers if self._shuffled else 1):
                del self._made[index]
        batch = made.get(self._whole, index)
        rows = _num_rows(batch)
        if part >= rows:
            raise ConfigurationError(
                f"batch {index} of the PyDataset has {rows} rows, which {workers} workers cannot "
                "share; expected at least one each. Give --batch=worker, with which each worker "
                "takes whole batches."
            )
        return take_rows(batch, np.arange(part, rows, workers))

    def on_epoch_begin(self) -> None:
        """Let the script's begin an epoch, with the same random numbers on all workers."""
        with same_randomness(self._whole, self._place, 2 * self._epoch):
            self._whole.on_epoch_begin()
        number = self._whole.num_batches
        if self._shuffled and number is not None:
            # Keras would draw the order of the batches here. The script then goes on with the
            # random numbers that it has alone: a model built later has the same initial weights.
            random.shuffle(list(range(number)))

    def on_epoch_end(self) -> None:
        """Let the script's end an epoch, with the same random numbers on all workers."""
        with same_randomness(self._whole, self._place, 2 * self._epoch + 1):
            self._whole.on_epoch_end()
        self._epoch += 1
        self._plan, self._plans = self._plan_of(self._place.worker), None
        self._made = {}

    @property
    def is_even(self) -> bool:
        """Whether all batches of the script have as many rows."""
        return self._sizes.last == self._sizes.first

    def num_rows(self, step: int, own: int) -> int:
        """Return the rows of all workers in a step; see `Rounds`."""
        place = self._place
        plans = self._plans
        if plans is None:
            plans = self._plans = [self._plan_of(n + 1) for n in range(place.num_workers)]
        rows = [self._rows_of(plan, worker, step) for worker, plan in enumerate(plans, 1)]
        check_rows(step, own, rows[place.worker - 1])
        return sum(rows)

    def _rows_of(self, plan: list[tuple[int, int]] | None, worker: int, step: int) -> int:
        """Return the rows of a worker's step."""
        if plan is None:
            index, part = self._endless(step, worker)
        elif step < len(plan):
            index, part = plan[step]
        else:
            return 0
        number, sizes = self._whole.num_batches, self._sizes
        rows = sizes.last if number is not None and index == number - 1 else sizes.first
        return rows if part == _WHOLE else len(range(part, rows, self._place.num_workers))

    def _plan_of(self, worker_number: int) -> list[tuple[int, int]] | None:
        """Return a worker's (batch, part of it) by step of an epoch; None if there is no end."""
        number = self._whole.num_batches
        if number is None:
            return None
        place, last = self._place, number - 1
        worker, workers = worker_number - 1, place.num_workers
        order = list(range(last if self._last_is_short else number))
        if self._shuffled:
            seed = [place.rule.seed, self._epoch, place.fits_before]
            order = np.random.default_rng(seed).permutation(order).tolist()
        if not place.divides_batch:
            return [(index, _WHOLE) for index in order[worker::workers]]
        if not self._shuffled:
            plan = [(index, worker) for index in order]
        else:
            blocks = len(order) // workers * workers
            mine = order[worker:blocks:workers]
            plan = [(index, part) for index in mine for part in range(workers)]
            plan += [(index, worker) for index in order[blocks:]]
        if self._last_is_short and worker == 0:
            plan.append((last, _WHOLE))
        return plan

    def _endless(self, step: int, worker_number: int) -> tuple[int, int]:
        place = self._place
        worker, workers = worker_number - 1, place.num_workers
        if not place.divides_batch:
            return step * workers + worker, _WHOLE
        if not self._shuffled:
            return step, worker
        return step // workers * workers + worker, step % workers


class _MadeBatch:
    """A batch that several steps take their parts of; made once, by whichever thread is first."""

    def __init__(self) -> None:
        self.num_parts = 0  # that steps have taken
        self._lock = threading.Lock()
        self._batch: Any = None

    def get(self, dataset: Any, index: int) -> Any:
        with self._lock:
            if self._batch is None:
                self._batch = dataset[index]
            return self._batch


@contextlib.contextmanager
def same_randomness(dataset: Any, place: WorkerPlace, number: int) -> Iterator[None]:
    """Let Python, NumPy and a dataset's own generators draw the same on every worker.

    Afterwards they go on where they were: how many numbers the making of batches drew differs.

    Args:
        dataset: Whose attributes may be generators.
        place: This worker's. Another `fit` draws other numbers; generators of a data set of its
            own, made for this `fit`, draw those that they drew in the `fit` before, as alone.
        number: Another one draws other numbers, within one `fit`.
    """
    seed = place.rule.seed
    own = [value for value in vars(dataset).values() if isinstance(value, _GENERATORS)]
    python, legacy = random.getstate(), np.random.get_state()
    states = [_state(generator) for generator in own]
    uses = 0 if place.fit is None else place.fit.uses
    common = np.random.SeedSequence([seed, number, place.fits_before])
    sequence = np.random.SeedSequence([seed, number, uses])
    random.seed(f"{seed} {number} {place.fits_before}")
    np.random.seed(common.generate_state(4))
    for generator, child in zip(own, sequence.spawn(len(own)), strict=True):
        _reseed(generator, child)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        for generator, state in zip(own, states, strict=True):
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
