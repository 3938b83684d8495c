"""Knows how many rows (examples) all workers together train on in each step of an epoch.

A loss that sums over rows must sum over the rows of all workers in a round (a step of all workers).
A server averages the workers' gradients, weighted by their numbers of rows. So a worker must know
the number of rows of all workers in a round to scale its own gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import StepRows, WorkerPlace


@dataclasses.dataclass(frozen=True)
class EvenRounds:
    """Row counts for workers that do not wait for each other, estimated from one worker's rows.

    Args:
        num_workers: Number of workers in the run.
    """

    num_workers: int

    def num_rows(self, step: int, own: int) -> int:
        """Return the row count of all n workers in a step, estimated as n times this worker's."""
        return own * self.num_workers


@dataclasses.dataclass(frozen=True)
class DealtRounds:
    """Row counts of rounds in which each worker divides a known number of rows into batches.

    Args:
        worker: Number of this worker, 1..num_workers.
        sizes: For each worker, the number of rows in a full batch.
        totals: For each worker, the number of rows in an epoch; None if all batches are full.

    >>> rounds = DealtRounds(1, (2, 1), (5, 2))
    >>> [rounds.num_rows(step, own) for step, own in enumerate((2, 2, 1))]
    [3, 3, 1]
    """

    worker: int
    sizes: tuple[int, ...]
    totals: tuple[int, ...] | None

    def num_rows(self, step: int, own: int) -> int:
        """Return the number of rows that all workers together train on in a step."""
        rows = self.sizes
        if self.totals is not None:
            pairs = zip(self.sizes, self.totals, strict=True)
            rows = tuple(max(0, min(size, total - step * size)) for size, total in pairs)
        check_rows(step, own, rows[self.worker - 1])
        return sum(rows)


@dataclasses.dataclass(frozen=True)
class UnknownRounds:
    """Row counts for the case that no worker can know how many rows the other workers have.

    Args:
        reason: Text that ends an error message: why the number of rows of all workers is unknown.
    """

    reason: str

    def num_rows(self, step: int, own: int) -> int:
        """Raise ConfigurationError, because the number of rows of all workers is unknown."""
        raise ConfigurationError(f"the rows of all workers in a step are unknown: {self.reason}")


def dealt_rounds(
    place: WorkerPlace, batch_size: int, totals: Sequence[int] | None, repeats: bool = False
) -> StepRows:
    """Return the row counts of rounds in which the workers divide the script's batch size.

    Args:
        place: Number of this worker, which takes a part of each batch, and the rules that divide
            data among workers.
        batch_size: Batch size that the script passes to `fit`, in rows.
        totals: For each worker, the number of rows in one pass over the data; None if unknown.
        repeats: True if an epoch may be longer or shorter than one pass over the data.
    """
    if not place.one_group:
        return EvenRounds(place.num_workers)
    workers = range(1, place.num_workers + 1)
    sizes = tuple(place.part_of_batch(batch_size, worker) for worker in workers)
    if totals is None:
        return UnknownRounds(
            "the number of rows in the training data is not known, and the last batch may be short"
        )
    if not any(total % size for total, size in zip(totals, sizes, strict=True)):
        counts = {total // size for total, size in zip(totals, sizes, strict=True)}
        if repeats or len(counts) == 1:
            return full_rounds(place, batch_size)
    if repeats:
        return UnknownRounds(
            f"the training data of {sum(totals)} rows are repeated, and batches of {batch_size} "
            "leave a short one at the end of each pass"
        )
    return DealtRounds(place.worker, sizes, tuple(totals))


def full_rounds(place: WorkerPlace, batch_size: int) -> StepRows:
    """Return the row counts of the rounds of an epoch in which every batch is full."""
    if not place.one_group:
        return EvenRounds(place.num_workers)
    workers = range(1, place.num_workers + 1)
    sizes = tuple(place.part_of_batch(batch_size, worker) for worker in workers)
    return DealtRounds(place.worker, sizes, None)


def check_rows(step: int, own: int, expected: int) -> None:
    """Raise an error if this worker's batch has another number of rows than expected.

    If the number of rows in this worker's batch is unexpected, the numbers of rows of the other
    workers are unknown, too.

    Raises:
        ConfigurationError: The number `own` of rows in this worker's batch is not `expected`.
    """
    if own != expected:
        raise ConfigurationError(
            f"training step {step} of the epoch has {own} rows on this worker; expected "
            f"{expected} rows, computed from the batch size and the number of rows"
        )
