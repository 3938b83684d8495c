"""Lines that all workers write alike, shown once: summaries of models, warnings, logs.

Each worker runs the same script, so each writes the same `model.summary()` and the same warnings.
The launcher shows those of the leader, the lowest worker that runs; a line of another worker
appears where the leader does not write it. Everything else that a worker prints is its own, and
is shown: results, progress.

A worker is in one of four states. Only `LineMerger` changes them. It has no threads, clock or
files: it is given events and the time, and returns what is to be shown, in order.

========  ========================================  ============================================
state     event                                     what follows
========  ========================================  ============================================
any       a line that a leader has written, too     dropped
LEADING   a line                                    shown, and matched with the others' lines
SHOWING   a line of its own                         shown
SHOWING   a line to compare                         waits; HOLDING
SHOWING   the leader writes a line to compare       noted
HOLDING   a line                                    waits behind those before it
HOLDING   the leader writes a line that waits       dropped, and what need not wait is shown
HOLDING   a line has waited for the patience        shown, with what need not wait behind it
HOLDING   nothing waits any more                    SHOWING
ENDED     a line, also of the worker's next start   shown
any       the worker has ended                      all that waits is shown; ENDED
LEADING   the worker has ended                      the lowest that has not ended: LEADING
========  ========================================  ============================================

Bounds: of a worker's lines at most `MOST_WAITING` wait, then the oldest is shown; of the leader's
lines the newest `MOST_NOTED` are noted for each worker. What is beyond is shown twice, never lost.
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

#: Workers begin some seconds apart on a busy machine. Longer, and a line that one worker alone
#: writes would seem lost.
PATIENCE_SECONDS = 5.0
MOST_WAITING = 1000
MOST_NOTED = 4096
#: Keras' summary: its title, its table, and its sums.
_SUMMARY = re.compile(
    r"\s*(Model: \".*\"|[\u2500-\u257f].*|(Total|Trainable|Non-trainable|Optimizer) params: .*)\s*$"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: Time and thread at the beginning of a log's line: of absl, TensorFlow, and Python's logging.
_TIME = re.compile(r"^([IWEF])\d{4} [\d:.]+ +\d+ |^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+(: | )")


class LineState(enum.Enum):
    """State of one worker."""

    LEADING = enum.auto()
    SHOWING = enum.auto()
    HOLDING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True)
class WrittenLine:
    """One line of a worker."""

    worker: int
    text: str
    is_error: bool

    @property
    def key(self) -> bytes | None:
        """A digest that equal lines share; None: the line is the worker's own."""
        text = _ESCAPES.sub("", self.text)
        if not self.is_error and not _SUMMARY.match(text):
            return None
        timeless = _TIME.sub(lambda found: found[1] or "", text)
        compared = f"{int(self.is_error)}{timeless}".encode(errors="replace")
        return hashlib.blake2b(compared, digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class _Waiting:
    line: WrittenLine
    key: bytes | None  # None: it only waits behind others
    until: float


class _WorkerLines:
    """One worker's state, the lines that wait, and what the leader has written beyond them."""

    def __init__(self) -> None:
        self.state = LineState.SHOWING
        self.waiting: collections.deque[_Waiting] = collections.deque()
        self._noted: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def note(self, key: bytes) -> None:
        """Note a line of the leader, or drop the same line that waits."""
        for entry in list(self.waiting):
            if entry.key == key:
                with contextlib.suppress(ValueError):  # shown by a handler of signals just now
                    self.waiting.remove(entry)
                return
        self._noted[key] = self._noted.get(key, 0) + 1
        self._noted.move_to_end(key)
        if len(self._noted) > MOST_NOTED:
            self._noted.popitem(last=False)

    def take_noted(self, key: bytes) -> bool:
        """Return whether the leader has written this line, once for each time that it has."""
        count = self._noted.get(key, 0)
        if count > 1:
            self._noted[key] = count - 1
        elif count:
            del self._noted[key]
        return bool(count)

    def release(self, is_over: Callable[[_Waiting], bool]) -> Iterator[WrittenLine]:
        """Yield the first lines that need not wait, as far as they stand together."""
        while self.waiting and (self.waiting[0].key is None or is_over(self.waiting[0])):
            yield self.waiting.popleft().line
        if not self.waiting and self.state is LineState.HOLDING:
            self.state = LineState.SHOWING


class LineMerger:
    """Decides which lines are shown, and when; see the module.

    Args:
        workers: Their ids.
        patience_seconds: How long a line waits for the leader to write it, too.
    """

    def __init__(self, workers: Iterable[int], patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._workers = {worker: _WorkerLines() for worker in sorted(workers)}
        self._patience_seconds = patience_seconds
        self._choose_leader()

    def state_of(self, worker: int) -> LineState:
        """Return a worker's state."""
        return self._workers[worker].state

    def line(self, line: WrittenLine, now: float) -> list[WrittenLine]:
        """Take a line; return what is to be shown."""
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
        """Return the lines that have waited long enough."""
        return [
            line
            for worker in self._workers.values()
            for line in worker.release(lambda entry: entry.until <= now)
        ]

    def release(self, worker: int) -> list[WrittenLine]:
        """Return all that waits of a worker, of which more is to be shown now."""
        return list(self._workers[worker].release(lambda _: True))

    def ended(self, worker: int) -> list[WrittenLine]:
        """Note that a worker has ended; return what is to be shown."""
        ended = self._workers[worker]
        was_leading = ended.state is LineState.LEADING
        shown = self.release(worker)
        ended.state = LineState.ENDED
        return [*shown, *(self._choose_leader() if was_leading else ())]

    def _choose_leader(self) -> list[WrittenLine]:
        """Let the lowest worker that runs lead; return its lines that waited, and what follows."""
        for worker in self._workers.values():
            if worker.state is not LineState.ENDED:
                waited = [entry.line for entry in worker.waiting]
                worker.waiting.clear()
                worker.state = LineState.LEADING
                return [shown for line in waited for shown in self.line(line, 0.0)]
        return []

    def _match(self, key: bytes) -> Iterator[WrittenLine]:
        """Drop the same line where it waits; yield what then need not wait any more."""
        for worker in self._workers.values():
            if worker.state is not LineState.LEADING:
                worker.note(key)
                yield from worker.release(lambda _: False)


class MergedLines:
    """A `LineMerger` for threads that read workers' output.

    A screen that is not read lets `show` wait. The threads then wait with it, as for a pipe. The
    launcher's main thread, which calls `look` and `ended`, also in a handler of signals, does not.

    Args:
        workers: Their ids.
        show: Called with each line to show, in order; by one thread at a time.
        clock: Seconds.
    """

    def __init__(
        self,
        workers: Iterable[int],
        show: Callable[[WrittenLine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._merger, self._show, self._clock = LineMerger(workers), show, clock
        self._lock = threading.RLock()  # a handler of signals may interrupt the main thread in here
        self._decided: collections.deque[WrittenLine] = collections.deque()  # to be shown, in order
        self._showing = threading.Lock()

    def line(self, worker: int, text: str, is_error: bool) -> None:
        """Take a line of a worker."""
        with self._lock:
            self._decided += self._merger.line(WrittenLine(worker, text, is_error), self._clock())
        self._show_decided(may_wait=True)

    def look(self) -> None:
        """Show what has waited long enough; to be called from time to time."""
        with self._lock:
            self._decided += self._merger.look(self._clock())
        self._show_decided(may_wait=False)

    def release(self, worker: int) -> None:
        """Show what waits of a worker."""
        with self._lock:
            self._decided += self._merger.release(worker)
        self._show_decided(may_wait=True)

    def ended(self, worker: int) -> None:
        """Note that a worker has ended."""
        with self._lock:
            self._decided += self._merger.ended(worker)
        self._show_decided(may_wait=False)

    def _show_decided(self, may_wait: bool) -> None:
        """Show what is decided, or leave it to the thread that does so now, or to the next call."""
        if not self._showing.acquire(blocking=may_wait):
            return
        try:
            while self._decided:
                self._show(self._decided.popleft())
        finally:
            self._showing.release()
