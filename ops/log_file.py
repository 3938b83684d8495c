"""A node's log on disk; a full disk must not fill the screen."""

from __future__ import annotations

import logging
import sys


class LogFile(logging.FileHandler):
    """Says once that it cannot write, and goes on trying."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Hear that a record could not be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            told = f"cannot write the log {self.baseFilename}: {error.strerror or error}"
            sys.stderr.write(f"{told}. Records are missing there; this node goes on.\n")
