"""Shows lines that all workers write equally only once: model summaries, warnings, logs.

Every worker runs the same script, so all workers write the same `model.summary()` and the same
warnings: the common lines. The launcher shows the common lines of the leader, which is the running
worker with the lowest id. A common line of another worker is shown only if the leader does not
write the same line. Lines on stdout other than model summaries, for example results and progress,
are private to a worker and are all shown.

Each worker's output is in one of four states, which only `LineMerger` changes. `LineMerger` has no
threads, clock or files: its methods take an event and the time, and return the lines to show now,
in order.

========  ========================================  ============================================
state     event                                     action; next state
========  ========================================  ============================================
any       a common line that a leader wrote before  drop the line
LEADING   a line                                    show it; match it with the waiting lines
SHOWING   a private line                            show the line
SHOWING   a common line                             the line waits; HOLDING
SHOWING   the leader writes a common line           note the line
HOLDING   a line                                    the line waits behind the earlier lines
HOLDING   the leader writes a waiting line          drop it; show the private lines after it
HOLDING   a line has waited `patience_seconds`      show it, and the private lines after it
HOLDING   no line waits                             SHOWING
ENDED     a line, also after the worker's restart   show the line
any       the worker has ended                      show its waiting lines; ENDED
LEADING   the worker has ended                      the lowest running worker is LEADING
========  ========================================  ============================================

Bounds: at most `MOST_WAITING` lines of a worker wait; beyond that number, the worker's oldest line
is shown. For each worker the merger notes the leader's newest `MOST_NOTED` lines. A line beyond
these bounds may be shown twice but is never lost.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator

#: How long a worker's common line waits for the leader's equal line, in seconds. Workers start some
#: seconds apart on a busy machine. With a longer time, a line that only one worker writes would
#: seem lost.
PATIENCE_SECONDS = 5.0
#: Maximum number of lines of one worker that wait for the leader's equal lines.
MOST_WAITING = 1000
#: Maximum number of the leader's lines that are noted until one worker writes equal lines.
MOST_NOTED = 4096
#: Matches the lines of a Keras model summary: title, table and parameter counts.
_SUMMARY = re.compile(
    r"\s*(Model: \".*\"|[\u2500-\u257f].*|(Total|Trainable|Non-trainable|Optimizer) params: .*)\s*$"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: Matches the time and thread that absl, TensorFlow and Python's logging write before a log line.
_TIME = re.compile(r"^([IWEF])\d{4} [\d:.]+ +\d+ |^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+(: | )")


class LineState(enum.Enum):
    """State of one worker's output in the `LineMerger`; the module's table has the transitions."""

    LEADING = enum.auto()
    SHOWING = enum.auto()
    HOLDING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True)
class WrittenLine:
    """One line that a worker wrote to stdout or stderr."""

    worker: int
    text: str
    is_error: bool

    @property
    def key(self) -> bytes | None:
        """Digest by which equal common lines are found; None for a private line of the worker."""
        text = _ESCAPES.sub("", self.text)
        if not self.is_error and not _SUMMARY.match(text):
            return None
        timeless = _TIME.sub(lambda found: found[1] or "", text)
        compared = f"{int(self.is_error)}{timeless}".encode(errors="replace")
        return hashlib.blake2b(compared, digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class _Waiting:
    line: WrittenLine
    # Digest of a common line; None for a private line that waits behind a common line
    key: bytes | None
    until: float  # latest time at which the line is shown, on the clock of `LineMerger`'s caller


class _WorkerLines:
    """Output state of one worker, its waiting lines, and the leader's lines that it may repeat."""

    def __init__(self) -> None:
        self.state = LineState.SHOWING
        self.waiting: collections.deque[_Waiting] = collections.deque()
        self._noted: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def note(self, key: bytes) -> None:
        """Drop the waiting line with the key of a line of the leader, or note the key for later."""
        for entry in list(self.waiting):
            if entry.key == key:
                # A signal handler has just shown the line of this entry
                with contextlib.suppress(ValueError):
                    self.waiting.remove(entry)
                return
        self._noted[key] = self._noted.get(key, 0) + 1
        self._noted.move_to_end(key)
        if len(self._noted) > MOST_NOTED:
            self._noted.popitem(last=False)

    def take_noted(self, key: bytes) -> bool:
        """Return whether the leader wrote a line with this key; remove one note of that line."""
        count = self._noted.get(key, 0)
        if count > 1:
            self._noted[key] = count - 1
        elif count:
            del self._noted[key]
        return bool(count)

    def release(self, is_over: Callable[[_Waiting], bool]) -> Iterator[WrittenLine]:
        """Yield waiting lines in order, up to the first common line for which `is_over` is False.

        A worker's lines are never shown out of order: a private line waits behind an earlier common
        line.

        Args:
            is_over: Called with a waiting common line; returns True if the line is to be shown now.
        """
        while self.waiting and (self.waiting[0].key is None or is_over(self.waiting[0])):
            yield self.waiting.popleft().line
        if not self.waiting and self.state is LineState.HOLDING:
            self.state = LineState.SHOWING


