"""A worker's place in a run, as far as it decides about data: which rows, how many at a time."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.data.loading import split_rule
from thinwire.data.partition import PartitionRule
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


class Rounds(Protocol):
    """The rounds of an epoch: in each, every worker takes one step."""

    def num_rows(self, step: int, own: int) -> int:
        """Return the rows of all workers in a step.

        Args:
            step: Of the epoch, from 0 on.
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
        rounds: The rows of all workers in each step; None: batches are not divided.
    """

    arguments: dict[str, Any]
    batch_size: int | None = None
    num_examples: int | None = None
    short_by: int = 0
    rounds: Rounds | None = None


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
