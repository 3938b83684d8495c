"""Which steps of a worker are being received: the open one, and at most one ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

from ops.routing.books import Books
from ops.routing.open_step import OpenStep
from ops.routing.sequences import ahead

#: Ended steps that may wait to be closed: a worker is one push ahead at most.
_MOST_ENDED = 2


class Window:
    """The steps that are open; their numbers are modulo 2**32.

    A worker begins a step only when it has the answer to the last but one. So what is not marked
    when a second newer step comes in never will be.
    """

    def __init__(self, offsets: Sequence[int], books: Books) -> None:
        """Begin with none; slots lie at `offsets` in the shard, the total at the end."""
        self._offsets, self._books = offsets, books
        self._open: list[OpenStep] = []  # ascending

    @property
    def first(self) -> OpenStep | None:
        """The only one that may be closed."""
        return self._open[0] if self._open else None

    def find(self, number: int) -> OpenStep | None:
        """Return an open step."""
        return next((step for step in self._open if step.number == number), None)

    def step_for(self, number: int) -> OpenStep | str:
        """Return the step that datagrams are for, opened if need be, or why there is none.

        Args:
            number: Newer than every closed step's.
        """
        found = self.find(number)
        if found is not None:
            return found
        older = [step for step in self._open if ahead(step.number, number) < 0]
        newer = self._open[len(older) :]
        if any(step.groups for step in newer):
            return "abandoned"
        if len(self._open) > 1:
            if not older:
                return "abandoned"
            if older[0].groups:
                return "too_new"
            self._forget(older[0])
        return self.begin(number)

    def begin(self, number: int) -> OpenStep:
        """Open a step.

        Raises:
            ValueError: Too many earlier ones are still to be closed.
        """
        if sum(step.ended for step in self._open) >= _MOST_ENDED:
            raise ValueError(
                f"step {number} begins, but {_MOST_ENDED} earlier ones wait to be closed"
            )
        step = OpenStep(number, self._offsets)
        older = [each for each in self._open if ahead(each.number, number) < 0]
        self._open.insert(len(older), step)
        return step

    def forget_before(self, step: OpenStep) -> None:
        """Forget older steps that were not ended."""
        for older in self._open[: self._open.index(step)]:
            if not older.ended:
                self._forget(older)

    def remove_first(self) -> None:
        """Take out the first one: it is closed."""
        del self._open[0]

    def _forget(self, step: OpenStep) -> None:
        self._books.dropped["abandoned"] += step.num_placed
        self._open.remove(step)