class LineMerger:
    """Decides which of the workers' lines are shown, and when, by the state table of this module.

    Args:
        workers: Ids of the workers.
        patience_seconds: How long a common line waits for the leader's equal line, in seconds.
    """

    def __init__(self, workers: Iterable[int], patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._workers = {worker: _WorkerLines() for worker in sorted(workers)}
        self._patience_seconds = patience_seconds
        self._choose_leader()

    def state_of(self, worker: int) -> LineState:
        """Return the state of a worker's output."""
        return self._workers[worker].state

    def line(self, line: WrittenLine, now: float) -> list[WrittenLine]:
        """Accept a line of a worker; return the lines to show now.

        Args:
            line: The line that a worker wrote.
            now: Time in seconds, on any clock that all calls share.
        """
        worker, key = self._workers[line.worker], line.key
        if key is not None and worker.take_noted(key):
            return []
        if worker.state is LineState.LEADING:
            return [line, *(self._match(key) if key is not None else ())]
        if worker.state is LineState.ENDED or (key is None and worker.state is LineState.SHOWING):
            return [line]
        worker.state = LineState.HOLDING
        worker.waiting.append(_Waiting(line, key, now + self._patience_seconds))
        return list(worker.release(lambda _: len(worker.waiting) > MOST_WAITING))

    def look(self, now: float) -> list[WrittenLine]:
        """Return the workers' lines that have waited for `patience_seconds`, to show them now."""
        return [
            line
            for worker in self._workers.values()
            for line in worker.release(lambda entry: entry.until <= now)
        ]

    def release(self, worker: int) -> list[WrittenLine]:
        """Return all waiting lines of a worker, which must be shown now."""
        return list(self._workers[worker].release(lambda _: True))

    def ended(self, worker: int) -> list[WrittenLine]:
        """Record that a worker has ended; return the lines that must be shown now."""
        ended = self._workers[worker]
        was_leading = ended.state is LineState.LEADING
        shown = self.release(worker)
        ended.state = LineState.ENDED
        return [*shown, *(self._choose_leader() if was_leading else ())]

    def _choose_leader(self) -> list[WrittenLine]:
        """Let the lowest running worker lead; return its waiting lines, and lines they release."""
        for worker in self._workers.values():
            if worker.state is not LineState.ENDED:
                waited = [entry.line for entry in worker.waiting]
                worker.waiting.clear()
                worker.state = LineState.LEADING
                return [shown for line in waited for shown in self.line(line, 0.0)]
        return []

    def _match(self, key: bytes) -> Iterator[WrittenLine]:
        """Note or drop the leader's line for the other workers; yield lines that no longer wait."""
        for worker in self._workers.values():
            if worker.state is not LineState.LEADING:
                worker.note(key)
                yield from worker.release(lambda _: False)


class MergedLines:
    """Merges workers' lines by a `LineMerger`, for the threads that read the workers' output.

    `show` blocks while nothing reads the launcher's output. The reader threads then block in `line`
    and `release`, which blocks the workers at their pipes. `look` and `ended` never wait for a
    thread that is in `show`: the launcher's main thread calls `look` and `ended`, also in a signal
    handler.

    Args:
        workers: Ids of the workers.
        show: Called with each line that must be shown, in order, by one thread at a time.
        clock: Returns the current time in seconds.
    """

    def __init__(
        self,
        workers: Iterable[int],
        show: Callable[[WrittenLine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._merger, self._show, self._clock = LineMerger(workers), show, clock
        # The lock is reentrant: a signal handler may interrupt the main thread while it holds the
        # lock.
        self._lock = threading.RLock()
        # Lines that must be shown, oldest first
        self._decided: collections.deque[WrittenLine] = collections.deque()
        self._showing = threading.Lock()

    def line(self, worker: int, text: str, is_error: bool) -> None:
        """Accept a line of a worker, and show the lines that need not wait any longer."""
        with self._lock:
            self._decided += self._merger.line(WrittenLine(worker, text, is_error), self._clock())
        self._show_decided(may_wait=True)

    def look(self) -> None:
        """Show the lines that have waited long enough. Called several times a second."""
        with self._lock:
            self._decided += self._merger.look(self._clock())
        self._show_decided(may_wait=False)

    def release(self, worker: int) -> None:
        """Show all waiting lines of a worker."""
        with self._lock:
            self._decided += self._merger.release(worker)
        self._show_decided(may_wait=True)

    def ended(self, worker: int) -> None:
        """Record that a worker has ended, and show the worker's waiting lines."""
        with self._lock:
            self._decided += self._merger.ended(worker)
        self._show_decided(may_wait=False)

    def _show_decided(self, may_wait: bool) -> None:
        """Show the lines that the merger has decided to show.

        Args:
            may_wait: Whether to wait for another thread that is showing lines. If False, that
                thread, or the next call of this method, shows the decided lines.
        """
        if not self._showing.acquire(blocking=may_wait):
            return
        try:
            while self._decided:
                self._show(self._decided.popleft())
        finally:
            self._showing.release()
