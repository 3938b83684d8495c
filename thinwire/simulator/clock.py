"""Virtual time: what is to happen, in order, with nothing between."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Call = Callable[[], None]


class Clock:
    """Jumps from one appointment to the next; equal times keep the order of booking.

    >>> clock, seen = Clock(), []
    >>> clock.at(2.0, lambda: seen.append("b")); clock.at(1.0, lambda: seen.append("a"))
    >>> clock.advance(), clock.now, clock.advance(), clock.advance(), seen
    (True, 1.0, True, False, ['a', 'b'])
    """

    def __init__(self) -> None:
        """Start at 0 with nothing to do."""
        self.now = 0.0  # seconds
        self._queue: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Call) -> None:
        """Book a call at `when`, or now if that has passed."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), call))

    def advance(self) -> bool:
        """Go to the next appointment and keep it; return whether there was one."""
        if not self._queue:
            return False
        self.now, _, call = heapq.heappop(self._queue)
        call()
        return True
