"""Defines the lines on stderr by which a worker reports the end of its script to the launcher."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys

#: Prefix of a failure report on stderr. The JSON object of the report ends at the line's end.
FAILURE = "thinwire-failure "
#: Line of stderr by which a script reports that it has run to its end.
COMPLETED = "thinwire-completed"
#: Matches the escape sequences of a terminal, such as colors.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Cause(enum.Enum):
    """Cause of a script's failure; the launcher shows the user a remedy for the cause."""

    SCRIPT = "script"  # the user's script raised an error, or exited with a code other than 0
    # Thinwire rejected a flag, call or value; the failure's text has the remedy
    THINWIRE = "thinwire"
    INTERRUPTED = "interrupted"  # a signal interrupted this worker alone, not the whole run
    LOST = "lost"  # the worker could not reach the PS; the script has no error
    OTHER_RUN = "other run"  # the run directory holds a run of another script
    # another worker failed, perhaps a worker that another task's launcher started
    ELSEWHERE = "elsewhere"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A script's failure on one worker, as the worker reports it to the launcher."""

    code: int  # exit code of the worker that failed
    text: str  # message or traceback of the script's error; may have several lines
    cause: Cause = Cause.SCRIPT
    # Reason of the script's failure in one line; empty if the last line of `text` is the reason
    reason: str = ""

    @property
    def headline(self) -> str:
        """The reason of the script's failure in one line."""
        return self.reason or self.text.rstrip().rpartition("\n")[2]

    @property
    def has_page(self) -> bool:
        """Whether the failure's text contains more than its one-line reason."""
        return self.text.strip() != self.headline.strip()

    def last_line(self, worker: int, log: str) -> str:
        """Return the last line of the launcher's output: the reason of a failure and its remedy.

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
        """Write the script's failure to stderr as one line, which the launcher parses by `read`."""
        document = dataclasses.asdict(self) | {"cause": self.cause.value}
        sys.stderr.flush()
        sys.stderr.write(f"{FAILURE}{json.dumps(document)}\n")
        sys.stderr.flush()

    @classmethod
    def read(cls, line: str) -> tuple[str, Failure | None]:
        """Return the text before a failure report in an output line, and the failure or None."""
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
    """Report to the launcher, by a line on stderr, that this worker's script has run to its end."""
    sys.stderr.flush()
    sys.stderr.write(f"{COMPLETED}\n")
    sys.stderr.flush()
