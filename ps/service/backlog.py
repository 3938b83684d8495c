"""Limit on the number of one client's messages in the queue of the shard's writer thread.

At the limit of queued messages, the thread that reads the client's stream waits, so that TCP slows
the client down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Limit on the decoded bytes of one client's queued messages. The newest queued message may exceed
#: the limit.
MOST_QUEUED_BYTES = 4 << 20
#: Limit on one client's unanswered requests for the model's weights. A correct client has at most
#: one unanswered request.
MOST_QUEUED_REQUESTS = 2
#: Number of bytes that is counted for each queued message in addition to its content.
_MESSAGE_BYTES = 1 << 10
_LOOK_SECONDS = 0.2  # seconds between two checks that the client's stream is still open


class Backlog:
    """Count of the messages that the reader of one client's stream has queued; used only by the
    reader's thread.

    Args:
        put: Function that queues a call for the shard's writer thread.
        num_replies: Function that returns the number of replies that this shard has queued for
            sending on the stream.
    """

    def __init__(
        self, put: Callable[[Callable[[], None]], None], num_replies: Callable[[], int]
    ) -> None:
        self._put, self._num_replies = put, num_replies
        self._num_bytes = 0
        self._num_requests = 0  # number of replies queued so far plus unanswered requests
        self._handled: threading.Event | None = None

    def add(self, num_bytes: int, is_request: bool) -> None:
        """Count a message that the stream's reader has decoded and queued.

        Args:
            num_bytes: Size in bytes of the part of the message that stays in memory until the
                writer thread handles the message.
            is_request: True if the reply to the message contains the model or a part of the model.
        """
        self._num_bytes += _MESSAGE_BYTES + num_bytes
        self._num_requests += is_request
        num_open = self._num_requests - self._num_replies() if is_request else 0
        is_much = self._num_bytes > MOST_QUEUED_BYTES or num_open >= MOST_QUEUED_REQUESTS
        if is_much and self._handled is None:
            self._handled = threading.Event()
            self._put(self._handled.set)

    def wait(self, lost: Callable[[], bool]) -> None:
        """Wait while the client's queued messages exceed a limit; the writer thread handles them.

        Args:
            lost: Function that returns True if the client's stream has ended, which also ends the
                wait.
        """
        if self._handled is None:
            return
        while not self._handled.wait(_LOOK_SECONDS):
            if lost():
                return
        self._num_bytes, self._handled = 0, None
        self._num_requests = self._num_replies()
