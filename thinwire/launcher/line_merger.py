"""Shows output lines that all workers write (model summaries, warnings, logs) only once.

Every worker runs the same script, so all workers write the same `model.summary()` and the same
warnings: the common lines. Of the workers' common lines, the launcher shows the lines of the
leader, which is the running worker with the lowest id. A common line (of all workers) from a worker
other than the leader is shown only if the leader does not write the same line. Lines on stdout
other than model summaries, for example results and progress, are private to a worker and are all
shown.

The output of each worker is in one of four states, which only `LineMerger` changes. `LineMerger`
has no threads, clock or files. The methods of `LineMerger` take an event and the time, and return
the output lines to show now, in order.

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

At most `MOST_WAITING` lines of a worker wait, and if more lines arrive, the merger shows the
worker's oldest line. For each worker the `LineMerger` notes the leader's newest `MOST_NOTED` lines.
An output line beyond `MOST_WAITING` or `MOST_NOTED` may be shown twice but is never lost.
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

from thinwire.launcher.failures import ESCAPES

#: Longest time that a worker's output line waits for an equal line of the leader, in seconds.
#: Workers start some seconds apart on a busy machine. With a longer time, a line that only one
#: worker writes would seem lost.
PATIENCE_SECONDS = 5.0
#: Maximum number of output lines of one worker that wait for equal lines of the leader.
MOST_WAITING = 1000
#: Maximum number of the leader's lines that are noted until one worker writes equal lines.
MOST_NOTED = 4096
#: Matches the lines of a Keras model summary: title, table and parameter counts.
_SUMMARY = re.compile(
    r"\s*(Model: \".*\"|[\u2500-\u257f].*|(Total|Trainable|Non-trainable|Optimizer) params: .*)\s*$"
)
#: Matches the time and thread that absl, TensorFlow and Python's logging write before a log line.
_TIME = re.compile(r"^([IWEF])\d{4} [\d:.]+ +\d+ |^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+(: | )")


class LineState(enum.Enum):
    """State of a worker's output in the `LineMerger`, for example LEADING or HOLDING."""

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
        """Digest by which equal lines of workers are found; None if a line is never merged."""
        text = ESCAPES.sub("", self.text)
        if not self.is_error and not _SUMMARY.match(text):
            return None
        timeless = _TIME.sub(lambda found: found[1] or "", text)
        compared = f"{int(self.is_error)}{timeless}".encode(errors="replace")
        return hashlib.blake2b(compared, digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class _Waiting:
    line: WrittenLine
    # Digest by which equal lines of workers are found; None for a line that is never merged
    key: bytes | None
    until: float  # latest time at which the line is shown, on the clock of `LineMerger`'s caller


class _WorkerLines:
    """Output state and waiting lines of one worker, and lines of the leader that it may repeat."""

    def __init__(self) -> None:
        self.state = LineState.SHOWING
        self.waiting: collections.deque[_Waiting] = collections.deque()
        self._noted: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def note(self, key: bytes) -> None:
        """Drop this worker's waiting line that equals the leader's line, or note the line's key."""
        for entry in list(self.waiting):
            if entry.key == key:
                # A signal handler may have just shown and removed the waiting line
                with contextlib.suppress(ValueError):
                    self.waiting.remove(entry)
                return
        self._noted[key] = self._noted.get(key, 0) + 1
        self._noted.move_to_end(key)
        if len(self._noted) > MOST_NOTED:
            self._noted.popitem(last=False)

    def take_noted(self, key: bytes) -> bool:
        """Return whether the leader wrote a line with this key; remove one note of such a line."""
        count = self._noted.get(key, 0)
        if count > 1:
            self._noted[key] = count - 1
        elif count:
            del self._noted[key]
        return bool(count)

    def release(self, is_over: Callable[[_Waiting], bool]) -> Iterator[WrittenLine]:
        """Yield waiting output lines in order, up to the first line that must still wait.

        A worker's lines are never shown out of order, so a line that is never merged waits for an
        earlier line of the worker that may be merged.

        Args:
            is_over: Function that returns True if a waiting line, which may equal a line of the
                leader, must be shown now.
        """
        while self.waiting and (self.waiting[0].key is None or is_over(self.waiting[0])):
            yield self.waiting.popleft().line
        if not self.waiting and self.state is LineState.HOLDING:
            self.state = LineState.SHOWING


class LineMerger:
    """Decides which output lines of workers the launcher shows, and when, by a state table.

    Args:
        workers: Ids of the workers whose output lines are merged.
        patience_seconds: Longest time that a worker's output line waits for an equal line of the
            leader (the lowest worker), in seconds.
    """

    def __init__(self, workers: Iterable[int], patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._workers = {worker: _WorkerLines() for worker in sorted(workers)}
        self._patience_seconds = patience_seconds
        self._choose_leader()

    def state_of(self, worker: int) -> LineState:
        """Return the `LineState` of a worker's output."""
        return self._workers[worker].state

    def line(self, line: WrittenLine, now: float) -> list[WrittenLine]:
        """Accept a worker's output line; return the output lines to show now.

        Args:
            line: The line that a worker wrote.
            now: Current time in seconds, on the clock of all calls of the `LineMerger`.
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
        """Return the workers' output lines that waited for `patience_seconds`, to show them now."""
        return [
            line
            for worker in self._workers.values()
            for line in worker.release(lambda entry: entry.until <= now)
        ]

    def release(self, worker: int) -> list[WrittenLine]:
        """Return all waiting output lines of a worker, to show them now."""
        return list(self._workers[worker].release(lambda _: True))

    def ended(self, worker: int) -> list[WrittenLine]:
        """Record that a worker has ended; return the output lines to show now."""
        ended = self._workers[worker]
        was_leading = ended.state is LineState.LEADING
        shown = self.release(worker)
        ended.state = LineState.ENDED
        return [*shown, *(self._choose_leader() if was_leading else ())]

    def _choose_leader(self) -> list[WrittenLine]:
        """Make the running worker with the lowest id the leader; return the lines to show now."""
        for worker in self._workers.values():
            if worker.state is not LineState.ENDED:
                waited = [entry.line for entry in worker.waiting]
                worker.waiting.clear()
                worker.state = LineState.LEADING
                return [shown for line in waited for shown in self.line(line, 0.0)]
        return []

    def _match(self, key: bytes) -> Iterator[WrittenLine]:
        """Match an output line of the leader with other workers' lines; yield lines to show now."""
        for worker in self._workers.values():
            if worker.state is not LineState.LEADING:
                worker.note(key)
                yield from worker.release(lambda _: False)


class MergedLines:
    """Merges workers' lines by a `LineMerger`, for the threads that read the workers' output.

    The function `show` blocks while nothing reads the launcher's output. While `show` blocks, the
    threads that read workers' output block too, so the workers block at their pipes. The launcher's
    main thread, even in a signal handler, calls `look` and `ended`, which never wait for a thread
    that is in `show`.

    Args:
        workers: Ids of the workers whose output lines are merged.
        show: Function that is called with each output line to show, in order, by one thread at a
            time.
        clock: Function that returns the current time in seconds.
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
        # Output lines that must be shown, oldest first
        self._decided: collections.deque[WrittenLine] = collections.deque()
        self._showing = threading.Lock()

    def line(self, worker: int, text: str, is_error: bool) -> None:
        """Accept a worker's output line, and show the output lines that need not wait longer."""
        line = WrittenLine(worker, text, is_error)
        self._show_lines(lambda now: self._merger.line(line, now), may_wait=True)

    def look(self) -> None:
        """Show the workers' output lines that waited long enough; called several times a second."""
        self._show_lines(self._merger.look, may_wait=False)

    def release(self, worker: int) -> None:
        """Show all waiting output lines of a worker."""
        self._show_lines(lambda _: self._merger.release(worker), may_wait=True)

    def ended(self, worker: int) -> None:
        """Record that a worker has ended, and show its output lines that wait."""
        self._show_lines(lambda _: self._merger.ended(worker), may_wait=False)

    def _show_lines(self, decide: Callable[[float], list[WrittenLine]], may_wait: bool) -> None:
        """Show the workers' output lines that the `LineMerger` decides to show.

        Args:
            decide: Function of the present time that returns the output lines to show now.
            may_wait: Whether to wait for another thread that is showing lines. If False, the other
                thread or the next call of this method shows the lines.
        """
        with self._lock:
            self._decided += decide(self._clock())
        if not self._showing.acquire(blocking=may_wait):
            return
        try:
            while self._decided:
                self._show(self._decided.popleft())
        finally:
            self._showing.release()
