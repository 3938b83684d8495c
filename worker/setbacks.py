"""When a worker gives up: too many mini-batches in a row came to nothing."""

from __future__ import annotations

from ops.run import Diverged

#: Mini-batches in a row that may come to nothing.
_MOST_IN_A_ROW = 100


class Setbacks:
    """Counts mini-batches that could not be used: not finite, or refused for their size."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, applied: bool) -> None:
        """Hear whether the newest mini-batch could be used."""
        self._in_a_row = 0 if applied else self._in_a_row + 1

    @property
    def are_too_many(self) -> bool:
        """Whether to give up."""
        return self._in_a_row > _MOST_IN_A_ROW

    def diverged(self, learning_rate: float) -> Diverged:
        """Return what to raise when there are too many."""
        return Diverged(
            f"{self._in_a_row} mini-batches in a row had NaN or infinite gradients, or were "
            "refused for their size; the model has diverged, or this device is faulty. Lower "
            f"--learning_rate (now {learning_rate:g}), or look at --max_update_norm and "
            "--update_norm_factor if they are in use."
        )
