"""A worker's place in a run, which determines the rows that the worker trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

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
    """A worker's number in a run, and the rules by which all workers of the run divide data.

    Args:
        worker: Number of this worker, 1..num_workers.
        num_workers: Number of workers in the run.
        one_group: True if all workers of the run step together, in one group that exchanges every
            mini-batch.
        rule: Rule of the flag --partition that divides rows among workers, with the run's seed; its
            field nb_workers is `num_workers`.
        batch: "global" if workers divide each batch of the script's batch size; "worker" if each
            worker takes batches of the script's batch size. None: "global" if `one_group` is True
            and Thinwire divides the data, else "worker".
        shard: "auto" if Thinwire divides the script's data among workers; "off" if the script
            itself divides its data.
        fit: Position of the call of `fit` that uses the data, which enters the seeds of shuffles;
            None if unknown.
        deals_alike: True if each worker gets the same rows of the data in each `fit` and each
            epoch.
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
        """Return the place of worker number `worker` (from 1) in a run with the settings `run`."""
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
        """Return the place for a training loop that the script writes and divides data for.

        If all workers step together, one step of all workers counts as one step of the script.
        """
        return dataclasses.replace(self, shard="auto")

    @property
    def workers(self) -> range:
        """Numbers of all workers of the run, 1..num_workers."""
        return range(1, self.num_workers + 1)

    @property
    def parts_of_batch(self) -> int:
        """Number of parts in a worker's mini-batch; the script's batch has `num_workers` parts."""
        return 1 if self.divides_batch else self.num_workers

    def part_of_batch(self, batch_size: int, worker: int = 0) -> int:
        """Return the number of rows that a worker takes of each batch of the script.

        Args:
            batch_size: Number of rows in a full batch of the script.
            worker: Number of the worker; 0 means this worker.

        Raises:
            ConfigurationError: The script's batch has fewer rows than the run has workers.

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

    def parts_of_all(self, batch_size: int) -> tuple[int, ...]:
        """Return the number of rows that each worker takes of each batch of the script."""
        return tuple(self.part_of_batch(batch_size, worker) for worker in self.workers)

    def run_batch(self, batch_size: int) -> int:
        """Return the number of rows from which all workers together make one batch each."""
        return batch_size if self.divides_batch else batch_size * self.num_workers

    def owners(self, num_rows: int, epoch: int, window: int) -> NDArray[np.int64]:
        """Return the number of the worker that gets each row of a window, by the function `deal`.

        Args:
            num_rows: Number of rows in the window (the rows for one batch of each worker).
            epoch: Number of the pass over the data within the call of `fit`, from 0.
            window: Number of the window (the rows for one batch of each worker) within the epoch,
                from 0.
        """
        fit, epoch = (0, 0) if self.deals_alike else (self.fits_before, epoch)
        return deal(num_rows, self.num_workers, (self.rule.seed, fit, epoch, window))

    def positions(self, num_rows: int, epoch: int, window: int) -> NDArray[np.int64]:
        """Return the positions of this worker's rows in a window, as `owners` deals them.

        Returns:
            [n] int64, ascending. Each position of the window belongs to exactly one worker.
        """
        return np.flatnonzero(self.owners(num_rows, epoch, window) == self.worker)

    def num_dealt(self, num_rows: int, worker: int = 0) -> int:
        """Return how many rows of a window a worker gets; worker 0 means this worker."""
        return len(range((worker or self.worker) - 1, num_rows, self.num_workers))

    def dealt_rows(self, total: int, window: int) -> tuple[int, ...]:
        """Return the number of rows of each worker if `total` rows are divided window by window.

        >>> WorkerPlace(1, 2, True, PartitionRule("iid", 2, seed=1)).dealt_rows(7, window=5)
        (4, 3)
        """
        num_windows, num_remaining = divmod(total, window)
        return tuple(
            num_windows * self.num_dealt(window, worker) + self.num_dealt(num_remaining, worker)
            for worker in self.workers
        )

    def steps_of_rows(
        self, batch_size: int, rows: Sequence[int], drops_rest: bool = False
    ) -> tuple[int, ...]:
        """Return the number of mini-batches of each worker in one pass over the worker's rows.

        Args:
            batch_size: Batch size that the script passes to `fit`, in rows.
            rows: For each worker, the number of rows in one pass over the data.
            drops_rest: True if the script drops a last batch with fewer rows.
        """
        pairs = zip(rows, self.parts_of_all(batch_size), strict=True)
        return tuple(
            num_rows // size if drops_rest else -(-num_rows // size) for num_rows, size in pairs
        )

    def lacks_rows(self, num_rows: int) -> bool:
        """Return True if workers divide a batch with rows, but with fewer rows than workers."""
        return self.divides_batch and 0 < num_rows < self.num_workers

    def short_batch(self, num_rows: int, where: str) -> ConfigurationError:
        """Return the error for a batch within an epoch with fewer rows than the run has workers.

        Args:
            num_rows: Number of rows in a batch of the script that the workers must divide.
            where: Name of the batch for the error message, for example "batch 3 of the PyDataset".
        """
        return ConfigurationError(
            f"{where} has {num_rows} rows, which cannot be divided among {self.num_workers} "
            "workers, and further batches follow it in the same epoch; expected at least one row "
            "for each worker, except in the last batch of an epoch. Change the batch size or the "
            "number of workers, drop the last, smaller batch (drop_remainder=True), call repeat() "
            "before batch(), leave out steps_per_epoch, or give --batch=worker, which makes every "
            "worker take batches of the script's size."
        )

    def steps(self, num_steps: int, worker: int = 0) -> int:
        """Return a worker's number of steps, for a script that sets steps_per_epoch.

        If workers take parts of each batch, every worker takes as many steps_per_epoch as the
        script sets. If workers train on whole batches, the workers divide the number of
        steps_per_epoch that the script sets. Workers that step together get equal numbers of steps,
        rounded up, because each step waits for all workers. Worker 0 means this worker.
        """
        if self.divides_batch or not self.is_shared:
            return num_steps
        if self.one_group:
            return -(-num_steps // self.num_workers)
        return max(1, self.num_dealt(num_steps, worker))

    def check_partition(self, kind: str) -> None:
        """Raise an error if --partition has a rule that Thinwire does not apply to a data set.

        Args:
            kind: Name of the data set's type, for example "tf.data.Dataset".
        """
        if self.rule.partition != "iid":
            raise ConfigurationError(
                f"--partition={self.rule.partition} divides only arrays among the workers, but the "
                f"script called fit with a {kind}. Use --partition=iid, or give fit arrays."
            )


class UnfilledRounds:
    """Counts the rounds (steps of all workers) in which a worker has no rows, as it reads its data.

    The number of rows of a data set with a filter, or from files, is not known in advance. If the
    last batch of a data set has fewer rows than the run has workers, the workers without rows have
    one step fewer.
    """

    def __init__(self) -> None:
        self._number = 0

    def note(self) -> None:
        """Count one round (step of all workers) in which this worker has no rows."""
        self._number += 1

    def take(self) -> int:
        """Return in how many rounds this worker has had no rows since the last call of `take`."""
        number, self._number = self._number, 0
        return number


@dataclasses.dataclass(frozen=True)
class BatchParts:
    """Number of parts of the script's batch in a worker's mini-batches, for rate schedules.

    In a run of n workers, each batch of the script counts as n parts, so that sums of parts are
    whole numbers. A worker's mini-batch counts as one part if workers divide each batch, and as n
    parts if each of n workers takes whole batches. At the end of a pass over the data, all workers
    together may have more short mini-batches than the script has batches left. So at the end of a
    pass, the last mini-batches of all workers share the remaining parts of the script's batches, so
    that a pass advances learning-rate schedules as far as without Thinwire.

    Attributes:
        each: Number of parts of the script's batch in each mini-batch except the last mini-batch of
            a pass over the data.
        num_steps: Number of this worker's mini-batches in one pass over the data; None if all
            mini-batches have `each` parts.
        last: Number of parts of the script's batch in the last mini-batch of a pass over the data.
    """

    each: int = 1
    num_steps: int | None = None
    last: int = 1

    def of_step(self, step: int) -> int:
        """Return how many parts of the script's batch the mini-batch of a step (from 0) has."""
        ends_pass = self.num_steps is not None and (step + 1) % self.num_steps == 0
        return self.last if ends_pass else self.each

    @classmethod
    def alike(cls, place: WorkerPlace) -> BatchParts:
        """Return a `BatchParts` with equal parts for all mini-batches, for data of unknown size."""
        return cls(place.parts_of_batch)

    @classmethod
    def of_rows(
        cls, place: WorkerPlace, batch_size: int, rows: Sequence[int], drops_rest: bool = False
    ) -> BatchParts:
        """Return a `BatchParts` of a worker's mini-batches, for a pass over a known number of rows.

        Args:
            place: This worker's number in the run, and the rules that divide the training data
                among workers.
            batch_size: Batch size that the script passes to `fit`, in rows.
            rows: For each worker, the number of rows in one pass over the data.
            drops_rest: True if the script drops a last batch with fewer rows.

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
        """Return a `BatchParts` of a worker's mini-batches, for an epoch with `num_steps` steps."""
        steps = [place.steps(num_steps, worker) for worker in place.workers]
        return cls._of_pass(place, num_steps, steps, steps)

    @classmethod
    def _of_pass(
        cls, place: WorkerPlace, num_batches: int, steps: Sequence[int], full: Sequence[int]
    ) -> BatchParts:
        """Return a `BatchParts` in which the workers' last mini-batches share a pass's last parts.

        Args:
            place: This worker's number in the run, and the rules that divide the training data
                among workers.
            num_batches: Number of the script's batches in one pass over the data, as without
                Thinwire.
            steps: For each worker, the number of mini-batches in a pass over the data.
            full: For each worker, the number of full mini-batches in a pass over the training data.
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
        # If workers have very different numbers of rows, as with --partition=dirichlet, the parts
        # left for a worker's last mini-batches may be negative or exceed MOST_BATCHES. Then all
        # mini-batches of a worker have the same number of parts.
        is_plain = 0 <= last <= MOST_BATCHES * place.num_workers
        return cls(parts, steps[index] or None, last if is_plain else parts)


@dataclasses.dataclass(frozen=True)
class StepRows:
    """Number of training rows in each round of an epoch, in which every worker takes one step.

    A loss that sums over rows must sum over the rows of all workers in a round. A server averages
    the workers' gradients, weighted by their numbers of rows. So a worker must know the number of
    rows of all workers in a round to scale its own gradient.

    Attributes:
        place: Number of this worker, and the rules that divide data among workers. If the workers
            do not step together, a round's number of rows is estimated from this worker's rows.
        of_step: Function of a step's number (from 0) that returns the number of rows of each worker
            in the step; None if no worker can know how many rows the other workers have.
        reason: Text that ends an error message: why the number of rows of all workers is unknown.

    >>> place = WorkerPlace(1, 2, True, PartitionRule("iid", 2, seed=1))
    >>> rounds = StepRows.of_rows(place, 3, (5, 2))
    >>> [rounds.num_rows(step, own) for step, own in enumerate((2, 2, 1))]
    [3, 3, 1]
    """

    place: WorkerPlace
    of_step: Callable[[int], Sequence[int]] | None
    reason: str = ""

    def num_rows(self, step: int, own: int) -> int:
        """Return the number of rows that all workers together train on in a step.

        If the number of rows in this worker's batch is unexpected, the numbers of rows of the other
        workers are unknown, too.

        Args:
            step: Number of the training step within the epoch, from 0.
            own: Number of rows in this worker's mini-batch of the step.

        Raises:
            ConfigurationError: The number of rows of all workers is unknown, or `own` is not the
                number of rows that this worker should have.
        """
        place = self.place
        if not place.one_group:
            return own * place.num_workers
        if self.of_step is None:
            raise ConfigurationError(
                f"the rows of all workers in a step are unknown: {self.reason}"
            )
        rows = self.of_step(step)
        if own != rows[place.worker - 1]:
            raise ConfigurationError(
                f"training step {step} of the epoch has {own} rows on this worker; expected "
                f"{rows[place.worker - 1]} rows, computed from the batch size and the number of "
                "rows"
            )
        return sum(rows)

    @classmethod
    def full(cls, place: WorkerPlace, batch_size: int) -> StepRows:
        """Return the row counts of the rounds of an epoch in which every batch is full."""
        sizes = place.parts_of_all(batch_size)
        return cls(place, lambda step: sizes)

    @classmethod
    def of_rows(
        cls, place: WorkerPlace, batch_size: int, rows: Sequence[int] | None, repeats: bool = False
    ) -> StepRows:
        """Return the row counts of rounds in which the workers divide the script's batch size.

        Args:
            place: Number of this worker, which takes a part of each batch, and the rules that
                divide data among workers.
            batch_size: Batch size that the script passes to `fit`, in rows.
            rows: For each worker, the number of rows in one pass over the data; None if unknown.
            repeats: True if an epoch may be longer or shorter than one pass over the data.
        """
        if rows is None:
            reason = "the number of rows in the training data is not known, and the last batch may "
            return cls(place, None, f"{reason}be short")
        pairs = tuple(zip(place.parts_of_all(batch_size), rows, strict=True))
        are_full = not any(total % size for size, total in pairs)
        if are_full and (repeats or len({total // size for size, total in pairs}) == 1):
            return cls.full(place, batch_size)
        if repeats:
            reason = (
                f"the training data of {sum(rows)} rows are repeated, and batches of {batch_size} "
                "leave a short one at the end of each pass"
            )
            return cls(place, None, reason)
        return cls(
            place, lambda step: [max(0, min(size, total - step * size)) for size, total in pairs]
        )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Arguments of Keras' `fit` with a worker's part of the data, and numbers about the division.

    Attributes:
        arguments: Arguments of Keras' `fit` with this worker's part of the data, by name.
        batch_size: Batch size that the script passes to `fit`, in rows; None if unknown.
        num_examples: Number of rows in the whole training set; None if unknown.
        short_by: Number of steps by which this worker's epoch is shorter than the longest epoch of
            any worker. If all workers step together, the other workers take these steps without
            this worker.
        parts: Number of parts of the script's batch in each mini-batch of this worker.
        rounds: Numbers of rows of all workers in each training step; None if workers do not divide
            batches.
        unfilled: Counter of the steps in which this worker turns out to have no rows while it reads
            its data; None if `short_by` counts all steps without rows.
    """

    arguments: dict[str, Any]
    batch_size: int | None = None
    num_examples: int | None = None
    short_by: int = 0
    parts: BatchParts = dataclasses.field(default_factory=BatchParts)
    rounds: StepRows | None = None
    unfilled: UnfilledRounds | None = None

    @classmethod
    def of_rows(
        cls,
        arguments: dict[str, Any],
        place: WorkerPlace,
        batch_size: int,
        total: int,
        rows: Sequence[int] | None,
        steps: int | None,
    ) -> Shared:
        """Return the `Shared` for data with a known number of rows.

        Args:
            arguments: Arguments of Keras' `fit` with this worker's part of the data, by name.
            place: This worker's number in the run, and the rules that divide the training data
                among workers.
            batch_size: Batch size that the script passes to `fit`, in rows.
            total: Number of rows that the script gave to `fit` on this worker.
            rows: For each worker, the number of rows in an epoch; None if the script itself divides
                its rows among workers.
            steps: The argument steps_per_epoch that the script passes to `fit`.
        """
        has_steps, rounds = bool(arguments.get("steps_per_epoch")), None
        if place.divides_batch and rows is not None:
            rounds = StepRows.of_rows(place, batch_size, rows, has_steps)
        elif place.divides_batch and total % place.part_of_batch(batch_size) == 0:
            rounds = StepRows.full(place, batch_size)
        elif place.divides_batch:
            rounds = StepRows(
                place,
                None,
                f"the script divides its rows itself, and the {total} rows of this worker end with "
                "a short batch",
            )
        num_examples = total if place.shard == "auto" else None
        short_by, parts = last_steps(place, steps if has_steps else None, batch_size, rows)
        return cls(arguments, batch_size, num_examples, short_by, parts, rounds)


