"""A token bucket that may go into debt: it computes how long to wait, and reads no clock."""

from __future__ import annotations

import threading


class TokenBucket:
    """Limits what is taken per second, on average; thread-safe, so that senders can share one.

    A sender first waits until `wait_seconds` is 0 and then takes, even if it takes more than the
    bucket holds: the next sender waits for that debt. So over any span of time at most
    ``rate * seconds + burst`` and one last amount are taken.

    Args:
        rate: Tokens that are added per second; above 0.
        burst: Tokens that the bucket holds; it starts full.

    Source: the token bucket of RFC 2697, with debt instead of marking.

    >>> bucket = TokenBucket(rate=100.0, burst=10.0)
    >>> bucket.take(0.0, 30.0)
    >>> bucket.wait_seconds(0.0), bucket.wait_seconds(0.5)
    (0.2, 0.0)
    """

    def __init__(self, rate: float, burst: float) -> None:
        if rate <= 0 or burst < 0:
            raise ValueError(f"a bucket needs rate > 0 and burst >= 0, not {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._filled_at: float | None = None
        self._lock = threading.Lock()

    def wait_seconds(self, now: float) -> float:
        """Return how long from ``now`` on nothing may be taken; 0 while there is no debt."""
        with self._lock:
            return max(0.0, -self._fill(now) / self.rate)

    def take(self, now: float, amount: float) -> None:
        """Take an amount, if need be into debt."""
        with self._lock:
            self._level = self._fill(now) - amount

    def _fill(self, now: float) -> float:
        if self._filled_at is not None and now > self._filled_at:
            self._level = min(self.burst, self._level + (now - self._filled_at) * self.rate)
        self._filled_at = now if self._filled_at is None else max(now, self._filled_at)
        return self._level
