"""What waits to be sent on one stream, bounded: a client that does not read costs no more memory.

Three kinds of messages wait in one order. Whole ones (control messages of some bytes) are counted,
and a client that leaves `MOST_CONTROL_BYTES` of them unread is to be cut off. Reports may be
missed: beyond `MOST_REPORT_BYTES` the oldest are dropped. Replies are made when their turn has
come, so that their number is what counts (`num_waiting`).
"""

from __future__ import annotations

import collections
import queue
import threading
import time

from thinwire.proto.grpc.common import Frames, QueuedFrames

MOST_CONTROL_BYTES = 4 << 20
MOST_REPORT_BYTES = 8 << 20


class SendQueue:
    """The queue of one stream's sending thread; everything else may be called from any thread."""

    def __init__(self) -> None:
        # An int is the size of a whole message, or 0 of a report, which is the oldest that is left.
        self._queue: queue.SimpleQueue[tuple[QueuedFrames | None, int]] = queue.SimpleQueue()
        self._reports: collections.deque[tuple[bytes, float]] = collections.deque()
        self._report_bytes = self._control_bytes = 0
        self._num_made = self._num_to_make = 0
        self._lock = threading.Lock()

    @property
    def num_replies(self) -> int:
        """How many replies have been queued since the beginning."""
        return self._num_to_make

    @property
    def num_waiting(self) -> int:
        """How many replies are still to be made."""
        return self._num_to_make - self._num_made

    @property
    def num_bytes(self) -> int:
        """Bytes of messages that wait; replies have none before they are made."""
        return self._report_bytes + self._control_bytes

    def put(self, frames: Frames, counted: bool) -> bool:
        """Queue frames; return whether the client still takes what it is sent.

        Args:
            frames: A tuple of bytes, or a reply: what makes them.
            counted: Whether they are training bytes.
        """
        now, size = time.monotonic(), -1
        if isinstance(frames, tuple):
            size = sum(map(len, frames))
            with self._lock:
                self._control_bytes += size
        else:
            self._num_to_make += 1  # by one thread alone, so that this counts
        self._queue.put(((frames, counted, now), size))
        return self._control_bytes <= MOST_CONTROL_BYTES

    def put_report(self, message: bytes) -> int:
        """Queue a report; return how many older ones have been dropped for it."""
        num_dropped = 0
        with self._lock:
            self._reports.append((message, time.monotonic()))
            self._report_bytes += len(message)
            while self._report_bytes > MOST_REPORT_BYTES and len(self._reports) > 1:
                self._report_bytes -= len(self._reports.popleft()[0])
                num_dropped += 1
        if not num_dropped:  # else it takes the turn of one that was dropped
            self._queue.put((None, 0))
        return num_dropped

    def end(self) -> None:
        """Let the sending thread end after what has been queued."""
        self._queue.put((None, -1))

    def get(self) -> QueuedFrames | None:
        """Return what is to be sent next, or None at the end (sending thread)."""
        while True:
            queued, size = self._queue.get()
            if queued is not None and size < 0:
                self._num_made += 1
                return queued
            if queued is not None:
                with self._lock:
                    self._control_bytes -= size
                return queued
            if size < 0:
                return None
            with self._lock:
                if self._reports:
                    message, queued_at = self._reports.popleft()
                    self._report_bytes -= len(message)
                    return (message,), False, queued_at
