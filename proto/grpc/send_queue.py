"""Bounded send queue of a gRPC stream, so that a client that does not read costs limited memory.

Three kinds of messages wait in a client's send queue: control messages, reports and replies. The
send queue counts the bytes of control messages; its caller disconnects a client that leaves more
than `MOST_CONTROL_BYTES` unread. A client may miss status reports: if more than `MOST_REPORT_BYTES`
of them wait, the send queue drops the oldest reports. The sending thread builds a reply just before
it sends the reply, so the number of queued replies is bounded (`num_waiting`).
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
    """Send queue of one client's stream at a shard: only the sending thread may call `get`.

    Only one thread may queue replies to a client with `put`. All methods of a send queue except
    `get` and `put` are thread-safe.
    """

    def __init__(self) -> None:
        # The entries of the queue are (frames, size). The size is a control message's bytes, or -1
        # for a reply and for the end (no frames). (None, 0) stands for the oldest report in
        # `_reports`: a separate deque holds the reports, because a full deque drops its oldest
        # report.
        self._queue: queue.SimpleQueue[tuple[QueuedFrames | None, int]] = queue.SimpleQueue()
        self._reports: collections.deque[tuple[bytes, float]] = collections.deque()
        self._report_bytes = self._control_bytes = 0
        self._num_made = self._num_to_make = 0
        self._lock = threading.Lock()

    @property
    def num_replies(self) -> int:
        """Number of replies to the client that were queued since its stream began."""
        return self._num_to_make

    @property
    def num_waiting(self) -> int:
        """Number of queued replies that the sending thread has not built yet."""
        return self._num_to_make - self._num_made

    @property
    def num_bytes(self) -> int:
        """Bytes of queued control messages and status reports, without the replies, which are not
        built yet.
        """
        return self._report_bytes + self._control_bytes

    def put(self, frames: Frames, counted: bool) -> bool:
        """Queue frames for the client; return False if it leaves too many control bytes unread.

        Args:
            frames: Frames of a control message (a tuple), or a function that builds a reply.
            counted: True to count the bytes of the frames as training traffic.
        """
        now, size = time.monotonic(), -1
        if isinstance(frames, tuple):
            size = sum(map(len, frames))
            with self._lock:
                self._control_bytes += size
        else:
            self._num_to_make += 1  # the counter needs no lock, as only one thread queues replies
        self._queue.put(((frames, counted, now), size))
        return self._control_bytes <= MOST_CONTROL_BYTES

    def put_report(self, message: bytes) -> int:
        """Queue a report for the client; return the number of older reports dropped to make
        space.
        """
        num_dropped = 0
        with self._lock:
            self._reports.append((message, time.monotonic()))
            self._report_bytes += len(message)
            while self._report_bytes > MOST_REPORT_BYTES and len(self._reports) > 1:
                self._report_bytes -= len(self._reports.popleft()[0])
                num_dropped += 1
        # The entry of a dropped report stays in the queue, and the new report uses that entry.
        if not num_dropped:
            self._queue.put((None, 0))
        return num_dropped

    def end(self) -> None:
        """Make the thread that sends to a client end after the messages queued so far."""
        self._queue.put((None, -1))

    def get(self) -> QueuedFrames | None:
        """Wait for frames to send to the client and return them; return None at the end of the
        stream. Only the sending thread may call `get`.
        """
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
