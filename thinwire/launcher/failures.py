"""The line on stderr by which a script's worker reports its end to its launcher."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys

#: Begins a failure report on stderr, which ends at the end of the line.
FAILURE = "thinwire-failure "
#: Line of stderr by which a script reports that it has run to its end.
COMPLETED = "thinwire-completed"


class Cause(enum.Enum):
    """Cause of a failure, which decides how to continue."""

    SCRIPT = "script"  # the script raised an error, or exited with a code other than 0
    THINWIRE = "thinwire"  # Thinwire rejected an input; the text has the remedy
    INTERRUPTED = "interrupted"  # a signal reached only this worker
    LOST = "lost"  # the worker could not reach the PS; the script is not at fault
    OTHER_RUN = "other run"  # the run directory holds a run of another script
    ELSEWHERE = "elsewhere"  # another worker failed, perhaps a worker of another launcher


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a script failed."""

    code: int  # exit code of the worker
    text: str  # a message, or a traceback; may have several lines
    cause: Cause = Cause.SCRIPT
    reason: str = ""  # reason in one line; empty if the last line of the text is the reason

    @property
    def headline(self) -> str:
        """The reason in one line."""
        return self.reason or self.text.rstrip().rpartition("\n")[2]

    @property
    def is_lost(self) -> bool:
        """Whether the worker could not reach the PS."""
        return self.cause is Cause.LOST

    @property
    def is_refused(self) -> bool:
        """Whether the run directory holds a run of another script."""
        return self.cause is Cause.OTHER_RUN

    @property
    def has_page(self) -> bool:
        """Whether the text contains more than the reason."""
        return self.text.strip() != self.headline.strip()

    def last_line(self, worker: int, log: str) -> str:
        """Return the last line of the launcher's output: the reason and the remedy.

        Args:
            worker: Id of the worker that failed.
            log: Path of the file with the worker's output.
        """
        if self.cause is Cause.ELSEWHERE:
            return f"{self.headline} (worker {worker} was ended with the run)"
        text = f"worker {worker}: {self.headline}"
        if self.cause is Cause.SCRIPT:
            return (
                f"{text.rstrip('.')}. Correct the script and give the same command again; its "
                f"whole output is in {log}"
            )
        if self.cause in (Cause.LOST, Cause.INTERRUPTED):
            return f"{text.rstrip('.')}. The same command resumes the run"
        return text

    def report(self) -> None:
        """Write the failure to stderr as one line, for `read`."""
        document = dataclasses.asdict(self) | {"cause": self.cause.value}
        sys.stderr.flush()
        sys.stderr.write(f"{FAILURE}{json.dumps(document)}\n")
        sys.stderr.flush()

    @classmethod
    def read(cls, line: str) -> tuple[str, Failure | None]:
        """Return the text before a failure report in a line, and the failure or None."""
        before, mark, text = line.partition(FAILURE)
        if not mark:
            return line, None
        try:
            document = json.loads(text)
            return before, cls(
                int(document["code"]),
                str(document["text"]),
                Cause(document["cause"]),
                str(document["reason"]),
            )
        except (ValueError, KeyError, TypeError):
            return line, None


def report_completion() -> None:
    """Report to the launcher that the script has run to its end."""
    sys.stderr.flush()
    sys.stderr.write(f"{COMPLETED}\n")
    sys.stderr.flush()
