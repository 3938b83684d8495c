"""A worker's place in a run: determines which rows of data the worker trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.data.loading import split_rule
from thinwire.data.partition import PartitionRule
from thinwire.ops.offer import MOST_BATCHES
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import Run
from thinwire.script.data.fit_counts import FitNumber


@dataclasses.dataclass(frozen=True)
class WorkerPlace:
    """A worker's number in a run, and the rules by which the run's workers divide data.

    Args:
        worker: Number of this worker, 1..num_workers.
        num_workers: Number of workers in the run.
        one_group: True if all workers step together: one group that exchanges every mini-batch.
        rule: Rule by which rows are distributed among workers, with the run's seed; its nb_workers
            is `num_workers`.
        batch: "global" if the script's batch size counts for all workers together, so that each
            worker takes a part of the batch; "worker" if it is the batch size of each worker. None:
            "global" if `one_group` is True and Thinwire divides the data, else "worker".
        shard: "auto" if Thinwire divides the script's data; "off" if the script divides its data.
        fit: Number of the call of `fit` that uses the data, which goes into shuffle seeds; None if
            the call is unknown.
        deals_alike: True if each `fit` and each epoch give a worker the same rows.
    """

    worker: int
    num_workers: int
    one_group: bool
    rule: PartitionRule
    batch: str | None = None
    shard: str = "auto"
    fit: FitNumber | None = None
    deals_alike: bool = False

    @classmethod
    def of(cls, run: Run, worker: int) -> WorkerPlace:
        """Return the place of a worker (by its number, from 1) in a run with these settings."""
        return cls(
            worker=worker,
            num_workers=run.nb_workers,
            one_group=run.method.steps_together,
            rule=split_rule(run, run.nb_workers),
            batch=run.data.batch,
            shard=run.data.shard,
        )

    @property
    def fits_before(self) -> int:
        """Number of the script's calls of `fit` before the `fit` that uses the data."""
        return 0 if self.fit is None else self.fit.before

    @property
    def is_shared(self) -> bool:
        """True if Thinwire divides the data among several workers."""
        return self.shard == "auto" and self.num_workers > 1

    @property
    def divides_batch(self) -> bool:
        """True if a worker takes a part of each batch of the script.

        If a script divides its data itself, its batch size is by default the batch size of one
        worker; --batch=global overrides this default.
        """
        if self.num_workers == 1:
            return False
        usual = "global" if self.one_group and self.shard == "auto" else "worker"
        return (self.batch or usual) == "global"

    def in_loop(self) -> WorkerPlace:
        """Return the place for a script's own training loop, for which the script divides data.

        If all workers step together, one step of all workers is one step of the script.
        """
        return dataclasses.replace(self, shard="auto")

    @property
    def parts_of_batch(self) -> int:
        """Number of parts in a worker's mini-batch; a script's batch has `num_workers` parts."""
        return 1 if self.divides_batch else self.num_workers

    def part_of_batch(self, batch_size: int, worker: int = 0) -> int:
        """Return the number of rows that a worker takes of each batch of the script.

        Args:
            batch_size: Number of rows in a full batch of the script.
            worker: Number of the worker; 0 means this worker.

        Raises:
            ConfigurationError: The batch has fewer rows than the run has workers.

        >>> rule = PartitionRule("iid", 3, seed=1)
        >>> [WorkerPlace(i, 3, True, rule).part_of_batch(32) for i in (1, 2, 3)]
        [11, 11, 10]
        """
        if not self.divides_batch:
            return batch_size
        if batch_size < self.num_workers:
            raise ConfigurationError(
                f"a batch of {batch_size} rows cannot be divided among {self.num_workers} "
                "workers: with --batch=global, the default if all workers step together, the "
                "script's batch size is the total of all workers. Expected at least one row for "
                f"each worker: raise the script's batch size to {self.num_workers} or more, or "
                "give --batch=worker, which makes every worker take batches of the script's size."
            )
        return self.num_dealt(batch_size, worker)

    def run_batch(self, batch_size: int) -> int:
        """Return the number of rows in a window, from which each worker makes one batch."""
        return batch_size if self.divides_batch else batch_size * self.num_workers

    def positions(self, num_rows: int, epoch: int, window: int) -> NDArray[np.int64]:
        """Return the positions of this worker's rows in a window, as `deal` distributes the rows.

        Args:
            num_rows: Number of rows in the window.
            epoch: Number of the pass over the data within the fit, from 0.
            window: Number of the window within the epoch, from 0.

        Returns:
            [n] int64, ascending. Each position of the window belongs to exactly one worker.
        """
        fit, epoch = (0, 0) if self.deals_alike else (self.fits_before, epoch)
        seed = (self.rule.seed, fit, epoch, window)
        return np.flatnonzero(deal(num_rows, self.num_workers, seed) == self.worker)

    def num_dealt(self, num_rows: int, worker: int = 0) -> int:
        """Return the number of rows that a worker gets of a window; worker 0 means this worker."""
        return len(range((worker or self.worker) - 1, num_rows, self.num_workers))

    def dealt_rows(self, total: int, window: int) -> tuple[int, ...]:
        """Return the number of rows of each worker if `total` rows are divided window by window.

        >>> WorkerPlace(1, 2, True, PartitionRule("iid", 2, seed=1)).dealt_rows(7, window=5)
        (4, 3)
        """
        num_windows, num_remaining = divmod(total, window)
        workers = range(1, self.num_workers + 1)
        return tuple(
            num_windows * self.num_dealt(window, worker) + self.num_dealt(num_remaining, worker)
            for worker in workers
        )

    def steps_of_rows(
        self, batch_size: int, rows: Sequence[int], drops_rest: bool = False
    ) -> tuple[int, ...]:
        """Return the number of mini-batches of each worker in one pass over its rows.

        Args:
            batch_size: Batch size of the script, in rows.
            rows: Number of rows of each worker.
            drops_rest: True if a last batch with fewer rows is dropped.
        """
        sizes = [self.part_of_batch(batch_size, worker + 1) for worker in range(self.num_workers)]
        pairs = zip(rows, sizes, strict=True)
        return tuple(
            num_rows // size if drops_rest else -(-num_rows // size) for num_rows, size in pairs
        )

    def short_by(self, steps: Sequence[int]) -> int:
        """Return the steps by which this worker's epoch is shorter than a worker's longest epoch.

        Args:
            steps: Number of steps of each worker in an epoch.
        """
        return max(steps) - steps[self.worker - 1] if self.one_group else 0

    def lacks_rows(self, num_rows: int) -> bool:
        """Return True if workers divide batches and a batch has rows, but fewer than workers."""
        return self.divides_batch and 0 < num_rows < self.num_workers

    def short_batch(self, num_rows: int, where: str) -> ConfigurationError:
        """Return the error for a batch within an epoch with fewer rows than the run has workers.

        Args:
            num_rows: Number of rows in the batch.
            where: Name of the batch, as the subject of a sentence: "batch 3 of the PyDataset".
        """
        return ConfigurationError(
            f"{where} has {num_rows} rows, which cannot be divided among {self.num_workers} "
            "workers, and further batches follow it in the same epoch; expected at least one row "
            "for each worker, except in the last batch of an epoch. Change the batch size or the "
            "number of workers, drop the last, smaller batch (drop_remainder=True), call repeat() "
            "before batch(), leave out steps_per_epoch, or give --batch=worker, which makes every "
            "worker take batches of the script's size."
        )

    def steps(self, num_steps: int) -> int:
        """Return this worker's steps for a script that sets a number of steps.

        If workers take parts of each batch, every worker takes all steps. If workers train on whole
        batches, the workers divide the steps. Workers that step together get equal numbers, rounded
        up, because a worker waits in each step for all workers of its group.
        """
        if self.divides_batch or not self.is_shared:
            return num_steps
        if self.one_group:
            return -(-num_steps // self.num_workers)
        return max(1, len(range(self.worker - 1, num_steps, self.num_workers)))


class UnfilledRounds:
    """Counter of rounds (steps of all workers) for which a worker, reading its data, gets no rows.

    A data set with a filter, or from files, does not know its number of rows in advance. If its
    last batch has fewer rows than the run has workers, the workers without rows have one step
    fewer.
    """

    def __init__(self) -> None:
        self._number = 0

    def note(self) -> None:
        """Count one round without rows for this worker."""
        self._number += 1

    def take(self) -> int:
        """Return the number of rounds without rows since the last call of `take`."""
        number, self._number = self._number, 0
        return number


@dataclasses.dataclass(frozen=True)
class BatchParts:
    """Number of batch parts in a worker's mini-batches, by which learning rate schedules advance.

    In a run of n workers a batch of the script has n parts, so that all sums are whole numbers. A
    worker's mini-batch has one part if workers divide each batch, and n parts if it has the
    script's batch size. At the end of a pass over the data the workers may have more short
    mini-batches than the script has batches left. So the last mini-batches of all workers share
    the parts that remain, and a pass advances schedules as far as it does without Thinwire.

    Attributes:
        each: Number of parts in a mini-batch that is not the last of a pass.
        num_steps: Number of this worker's mini-batches in one pass over the data; None if all
            mini-batches have `each` parts.
        last: Number of parts in the last mini-batch of a pass over the data.
    """

    each: int = 1
    num_steps: int | None = None
    last: int = 1

    def of_step(self, step: int) -> int:
        """Return the number of parts in the mini-batch of a step; steps of a `fit` count from 0."""
        ends_pass = self.num_steps is not None and (step + 1) % self.num_steps == 0
        return self.last if ends_pass else self.each

    @classmethod
    def alike(cls, place: WorkerPlace) -> BatchParts:
        """Return the same number of parts for all mini-batches, for data without a known end."""
        return cls(place.parts_of_batch)

    @classmethod
    def of_rows(
        cls, place: WorkerPlace, batch_size: int, rows: Sequence[int], drops_rest: bool = False
    ) -> BatchParts:
        """Return the parts of a worker's mini-batches in a pass over a known number of rows.

        Args:
            place: This worker's place in the run: its number and the rules of division.
            batch_size: Batch size of the script, in rows.
            rows: Number of rows of each worker.
            drops_rest: True if a last batch with fewer rows is dropped.

        >>> places = [WorkerPlace(i, 2, False, PartitionRule("iid", 2, seed=1)) for i in (1, 2)]
        >>> [BatchParts.of_rows(place, 10, [13, 12]).last for place in places]
        [1, 1]
        """
        full = place.steps_of_rows(batch_size, rows, drops_rest=True)
        steps = full if drops_rest else place.steps_of_rows(batch_size, rows)
        num_batches = sum(rows) // batch_size if drops_rest else -(-sum(rows) // batch_size)
        return cls._of_pass(place, num_batches, steps, full)

    @classmethod
    def of_steps(cls, place: WorkerPlace, num_steps: int) -> BatchParts:
        """Return the parts of a worker's mini-batches in an epoch with a given number of steps."""
        workers = range(1, place.num_workers + 1)
        steps = [dataclasses.replace(place, worker=worker).steps(num_steps) for worker in workers]
        return cls._of_pass(place, num_steps, steps, steps)

    @classmethod
    def _of_pass(
        cls, place: WorkerPlace, num_batches: int, steps: Sequence[int], full: Sequence[int]
    ) -> BatchParts:
        """Return parts by which the workers' last mini-batches share the parts left in a pass.

        Args:
            place: This worker's place in the run: its number and the rules of division.
            num_batches: Number of the script's batches in a pass without Thinwire.
            steps: Number of mini-batches of each worker.
            full: Number of full mini-batches of each worker, which have all their parts.
        """
        index, workers = place.worker - 1, range(place.num_workers)
        parts, num_left = place.parts_of_batch, place.num_workers * num_batches
        num_left -= parts * sum(full)
        short = [n for n in workers if steps[n] > full[n]]
        takers = short or [n for n in workers if steps[n]]
        last = parts
        if index in takers:
            share, num_extra = divmod(num_left, len(takers))
            last = share + (takers.index(index) < num_extra) + (0 if short else parts)
        # If workers have very different numbers of rows, as with --partition=dirichlet, the
        # remaining parts may be negative or exceed MOST_BATCHES. Then all mini-batches of a worker
        # have the same number of parts.
        is_plain = 0 <= last <= MOST_BATCHES * place.num_workers
        return cls(parts, steps[index] or None, last if is_plain else parts)


class Rounds(Protocol):
    """Row counts of an epoch's rounds; in a round every worker takes one step."""

    def num_rows(self, step: int, own: int) -> int:
        """Return the number of rows that all workers together train on in a step.

        Args:
            step: Number of the step within the epoch, from 0.
            own: Number of rows that this worker trains on in the step.

        Raises:
            ConfigurationError: The number of rows is unknown, or `own` is not the number of rows
                that this worker should have.
        """


@dataclasses.dataclass(frozen=True)
class Shared:
    """Arguments of Keras' `fit` with a worker's part of the data, and facts about the division.

    Attributes:
        arguments: Arguments of Keras' fit for this worker, by name.
        batch_size: Batch size of the script, in rows; None if unknown.
        num_examples: Number of rows in the whole training set; None if unknown.
        short_by: Steps by which this worker's epoch is shorter than the longest epoch of a worker.
            In a run of one group, the workers of the group take these steps without this worker.
        parts: Parts of the script's batches in each mini-batch of this worker.
        rounds: Row counts of all workers in each step; None if workers do not divide batches.
        unfilled: Counter of steps without rows for this worker that are found only while the data
            is read; None if `short_by` counts all steps without rows.
    """

    arguments: dict[str, Any]
    batch_size: int | None = None
    num_examples: int | None = None
    short_by: int = 0
    parts: BatchParts = dataclasses.field(default_factory=BatchParts)
    rounds: Rounds | None = None
    unfilled: UnfilledRounds | None = None


def deal(num_rows: int, num_workers: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return, for each row of a window of training data, the worker that gets the row.

    A window is one batch of the script, or n batches for n workers. The rows are assigned in a
    random order. If every n-th row went to the same worker, rows with a pattern, for example
    alternating classes, would give each worker only some of the classes.

    Args:
        num_rows: Number of rows in the window; the last window of an epoch may be shorter.
        num_workers: Number of workers.
        seed: Seed of the run, then the numbers of the `fit`, the epoch and the window.

    Returns:
        [num_rows] int64 worker numbers, 1..num_workers. Worker i has
        len(range(i - 1, num_rows, num_workers)) rows. If the rows do not divide evenly, the first
        workers have one row more.

    >>> owners = deal(7, 2, seed=(0, 0, 0, 0))
    >>> np.bincount(owners).tolist()
    [0, 4, 3]
    """
    order = np.random.default_rng(seed).permutation(num_rows)
    return np.asarray(order % num_workers + 1, dtype=np.int64)
