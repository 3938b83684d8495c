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
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.arrays import steps_of_worker, take_rows
from thinwire.script.data.place import BatchParts, Rounds, Shared, WorkerPlace, deal
from thinwire.script.data.rounds import EvenRounds, UnknownRounds, check_rows
from thinwire.script.data.rows import arrays_of_rows, map_rows, num_rows

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
        return Shared(given, parts=BatchParts.alike(place), rounds=_unshared_rounds(place))
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
    if sizes.num_examples is None:
        given["steps_per_epoch"] = place.steps(steps) if steps else None
    else:
        given["steps_per_epoch"] = steps_of_worker(given, sizes.num_examples, sizes.first, place)
    if steps and given["steps_per_epoch"]:
        short_by, of_batches = 0, BatchParts.of_steps(place, steps)
    else:
        short_by, of_batches = mine.short_by if place.one_group else 0, mine.parts
    rounds = _rounds(mine, place, given["steps_per_epoch"])
    return Shared(given, sizes.first, sizes.num_examples, short_by, of_batches, rounds)


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
    """Rows of a PyDataset's first and last batch, and how many batches there are.

    Attributes:
        of_rows: Whether an array has a row of each example, for each array of a batch.
    """

    num_batches: int | None  # None: no end
    first: int
    last: int
    of_rows: tuple[bool, ...]

    @classmethod
    def of(cls, dataset: Any) -> _Sizes:
        number = dataset.num_batches
        if number is not None and number < 1:
            raise ConfigurationError(
                "the PyDataset given to fit has no batches; expected at least one."
            )
        batch = dataset[0]
        first, of_rows = num_rows(batch), arrays_of_rows(batch)
        last = first if number is None else num_rows(dataset[number - 1])
        return cls(number, first, last, of_rows)

    @property
    def num_examples(self) -> int | None:
        """Rows in all, where every batch but the last is as the first; None if there is no end."""
        if self.num_batches is None:
            return None
        return (self.num_batches - 1) * self.first + self.last


class SharedBatches(keras.utils.PyDataset):
    """A worker's part of a PyDataset.

    Where each worker trains on whole batches, it has one of each window of as many batches as there
    are workers. Where it takes a part of each batch, there are two ways. With the script's own
    order every worker makes each batch and keeps its part of the rows, so that a step is the
    script's. Else a worker makes one batch of each window only and trains on that in n steps; the
    few batches of the last window are shared by rows. Both have as many steps as the script.
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
        self._of_rows = sizes.of_rows
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

    @property
    def parts(self) -> BatchParts:
        """How much of the script's batches each step is: a short last one is one worker's."""
        place = self._place
        if not (self._last_is_short and place.worker == 1):
            return BatchParts.alike(place)
        return BatchParts(place.parts_of_batch, self.num_batches, place.num_workers)

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
        rows = num_rows(batch)
        if rows < workers:
            raise place.short_batch(rows, f"batch {index} of the PyDataset given to fit")
        positions = self._positions(rows, index, part)
        return map_rows(lambda array: take_rows(array, positions), batch, self._of_rows)

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

    def _positions(self, num_rows: int, index: int, part: int) -> NDArray[np.int64]:
        """Return the positions of one part of a batch's rows, which are dealt to all parts."""
        seed = (self._place.rule.seed, self._place.fits_before, self._epoch, index)
        return np.flatnonzero(deal(num_rows, self._place.num_workers, seed) == part + 1)

    def _dealt(self, window: int, num_batches: int, worker: int) -> list[int]:
        """Return the positions of a worker's batches in a window of whole batches."""
        place = dataclasses.replace(self._place, worker=worker)
        positions: list[int] = place.positions(num_batches, self._epoch, window).tolist()
        return positions

    def _plan_of(self, worker: int) -> list[tuple[int, int]] | None:
        """Return a worker's (batch, part of it) by step of an epoch; None if there is no end."""
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
                    plan += [(indices[position], each) for each in parts]
        if self._last_is_short and part == 0:
            plan.append((last, _WHOLE))
        return plan

    def _endless(self, step: int, worker: int) -> tuple[int, int]:
        place = self._place
        workers = place.num_workers
        if place.divides_batch and not self._shuffled:
            return step, worker - 1
        window, part = divmod(step, workers) if place.divides_batch else (step, _WHOLE)
        return window * workers + self._dealt(window, workers, worker)[0], part


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
