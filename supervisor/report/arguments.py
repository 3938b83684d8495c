"""Command lines of the report's tools, with the exit codes of every role."""

from __future__ import annotations

import argparse
from typing import NoReturn

_EXIT_BAD_FLAG = 1
EXIT_CONFIGURATION = 2


class ReportArguments(argparse.ArgumentParser):
    """Ends with the exit code that every role uses for a bad flag."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(_EXIT_BAD_FLAG, f"{self.format_usage()}{self.prog}: {message}\n")
