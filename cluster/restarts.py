"""Whether, and when, a Cluster starts a worker again that died."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from ops.run import EXIT_BAD_FLAG, EXIT_CONFIGURATION, EXIT_REFUSED, EXIT_UNREACHABLE

#: What a worker may end with that another start may mend: a crash (an uncaught error is code 1; the
#: flags themselves were good once), and a PS that was away. Signals are negative.
_MENDABLE = (EXIT_BAD_FLAG, EXIT_UNREACHABLE)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


class Restarts:
    """Counts every worker's deaths.

    Args:
        most: Starts of one worker beyond the first, within the window; 0: none.
        window_seconds: After so long without one, counting begins anew.
        clock: For tests.
    """

    def __init__(
        self, most: int, window_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._window_seconds, self._clock = most, window_seconds, clock
        self._recent: dict[int, collections.deque[float]] = {}
        self._num: collections.Counter[int] = collections.Counter()

    @property
    def counts(self) -> dict[int, int]:
        """Worker -> how often it has been started again."""
        return dict(self._num)

    def pause(self, worker: int, code: int) -> float | None:
        """Return how many seconds to wait before a dead worker is started again; None: never.

        Args:
            worker: Which.
            code: What it ended with; -n: signal n.
        """
        recent, now = self._recent.setdefault(worker, collections.deque()), self._clock()
        while recent and now - recent[0] >= self._window_seconds:
            recent.popleft()
        # Where a host was cut off, the life before may still hold the worker's id, or the lock of
        # its directory, for a while.
        held = code in (EXIT_REFUSED, EXIT_CONFIGURATION) and bool(recent)
        if not (code < 0 or code in _MENDABLE or held) or len(recent) >= self._most:
            return None
        return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** len(recent))

    def started(self, worker: int) -> int:
        """Count another start; return how many that are."""
        self._recent.setdefault(worker, collections.deque()).append(self._clock())
        self._num[worker] += 1
        return self._num[worker]
