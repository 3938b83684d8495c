"""A core whose events are written down before anything comes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absl import logging

from ops.types import State
from ps import events, faults, soft_state
from ps.core import PsCore
from ps.journal import Journal, JournalFailed
from ps.reached import Reached

#: Why a run ends whose journal cannot be written any more.
STOP_REASON = "journal_failed"


class JournaledCore:
    """Writes down, then handles; without a journal it only handles.

    An event of a worker that the core does not survive is refused: the event that says so is
    written down behind it, by which a replay knows not to try it again.

    When the disk refuses, the run ends: what the core has not been told by then it is not told. A
    following shard cannot end a run by itself; until shard 0 does, it answers no push, for it would
    not be applied.

    Attributes:
        journal: None: nothing is written.
        failure: What went wrong; None: nothing.
        about: What the summary says beside the counts.
        recovered: What earlier journals brought back, all lives together.
        reached: Where to note how far the core has come; None: nowhere.
        on_failure: Called once, when the disk has refused.
    """

    def __init__(self, core: PsCore) -> None:
        """Begin without a journal."""
        self.core = core
        self.journal: Journal | None = None
        self.failure: JournalFailed | None = None
        self.about: dict[str, Any] = {}
        self.recovered: State = {"replayed": 0, "cuts": []}
        self.reached: Reached | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._settings: State = {}
        self._writes = self._ends = False

    def write_to(self, journal: Journal, settings: State) -> None:
        """Write to this journal from the next `begin` on."""
        self.journal, self._settings, self._writes = journal, settings, True

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Tell the core, or, where that cannot be written down, tell it to end the run."""
        self._write(event, now)
        if self.failure is not None and not self._ends:
            self._ends = True
            return self.core.handle(events.Stop(STOP_REASON), now)
        follows = not self.core.membership.leads
        if self.failure is not None and follows and isinstance(event, events.Push):
            return []
        actions = self._tell(event, now)
        if self.reached is not None:
            self.reached.note(self.core.version)
        if self.journal is not None and self._writes and self.journal.is_due:
            actions.append(events.Snapshot(self.core.version, self.core.snapshot()))
        return actions

    def _write(self, event: events.Event, now: float) -> None:
        if self.journal is None or not self._writes:
            return
        try:
            self.journal.append(event, now)
        except JournalFailed as failure:
            self._fail(failure)

    def _tell(self, event: events.Event, now: float) -> list[events.Action]:
        """Tell the core; what it raises over an event of a worker is that worker's end alone."""
        try:
            return self.core.handle(event, now)
        except Exception as error:
            if not isinstance(event, events.OfWorker):
                raise
            failed = faults.failed(event, error)
        self._write(failed, now)
        return self.core.handle(failed, now)

    def begin(self) -> State:
        """Begin another file; return what the snapshot of the present state must say of it."""
        if self.journal is None or not self._writes:
            return {"recovered": self.recovered}
        try:
            number = self.journal.begin(self._settings)
        except JournalFailed as failure:
            self._fail(failure)
            return {"recovered": self.recovered}
        soft = soft_state.save(self.core)
        return {"recovered": self.recovered, "journal": number, "soft": soft}

    def consistent(self, state: State) -> State:
        """Return the core's durable state as it is now, where `state` may be of a moment ago.

        A run that ends takes its last snapshot before everybody has been answered.
        """
        return self.core.snapshot() if self._writes and self.core.stop_reason else state

    def close(self) -> None:
        """Write nothing more: the next snapshot is the last one and holds everything."""
        self._writes = False
        for file in (self.journal, self.reached):
            if file is not None:
                file.close()

    def summary(self) -> dict[str, Any]:
        """Return the block of the run's summary."""
        journal = self.journal
        counts = {"events": journal.num_records, "bytes": journal.num_bytes} if journal else {}
        return {"journal": {**self.about, **self.recovered, **counts}} if self.about else {}

    def _fail(self, failure: JournalFailed) -> None:
        self.failure = failure
        logging.error("%s", failure)
        self.close()
        self.on_failure()
