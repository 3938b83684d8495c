"""Argument parser of the commands that write reports, with the exit codes of all Thinwire
processes.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

_EXIT_BAD_FLAG = 1
EXIT_CONFIGURATION = 2


class ReportArguments(argparse.ArgumentParser):
    """Argument parser that exits with Thinwire's exit code for a bad flag."""

    def error(self, message: str) -> NoReturn:
        """Print a parser's error message and exit the process."""
        self.exit(_EXIT_BAD_FLAG, f"{self.format_usage()}{self.prog}: {message}\n")
