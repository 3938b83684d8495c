"""What a script's worker leaves for its launcher at its end: one line, shown once if it failed."""

from __future__ import annotations

import dataclasses
import json
import sys

#: Begins what is for the launcher, on stderr; it goes on to the end of the line.
FAILURE = "thinwire-failure "
#: Stands alone in a line of stderr when a script has come to its end.
COMPLETED = "thinwire-completed"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a script failed."""

    code: int  # exit code
    text: str  # a message, or a traceback; may have several lines
    is_lost: bool = False  # the worker could not reach the PS; the script did nothing wrong
    is_refused: bool = False  # the run that it was to continue is of another script

    @property
    def headline(self) -> str:
        """The last line: of a traceback, the exception."""
        return self.text.rstrip().rpartition("\n")[2]

    def report(self) -> None:
        """Write it to stderr, for `read`."""
        sys.stderr.flush()
        sys.stderr.write(f"{FAILURE}{json.dumps(dataclasses.asdict(self))}\n")
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
                bool(found["is_lost"]),
                bool(found["is_refused"]),
            )
        except (ValueError, KeyError, TypeError):
            return line, None


def report_completion() -> None:
    """Let the launcher know that the script has come to its end."""
    sys.stderr.flush()
    sys.stderr.write(f"{COMPLETED}\n")
    sys.stderr.flush()
