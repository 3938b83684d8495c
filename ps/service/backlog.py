"""Bounds what one client has in the queue of the writer thread: its reader waits, and TCP."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Of the messages of one client that the writer thread has not come to, decoded; the newest in
#: addition.
MOST_QUEUED_BYTES = 4 << 20
#: Of its requests for the model that are not answered: clients have one at a time.
MOST_QUEUED_REQUESTS = 2
#: Of a message in the queue, whatever it holds.
_MESSAGE_BYTES = 1 << 10
_LOOK_SECONDS = 0.2  # between two looks whether the stream still stands


class Backlog:
    """What one stream's reader has queued; for that thread.

    Args:
        put: Queues a function for the writer thread.
        num_replies: Returns how many replies the stream has been given to send.
    """

    def __init__(
        self, put: Callable[[Callable[[], None]], None], num_replies: Callable[[], int]
    ) -> None:
        self._put, self._num_replies = put, num_replies
        self._num_bytes = 0
        self._num_requests = 0  # as many as replies, but for those that are not answered
        self._handled: threading.Event | None = None

    def add(self, num_bytes: int, is_request: bool) -> None:
        """Count a message that has been handled.

        Args:
            num_bytes: That are kept of it.
            is_request: Whether it is to be answered with the model or a part of it.
        """
        self._num_bytes += _MESSAGE_BYTES + num_bytes
        self._num_requests += is_request
        num_open = self._num_requests - self._num_replies() if is_request else 0
        is_much = self._num_bytes > MOST_QUEUED_BYTES or num_open >= MOST_QUEUED_REQUESTS
        if is_much and self._handled is None:
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
        self._num_requests = self._num_replies()
