"""Records how the training script in this worker process uses Thinwire.

The script's sessions with the servers add themselves to `RECORD`. The launcher of the script reads
`RECORD` when the script ends.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from thinwire.runtime.run.program import Rows


class LeftBehind(Exception):
    """Raised if a restarted script cannot rejoin its run, which continues without this worker."""


class ScriptSession(Protocol):
    """Interface of a model's session with the servers, which is read when the script ends."""

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges with the PS that the script's session has started."""

    @property
    def stopped(self) -> bool:
        """True if the run of the session has ended, so that no exchange can follow."""


class ScriptRecord:
    """The sessions of one script with the servers, and the callbacks for the script's end.

    Attributes:
        chief: Id of the chief, the worker that writes the run's files.
        source: Path of the script and its digest when the script started; None if not recorded.
        program: Description of this worker's program (script, modules, arguments); empty before the
            worker joins.
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
        """Record a session with the servers that the script created by calling `distribute`."""
        self._sessions.append(session)

    def leave_fit(self, error: BaseException) -> None:
        """Record the exception that ended a `fit`; the script may catch the exception."""
        self._left_fit_by = error

    def has_left_fit_by(self, error: BaseException) -> bool:
        """Return True if `error`, which ends the script, is the error that ended its last `fit`."""
        return error is self._left_fit_by

    def on_evaluation(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        """Register the function to be called with the metrics of each evaluation by the script."""
        self._report = report

    def evaluated(self, metrics: Mapping[str, Any]) -> bool:
        """Report metrics of a script's evaluation; return True if a run records the metrics."""
        if self._report is not None:
            self._report(metrics)
        return self._report is not None

    def fail(self, error: BaseException) -> None:
        """Record an error in a training step, for which TensorFlow raises a different error."""
        self._failure = error

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the recorded step error if `error` is TensorFlow's error for it, else `error`."""
        is_tensorflows = type(error).__module__.startswith("tensorflow.")
        return self._failure if is_tensorflows and self._failure is not None else error

    def at_end(self, ending: Callable[[bool, str], None]) -> None:
        """Register a function to call once with (failed, message) when the script ends."""
        self._endings.append(ending)

    def end(self, failed: bool, message: str) -> None:
        """Call the functions registered by `at_end`, newest first; a second call does nothing."""
        while self._endings:
            self._endings.pop()(failed, message)

    def abandon(self) -> None:
        """Drop the functions registered by `at_end`, because this script ends without a report."""
        self._endings.clear()

    @property
    def sessions(self) -> Sequence[ScriptSession]:
        """All sessions of the script with the servers, in the order of the `distribute` calls."""
        return tuple(self._sessions)

    @property
    def is_distributed(self) -> bool:
        """True if the script has called `thinwire.distribute`."""
        return bool(self._sessions)

    @property
    def has_exchanged(self) -> bool:
        """True if the script has started an exchange with the PS, or its run has ended."""
        return any(session.num_exchanges or session.stopped for session in self._sessions)


#: Record of the training script that runs in this process.
RECORD = ScriptRecord()
