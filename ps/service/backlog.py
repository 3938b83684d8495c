"""Bounds what one client has in the queue of the writer thread: its reader waits, and TCP."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Of the messages of one client that the writer thread has not come to, and the newest in addition.
MOST_QUEUED_BYTES = 4 << 20
_LOOK_SECONDS = 0.2  # between two looks whether the stream still stands


class Backlog:
    """What one stream's reader has queued; for that thread.

    Args:
        put: Queues a function for the writer thread.
    """

    def __init__(self, put: Callable[[Callable[[], None]], None]) -> None:
        self._put = put
        self._num_bytes = 0
        self._handled: threading.Event | None = None

    def add(self, num_bytes: int) -> None:
        """Count a frame that has been handled."""
        self._num_bytes += num_bytes
        if self._num_bytes > MOST_QUEUED_BYTES and self._handled is None:
            self._handled = threading.Event()
            self._put(self._handled.set)

    def wait(self, lost: Callable[[], bool]) -> None:
        """Wait until the writer thread has come to what was queued, if that is much.

        Args:
            lost: Whether the stream has ended meanwhile.
        """
        if self._handled is None:
            return
        while not self._handled.wait(_LOOK_SECONDS):
            if lost():
                return
        self._num_bytes, self._handled = 0, None