def last_steps(
    place: WorkerPlace,
    steps: int | None,
    batch_size: int | None,
    rows: Sequence[int] | None,
    drops_rest: bool = False,
) -> tuple[int, BatchParts]:
    """Return by how many steps this worker's pass is shorter than the longest, and its batch parts.

    Args:
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
        steps: The argument steps_per_epoch that the script passes to `fit`; None if a pass over the
            data has all its steps.
        batch_size: Batch size that the script passes to `fit`, in rows; None if unknown.
        rows: For each worker, the number of rows in one pass over the data; None if unknown.
        drops_rest: True if the script drops a last batch with fewer rows.
    """
    # If the script divides its data itself, every worker takes all steps, each with a whole batch.
    if steps and place.is_shared:
        return 0, BatchParts.of_steps(place, steps)
    if rows is None or batch_size is None:
        return 0, BatchParts.alike(place)
    all_steps = place.steps_of_rows(batch_size, rows, drops_rest)
    short_by = max(all_steps) - all_steps[place.worker - 1] if place.one_group else 0
    return short_by, BatchParts.of_rows(place, batch_size, rows, drops_rest)


def deal(num_rows: int, num_workers: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return, for each row of a window of training data, the number of the worker that gets it.

    A window is one batch of the script, or n batches in a run of n workers. The rows of a window
    are assigned to the workers in a random order. If every n-th row went to the same worker, rows
    with a pattern, for example alternating classes, would give each worker only some of the
    classes.

    Args:
        num_rows: Number of rows in the window (one batch of each worker); the last window of an
            epoch may be shorter.
        num_workers: Number of workers that divide the rows among themselves.
        seed: Seeds of the random order: the run's seed, then the numbers of the `fit`, the epoch
            and the window.

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
