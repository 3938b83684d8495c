"""Records how the training script in this worker process uses Thinwire.

The script's sessions with the servers add themselves to `RECORD`. The launcher of the script reads
`RECORD` when the script ends.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
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


@dataclasses.dataclass
class ScriptRecord:
    """The sessions of one script with the servers, and the functions for the script's end.

    Attributes:
        chief: Id of the chief, the worker that writes the run's files.
        source: Path of the script and its digest when the script started; None if not recorded.
        program: Description of this worker's program (script, modules, arguments); empty before the
            worker joins.
        sessions: All sessions of the script with the servers, in the order of the calls of
            `distribute` that created them.
        endings: Functions to call once with (failed, message) when the script ends. A script that
            ends without a report clears the list.
        report: Function to call with the metrics of each evaluation by the script; None without a
            run that records the metrics.
        refreshers: Functions that load the run's newest weights into a script's modules, called
            before the script evaluates them.
        left_fit_by: Exception that ended the script's last `fit`; the script may catch the
            exception. None if no exception has ended a `fit`.
        failure: Error in a training step, for which TensorFlow raises a different error.
    """

    chief: int = 1
    source: tuple[pathlib.Path, str] | None = None
    program: Rows = ()
    sessions: list[ScriptSession] = dataclasses.field(default_factory=list)
    endings: list[Callable[[bool, str], None]] = dataclasses.field(default_factory=list)
    report: Callable[[Mapping[str, Any]], None] | None = None
    refreshers: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    left_fit_by: BaseException | None = None
    failure: BaseException | None = None

    def evaluated(self, metrics: Mapping[str, Any]) -> bool:
        """Report metrics of a script's evaluation; return True if a run records the metrics."""
        if self.report is not None:
            self.report(metrics)
        return self.report is not None

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the recorded step error if `error` is TensorFlow's error for it, else `error`."""
        is_tensorflows = type(error).__module__.startswith("tensorflow.")
        return self.failure if is_tensorflows and self.failure is not None else error

    def end(self, failed: bool, message: str) -> None:
        """Call the functions in `endings`, newest first; a second call does nothing."""
        while self.endings:
            self.endings.pop()(failed, message)

    @property
    def is_distributed(self) -> bool:
        """True if the script has called `thinwire.distribute`."""
        return bool(self.sessions)

    @property
    def has_exchanged(self) -> bool:
        """True if the script has started an exchange with the PS, or its run has ended."""
        return any(session.num_exchanges or session.stopped for session in self.sessions)


#: Record of the training script that runs in this process.
RECORD = ScriptRecord()
