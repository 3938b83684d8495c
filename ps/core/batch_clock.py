"""The count of a script's own batches, at which the schedules of its optimizers are read."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.ops.types import State


class BatchClock:
    """Counts the batches of the script that the updates of a phase have consumed.

    A worker may take a part of a batch. So parts are counted, and nb_workers parts are one batch:
    their sums are whole numbers, and no rounding adds up over a long run.

    Args:
        nb_workers: Number of workers in the run.
        num_optimizers: That updates are for, each with a count of its own.
        first: The count of each optimizer's schedule before the phase.
            Where the optimizers step on the workers, updates are for none of them, and all count
            the same batches.
    """

    def __init__(self, nb_workers: int, num_optimizers: int = 1, first: Sequence[int] = ()) -> None:
        self._per_batch, self._first = nb_workers, list(first)
        self._parts = [0] * num_optimizers

    def count(self, parts: int, optimizer: int = 0) -> None:
        """Count parts of batches that an update of an optimizer has consumed."""
        self._parts[self._counter(optimizer)] += parts

    def batches(self, optimizer: int) -> int:
        """Return the whole batches that the schedule of an optimizer has counted."""
        first = self._first[optimizer] if self._first else 0
        return first + self._parts[self._counter(optimizer)] // self._per_batch

    def _counter(self, optimizer: int) -> int:
        return optimizer if len(self._parts) > 1 else 0

    @property
    def num_schedules(self) -> int:
        """Optimizers of the script; 0: there is no script."""
        return len(self._first)

    def state_dict(self) -> State:
        """Return the state, all of which outlives a restart."""
        return {
            "per_batch": self._per_batch,
            "first": list(self._first),
            "parts": list(self._parts),
        }

    def load_state_dict(self, state: State) -> None:
        """Take back what `state_dict` gave, perhaps in a run with other workers or optimizers."""
        before = state["per_batch"]
        if len(state["first"]) == len(self._first):
            self._first = list(state["first"])
        self._parts = [parts * self._per_batch // before for parts in state["parts"]]
