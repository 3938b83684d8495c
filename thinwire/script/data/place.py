"""A worker's place in a run, as far as it decides about data: which rows, how many at a time."""

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
    """Who shares data with how many others, and how.

    Args:
        worker: This worker, 1..num_workers.
        num_workers: Workers of the run.
        one_group: Whether all workers step together: one group, every mini-batch exchanged.
        rule: How rows are dealt out, and the run's seed; its nb_workers is `num_workers`.
        batch: "global": the script's batch size is the run's, and each worker takes its part of
            it; "worker": it is each worker's. None: global where one group steps together.
        shard: "auto": the workers share what the script gives; "off": each script gives its own.
        fit: The number of the `fit` that the data is for, by which it is shuffled; None: it is for
            none that is known.
        deals_alike: Whether rows are dealt in the same way in each `fit` and each epoch.
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
        """Return a worker's place in a run."""
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
        """Fits of the script before the one that the data is for."""
        return 0 if self.fit is None else self.fit.before

    @property
    def is_shared(self) -> bool:
        """Whether data is dealt out here."""
        return self.shard == "auto" and self.num_workers > 1

    @property
    def divides_batch(self) -> bool:
        """Whether a worker takes a part of the script's batch size.

        Where a script shares its data itself, its batch size is for its part, unless --batch is
        given.
        """
        if self.num_workers == 1:
            return False
        usual = "global" if self.one_group and self.shard == "auto" else "worker"
        return (self.batch or usual) == "global"

    def in_loop(self) -> WorkerPlace:
        """Return the place of a loop of the script's own, whose data the script shares itself.

        Where one group steps together, a step of all workers is one step of the script.
        """
        return dataclasses.replace(self, shard="auto")

    @property
    def parts_of_batch(self) -> int:
        """How much of a batch of the script's a mini-batch of a worker is; see `BatchParts`."""
        return 1 if self.divides_batch else self.num_workers

    def part_of_batch(self, batch_size: int, worker: int = 0) -> int:
        """Return the rows that a worker (0: this one) takes of each batch of the script's.

        Raises:
            ConfigurationError: There are fewer rows than workers.

        >>> rule = PartitionRule("iid", 3, seed=1)
        >>> [WorkerPlace(i, 3, True, rule).part_of_batch(32) for i in (1, 2, 3)]
        [11, 11, 10]
        """
        if not self.divides_batch:
            return batch_size
        if batch_size < self.num_workers:
            raise ConfigurationError(
                f"a batch of {batch_size} cannot be divided among {self.num_workers} workers: the "
                "batch size is the whole run's here. Expected at least one row each: raise the "
                f"script's batch size to {self.num_workers} or more, or give --batch=worker, with "
                "which every worker takes batches of the script's size."
            )
        return self.num_dealt(batch_size, worker)

    def run_batch(self, batch_size: int) -> int:
        """Return the rows of all workers' batches together: the window that rows are dealt in."""
        return batch_size if self.divides_batch else batch_size * self.num_workers

    def positions(self, num_rows: int, epoch: int, window: int) -> NDArray[np.int64]:
        """Return the positions of this worker's rows in a window; see `deal`.

        Args:
            num_rows: Rows of the window.
            epoch: Number of the pass over the data within the fit, from 0.
            window: Number of the window within the epoch, from 0.

        Returns:
            [n] int64, ascending; the positions of all workers are disjoint and complete.
        """
        fit, epoch = (0, 0) if self.deals_alike else (self.fits_before, epoch)
        seed = (self.rule.seed, fit, epoch, window)
        return np.flatnonzero(deal(num_rows, self.num_workers, seed) == self.worker)

    def num_dealt(self, num_rows: int, worker: int = 0) -> int:
        """Return how many rows of a window a worker (0: this one) has."""
        return len(range((worker or self.worker) - 1, num_rows, self.num_workers))

    def dealt_rows(self, total: int, window: int) -> tuple[int, ...]:
        """Return how many rows each worker has of `total`, dealt out window by window.

        >>> WorkerPlace(1, 2, True, PartitionRule("iid", 2, seed=1)).dealt_rows(7, window=5)
        (4, 3)
        """
        full, rest = divmod(total, window)
        workers = range(1, self.num_workers + 1)
        return tuple(
            full * self.num_dealt(window, worker) + self.num_dealt(rest, worker)
            for worker in workers
        )

    def steps_of_rows(
        self, batch_size: int, rows: Sequence[int], drops_rest: bool = False
    ) -> tuple[int, ...]:
        """Return how many mini-batches each worker makes of its rows in one pass over them.

        Args:
            batch_size: The script's batch size.
            rows: Rows of each worker.
            drops_rest: Whether a last batch with fewer rows is left out.
        """
        sizes = [self.part_of_batch(batch_size, worker + 1) for worker in range(self.num_workers)]
        pairs = zip(rows, sizes, strict=True)
        return tuple(own // size if drops_rest else -(-own // size) for own, size in pairs)

    def short_by(self, steps: Sequence[int]) -> int:
        """Return by how many steps this worker's epoch is shorter; see `Shared.short_by`.

        Args:
            steps: Steps of each worker in an epoch.
        """
        return max(steps) - steps[self.worker - 1] if self.one_group else 0

    def lacks_rows(self, num_rows: int) -> bool:
        """Return whether a batch of the run has rows, but fewer than workers to divide it among."""
        return self.divides_batch and 0 < num_rows < self.num_workers

    def short_batch(self, num_rows: int, where: str) -> ConfigurationError:
        """Return the refusal of a batch with fewer rows than workers that is not an epoch's last.

        Args:
            num_rows: Rows of the batch.
            where: The batch and its data, as the subject of a sentence: "batch 3 of the PyDataset".
        """
        return ConfigurationError(
            f"{where} has {num_rows} rows, which cannot be divided among {self.num_workers} "
            "workers, and further batches follow it in the same epoch; expected at least one row "
            "for each worker, but in the last batch of an epoch. Change the batch size or the "
            "number of workers, leave out the short batch (drop_remainder=True), repeat() before "
            "batch(), leave out steps_per_epoch, or give --batch=worker, with which every worker "
            "takes batches of the script's size."
        )

    def steps(self, num_steps: int) -> int:
        """Return this worker's steps where the script gives a number of them.

        They stay as many where each takes its part of every batch; else the workers share them.
        One group's workers get equally many, so that none waits.
        """
        if self.divides_batch or not self.is_shared:
            return num_steps
        if self.one_group:
            return -(-num_steps // self.num_workers)
        return max(1, len(range(self.worker - 1, num_steps, self.num_workers)))


class UnfilledRounds:
    """Counts the rounds for which this worker has no rows, where only reading the data shows it.

    A data set whose rows are filtered or come from files does not know how many it has. A last
    batch with fewer rows than workers then leaves some workers a step less.
    """

    def __init__(self) -> None:
        self._number = 0

    def note(self) -> None:
        """Count one more."""
        self._number += 1

    def take(self) -> int:
        """Return how many there were since the last call."""
        number, self._number = self._number, 0
        return number


@dataclasses.dataclass(frozen=True)
class BatchParts:
    """How much of the script's batches each mini-batch of a worker is, for schedules.

    As many parts as there are workers are one batch, so that sums of them are whole numbers. A
    worker that takes its part of each batch has one part in a step; a worker with batches of the
    script's size has all. At the end of an epoch the workers' rests may be more mini-batches
    together than the script alone has there. So the last ones count what the script has left.

    Attributes:
        each: Parts of a mini-batch.
        num_steps: This worker's mini-batches of one pass over the data; None: all are alike.
        last: Parts of the last one of a pass.
    """

    each: int = 1
    num_steps: int | None = None
    last: int = 1

    def of_step(self, step: int) -> int:
        """Return the parts of a mini-batch, by its number in a `fit`, from 0."""
        ends_pass = self.num_steps is not None and (step + 1) % self.num_steps == 0
        return self.last if ends_pass else self.each

    @classmethod
    def alike(cls, place: WorkerPlace) -> BatchParts:
        """Return the parts where nothing is known of an end, or there is none."""
        return cls(place.parts_of_batch)

    @classmethod
    def of_rows(
        cls, place: WorkerPlace, batch_size: int, rows: Sequence[int], drops_rest: bool = False
    ) -> BatchParts:
        """Return the parts of a pass over rows.

        Args:
            place: This worker's.
            batch_size: The script's batch size.
            rows: Rows of each worker.
            drops_rest: Whether a last batch with fewer rows is left out.

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
        """Return the parts of an epoch for which the script gives a number of steps."""
        workers = range(1, place.num_workers + 1)
        steps = [dataclasses.replace(place, worker=worker).steps(num_steps) for worker in workers]
        return cls._of_pass(place, num_steps, steps, steps)

    @classmethod
    def _of_pass(
        cls, place: WorkerPlace, num_batches: int, steps: Sequence[int], full: Sequence[int]
    ) -> BatchParts:
        """Let the last mini-batches of a pass count what its full ones leave of its batches.

        Args:
            place: This worker's.
            num_batches: Batches of the script alone.
            steps: Mini-batches of each worker.
            full: Mini-batches of each worker that have all their rows.
        """
        own, workers = place.worker - 1, range(place.num_workers)
        each, left = place.parts_of_batch, place.num_workers * num_batches
        left -= each * sum(full)
        short = [n for n in workers if steps[n] > full[n]]
        takers = short or [n for n in workers if steps[n]]
        last = each
        if own in takers:
            share, rest = divmod(left, len(takers))
            last = share + (takers.index(own) < rest) + (0 if short else each)
        # Where parts differ much in size, as by --partition=dirichlet, all count alike.
        is_plain = 0 <= last <= MOST_BATCHES * place.num_workers
        return cls(each, steps[own] or None, last if is_plain else each)


class Rounds(Protocol):
    """The rounds of an epoch: in each, every worker takes one step."""

    def num_rows(self, step: int, own: int) -> int:
        """Return the rows of all workers in a step.

        Args:
            step: Number of the step within the epoch, from 0.
            own: Rows that this worker trains on in that step.

        Raises:
            ConfigurationError: The number cannot be known.
        """


@dataclasses.dataclass(frozen=True)
class Shared:
    """What a worker trains on.

    Attributes:
        arguments: Those of Keras' fit for this worker.
        batch_size: The script's own batch size; None if it cannot be known.
        num_examples: Rows of the whole training set; None if they cannot be known.
        short_by: Steps by which this worker's epoch is shorter than the longest of the others,
            which one group has to do without it.
        parts: How much of the script's batches each mini-batch is.
        rounds: The rows of all workers in each step; None: batches are not divided.
        unfilled: Further such steps, counted while the data is read; None: all are known before.
    """

    arguments: dict[str, Any]
    batch_size: int | None = None
    num_examples: int | None = None
    short_by: int = 0
    parts: BatchParts = dataclasses.field(default_factory=BatchParts)
    rounds: Rounds | None = None
    unfilled: UnfilledRounds | None = None


def deal(num_rows: int, num_workers: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return which worker has each row of one window of the run's rows.

    A window is a batch of the run, or as many batches as there are workers. Its rows are dealt in a
    random order: rows that follow a pattern, such as classes that alternate, would give each
    worker only some of the classes if every n-th row were dealt to the same worker.

    Args:
        num_rows: Rows of the window; the last window of an epoch may have fewer than the others.
        num_workers: Workers.
        seed: The seed of the run, and the numbers of the fit, the epoch and the window.

    Returns:
        [num_rows] int64, each 1..num_workers. Worker i has len(range(i - 1, num_rows, num_workers))
        of the rows, so that the first workers have one more where the rows do not divide evenly.

    >>> owners = deal(7, 2, seed=(0, 0, 0, 0))
    >>> np.bincount(owners).tolist()
    [0, 4, 3]
    """
    order = np.random.default_rng(seed).permutation(num_rows)
    return np.asarray(order % num_workers + 1, dtype=np.int64)
