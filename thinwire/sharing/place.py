"""A worker's place in a run, as far as it decides about data: which rows, how many at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.loading import split_rule
from thinwire.data.partition import PartitionRule
from thinwire.ops.offer import MOST_BATCHES
from thinwire.ops.run.settings import Run
from thinwire.ops.types import ConfigurationError
from thinwire.sharing.fit_counts import FitNumber


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
    """

    worker: int
    num_workers: int
    one_group: bool
    rule: PartitionRule
    batch: str | None = None
    shard: str = "auto"
    fit: FitNumber | None = None

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
        return len(range((worker or self.worker) - 1, batch_size, self.num_workers))

    def run_batch(self, batch_size: int) -> int:
        """Return the rows of all workers' batches together."""
        return batch_size if self.divides_batch else batch_size * self.num_workers

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
            batch_size: Of the script.
            rows: Of each worker.
            drops_rest: Whether a last batch with fewer rows is left out.

        >>> places = [WorkerPlace(i, 2, False, PartitionRule("iid", 2, seed=1)) for i in (1, 2)]
        >>> [BatchParts.of_rows(place, 10, [13, 12]).last for place in places]
        [1, 1]
        """
        sizes = [place.part_of_batch(batch_size, n + 1) for n in range(place.num_workers)]
        full = [number // size for number, size in zip(rows, sizes, strict=True)]
        steps = full if drops_rest else [-(-n // size) for n, size in zip(rows, sizes, strict=True)]
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
            num_batches: Of the script alone.
            steps: Mini-batches of each worker.
            full: Of these, those with all their rows.
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
    """

    arguments: dict[str, Any]
    batch_size: int | None = None
    num_examples: int | None = None
    short_by: int = 0
    parts: BatchParts = dataclasses.field(default_factory=BatchParts)


def dealt_rows(total: int, run_batch: int, num_workers: int) -> list[int]:
    """Return how many rows each worker has where every batch of the run is dealt out.

    >>> dealt_rows(7, 5, 2)
    [4, 3]
    """
    whole, rest = divmod(total, run_batch)
    workers = range(num_workers)
    return [
        whole * len(range(n, run_batch, num_workers)) + len(range(n, rest, num_workers))
        for n in workers
    ]


def deal(total: int, run_batch: int, worker: int, num_workers: int) -> NDArray[np.int64]:
    """Return the positions of a worker's rows where every batch of the run is dealt out.

    The rows of each run of `run_batch` go to workers 1, 2, ... in turn: so the workers' k-th
    batches are together the k-th batch of the run, and the last, short one is shared too.

    Args:
        total: Rows.
        run_batch: Rows of a batch of the run.
        worker: 1..num_workers.
        num_workers: Workers.

    Returns:
        [n] int64, ascending; of all workers disjoint and complete.

    >>> [deal(7, 5, worker, 2).tolist() for worker in (1, 2)]
    [[0, 2, 4, 5], [1, 3, 6]]
    """
    positions = np.arange(total, dtype=np.int64)
    return np.flatnonzero(positions % run_batch % num_workers == worker - 1)
