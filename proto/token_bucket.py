"""A token bucket (rate limiter) that allows debt. The token bucket computes waiting times and reads
no clock.
"""

from __future__ import annotations

import threading


class TokenBucket:
    """Limits the average number of tokens (for example bytes) taken per second. Several sending
    threads may share one token bucket.

    A sender first waits until `wait_seconds` is 0 and then takes its tokens, even more tokens than
    the bucket holds. If the bucket is in debt, the next sender waits until the debt is repaid. In
    any span of ``seconds``, senders take at most ``rate * seconds + burst`` tokens plus one
    sender's last amount.

    Args:
        rate: Number of tokens that the bucket gains per second; above 0.
        burst: Largest number of tokens in the bucket, which is full at the start.

    Source: the token bucket of RFC 2697, with debt instead of marking.

    >>> bucket = TokenBucket(rate=100.0, burst=10.0)
    >>> bucket.take(0.0, 30.0)
    >>> bucket.wait_seconds(0.0), bucket.wait_seconds(0.5)
    (0.2, 0.0)
    """

    def __init__(self, rate: float, burst: float) -> None:
        if rate <= 0 or burst < 0:
            raise ValueError(f"token bucket: rate={rate}, burst={burst}; expected > 0 and >= 0")
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._filled_at: float | None = None
        self._lock = threading.Lock()

    def wait_seconds(self, now: float) -> float:
        """Return the seconds from ``now`` until a sender may take tokens; 0 if there is no debt."""
        with self._lock:
            return max(0.0, -self._fill(now) / self.rate)

    def take(self, now: float, amount: float) -> None:
        """Take `amount` tokens from the bucket at the time `now`, in seconds. The token bucket may
        go into debt.
        """
        with self._lock:
            self._level = self._fill(now) - amount

    def _fill(self, now: float) -> float:
        if self._filled_at is not None and now > self._filled_at:
            self._level = min(self.burst, self._level + (now - self._filled_at) * self.rate)
        self._filled_at = now if self._filled_at is None else max(now, self._filled_at)
        return self._level
