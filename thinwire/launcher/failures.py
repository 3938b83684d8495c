"""What a script's worker leaves for its launcher when it fails: one line, shown once."""

from __future__ import annotations

import dataclasses
import json
import sys

#: Begins the line, on stderr, that is for the launcher.
FAILURE = "thinwire-failure "


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a script failed."""

    code: int  # exit code
    text: str  # a message, or a traceback; may have several lines

    @property
    def headline(self) -> str:
        """The last line: of a traceback, the exception."""
        return self.text.rstrip().rpartition("\n")[2]

    def report(self) -> None:
        """Write it to stderr, for `read`."""
        sys.stderr.flush()
        sys.stderr.write(f"\n{FAILURE}{json.dumps(dataclasses.asdict(self))}\n")
        sys.stderr.flush()

    @classmethod
    def read(cls, line: str) -> Failure | None:
        """Return what a line reports; None for any other line."""
        if not line.startswith(FAILURE):
            return None
        try:
            found = json.loads(line.removeprefix(FAILURE))
            return cls(int(found["code"]), str(found["text"]))
        except (ValueError, KeyError, TypeError):
            return None
