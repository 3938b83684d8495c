"""Virtual time of a simulation: a queue of scheduled calls, in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Call = Callable[[], None]


class Clock:
    """Jumps from one scheduled call to the next; calls at equal times keep their order.

    >>> clock, seen = Clock(), []
    >>> clock.at(2.0, lambda: seen.append("b")); clock.at(1.0, lambda: seen.append("a"))
    >>> clock.advance(), clock.now, clock.advance(), clock.advance(), seen
    (True, 1.0, True, False, ['a', 'b'])
    """

    def __init__(self) -> None:
        """Create a virtual clock at time 0 without scheduled calls."""
        self.now = 0.0  # current virtual time, in seconds
        self._queue: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Call) -> None:
        """Schedule a call at the virtual time `when`, in seconds; a time in the past means now."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), call))

    def advance(self) -> bool:
        """Set virtual time to the next scheduled call and make the call; False if none is left."""
        if not self._queue:
            return False
        self.now, _, call = heapq.heappop(self._queue)
        call()
        return True
