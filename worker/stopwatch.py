"""Where a worker's time goes."""

from __future__ import annotations

import time


class Stopwatch:
    """Adds up where a worker's time goes."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds: dict[str, float] = {"compute": 0.0, "encode": 0.0, "wait": 0.0}
        self._mark = time.perf_counter()

    def start(self) -> None:
        """Begin a lap without booking the time before."""
        self._mark = time.perf_counter()

    def lap(self, what: str) -> float:
        """Book the seconds since the last mark, and return them."""
        now = time.perf_counter()
        seconds = now - self._mark
        self.seconds[what] += seconds
        self._mark = now
        return seconds
