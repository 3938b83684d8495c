"""What the script of this process, a worker, has done with Thinwire so far.

The script's sessions record themselves here; whoever runs the script reads it at the script's end.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from thinwire.runtime.run.program import Rows


class LeftBehind(Exception):
    """This script was started again and can take no part in its run, which goes on without it."""


class ScriptSession(Protocol):
    """A model's place in the run, as far as the script's end concerns it."""

    @property
    def num_exchanges(self) -> int:
        """Exchanges begun so far."""

    @property
    def stopped(self) -> bool:
        """Whether the run has ended, so that nothing is left to exchange."""


class ScriptRecord:
    """The sessions of one script, and what is to be done when it ends.

    Attributes:
        chief: The worker whose script writes the files.
        source: The script's file, and its digest when it began; None: nobody has noted them.
        program: What this worker computes with, once it is about to join.
    """

    def __init__(self) -> None:
        self.chief = 1
        self.source: tuple[pathlib.Path, str] | None = None
        self.program: Rows = ()
        self._sessions: list[ScriptSession] = []
        self._endings: list[Callable[[bool, str], None]] = []
        self._report: Callable[[Mapping[str, Any]], None] | None = None
        self._left_fit_by: BaseException | None = None
        self._failure: BaseException | None = None

    def add(self, session: ScriptSession) -> None:
        """Record a session, once the script has called `distribute`."""
        self._sessions.append(session)

    def leave_fit(self, error: BaseException) -> None:
        """Record what a `fit` was left by, which the script may catch."""
        self._left_fit_by = error

    def has_left_fit_by(self, error: BaseException) -> bool:
        """Return whether an error that ends the script comes out of its last `fit`."""
        return error is self._left_fit_by

    def on_evaluation(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `report` with the metrics of each evaluation that the script makes itself."""
        self._report = report

    def evaluated(self, metrics: Mapping[str, Any]) -> bool:
        """Report the script's own evaluation; return whether there is a run that records it."""
        if self._report is not None:
            self._report(metrics)
        return self._report is not None

    def fail(self, error: BaseException) -> None:
        """Record what went wrong in a step that TensorFlow has called, which hides the error."""
        self._failure = error

    def cause_of(self, error: BaseException) -> BaseException:
        """Return what an error that ends the script comes from: itself, or what was recorded."""
        is_tensorflows = type(error).__module__.startswith("tensorflow.")
        return self._failure if is_tensorflows and self._failure is not None else error

    def at_end(self, ending: Callable[[bool, str], None]) -> None:
        """Call `ending` once with (whether the script failed, why), when the script has ended."""
        self._endings.append(ending)

    def end(self, failed: bool, message: str) -> None:
        """Call what `at_end` was given, the newest first; nothing when repeated."""
        while self._endings:
            self._endings.pop()(failed, message)

    def abandon(self) -> None:
        """Leave without a report: for the others this script is lost."""
        self._endings.clear()

    @property
    def sessions(self) -> Sequence[ScriptSession]:
        """All of them, in the order of the calls of `distribute`."""
        return tuple(self._sessions)

    @property
    def is_distributed(self) -> bool:
        """Whether the script has called `distribute`."""
        return bool(self._sessions)

    @property
    def has_exchanged(self) -> bool:
        """Whether anything was exchanged, or the run had ended before."""
        return any(each.num_exchanges or each.stopped for each in self._sessions)


#: The script of this process.
RECORD = ScriptRecord()
