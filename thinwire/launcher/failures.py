"""The line that a script's worker leaves for its launcher at its end, on stderr."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys

#: Begins what is for the launcher, on stderr; it goes on to the end of the line.
FAILURE = "thinwire-failure "
#: Stands alone in a line of stderr when a script has come to its end.
COMPLETED = "thinwire-completed"


class Cause(enum.Enum):
    """Who must act on a failure."""

    SCRIPT = "script"  # the script raised an error of its own, or left with another code than 0
    THINWIRE = "thinwire"  # Thinwire refused something; the text has the way out
    INTERRUPTED = "interrupted"  # a signal reached this worker alone
    LOST = "lost"  # the worker could not reach the PS; the script did nothing wrong
    OTHER_RUN = "other run"  # the run that it was to continue is of another script
    ELSEWHERE = "elsewhere"  # another worker failed, perhaps one of another launcher


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a script failed."""

    code: int  # exit code
    text: str  # a message, or a traceback; may have several lines
    cause: Cause = Cause.SCRIPT
    reason: str = ""  # in one line; none: the last line of the text

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
        """Whether the run that it was to continue is of another script."""
        return self.cause is Cause.OTHER_RUN

    @property
    def has_page(self) -> bool:
        """Whether the text has more than the reason."""
        return self.text.strip() != self.headline.strip()

    def last_line(self, worker: int, log: str) -> str:
        """Return the reason and the way out, which end the launcher's output.

        Args:
            worker: Its id.
            log: The file with its output.
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
        """Write it to stderr, for `read`."""
        document = dataclasses.asdict(self) | {"cause": self.cause.value}
        sys.stderr.flush()
        sys.stderr.write(f"{FAILURE}{json.dumps(document)}\n")
        sys.stderr.flush()

    @classmethod
    def read(cls, line: str) -> tuple[str, Failure | None]:
        """Return what stands before a failure in a line, and the failure; None: there is none."""
        before, mark, text = line.partition(FAILURE)
        if not mark:
            return line, None
        try:
            found = json.loads(text)
            return before, cls(
                int(found["code"]),
                str(found["text"]),
                Cause(found["cause"]),
                str(found["reason"]),
            )
        except (ValueError, KeyError, TypeError):
            return line, None


def report_completion() -> None:
    """Let the launcher know that the script has come to its end."""
    sys.stderr.flush()
    sys.stderr.write(f"{COMPLETED}\n")
    sys.stderr.flush()
