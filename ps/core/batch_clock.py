"""Counts the batches that a training script has consumed, for its learning rate schedules."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.ops.types import State


class BatchClock:
    """Counts the script's batches that the updates of a phase (one of its models) have consumed.

    A worker may consume only a part of a batch of the training script. The batch clock counts
    integer parts of a batch: nb_workers parts are one batch. Integers keep the count of batches
    exact over a long run, where fractions would add up rounding errors.

    Args:
        nb_workers: Number of workers in the run.
        num_optimizers: Number of optimizers on the server, whose batches the batch clock counts
            separately. `num_optimizers` is 1 if the optimizers step on the workers, because one
            count of batches then serves the learning rate schedules of all optimizers.
        first: For each optimizer of the training script, the number of batches that its learning
            rate schedule had counted before this phase (model); () if the run has no script.
    """

    def __init__(self, nb_workers: int, num_optimizers: int = 1, first: Sequence[int] = ()) -> None:
        self._per_batch, self._first = nb_workers, list(first)
        self._parts = [0] * num_optimizers

    def count(self, parts: int, optimizer: int = 0) -> None:
        """Count the parts of the script's batches that one update for an optimizer has consumed."""
        self._parts[self._counter(optimizer)] += parts

    def batches(self, optimizer: int) -> int:
        """Return the number of whole batches that an optimizer's learning rate schedule has
        counted.
        """
        first = self._first[optimizer] if self._first else 0
        return first + self._parts[self._counter(optimizer)] // self._per_batch

    def _counter(self, optimizer: int) -> int:
        return optimizer if len(self._parts) > 1 else 0

    @property
    def num_schedules(self) -> int:
        """Number of the training script's optimizers; 0 if the run has no training script."""
        return len(self._first)

    def state_dict(self) -> State:
        """Return the batch clock's counts, which are stored in checkpoints."""
        return {
            "per_batch": self._per_batch,
            "first": list(self._first),
            "parts": list(self._parts),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the batch clock's saved counts, even if the run's number of workers has
        changed.
        """
        before = state["per_batch"]
        if len(state["first"]) == len(self._first):
            self._first = list(state["first"])
        # A part of a batch is 1 / nb_workers. Without the conversion of saved parts to the present
        # number of workers, a resumed run would read its learning rate schedules at a wrong batch.
        self._parts = [parts * self._per_batch // before for parts in state["parts"]]
