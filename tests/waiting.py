"""Time limits of tests that wait for events, scaled by the machine's present speed.

A limit must never decide a test that passes, so each limit is generous and multiplied by
`slowness`. The slowness is measured once in each process: the time of a fixed piece of work,
divided by its time on a quiet machine. Other work on the same cores increases this ratio.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

#: The wall-clock time of the work below on a quiet 3 GHz core.
_QUIET_SECONDS = 0.06
_MOST = 8.0


@functools.cache
def slowness() -> float:
    """Return the factor of all limits: 1 on a quiet machine, at most 8."""
    began = time.monotonic()
    total = 0
    for number in range(2_000_000):
        total += number
    return min(max(1.0, (time.monotonic() - began) / _QUIET_SECONDS), _MOST)


def patience(seconds: float) -> float:
    """Return a limit for this machine, given the limit for a quiet machine."""
    return seconds * slowness()


def wait_until(
    condition: Callable[[], object],
    seconds: float = 30.0,
    what: str | Callable[[], str] = "the condition",
    pause_seconds: float = 0.01,
) -> None:
    """Look again and again until a condition holds.

    Time in which this process was stopped does not count.

    Args:
        condition: Has come true when it returns something true.
        seconds: The limit on a quiet machine.
        what: What is awaited, for the error.
        pause_seconds: Between two looks.

    Raises:
        AssertionError: It does not hold in time.
    """
    limit, waited, before = patience(seconds), 0.0, time.monotonic()
    while not condition():
        if waited >= limit:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not seen in {limit:g} s: {text}")
        threading.Event().wait(pause_seconds)
        now = time.monotonic()
        waited, before = waited + min(10 * pause_seconds, now - before), now
