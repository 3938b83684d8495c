"""What each worker has trained the run with, and the refusal of another program.

Workers of one run may run different programs; the same number must come back with the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from thinwire.runtime.run.program import Rows, first_change
from thinwire.runtime.run.resuming import refusal


class Programs:
    """The programs of a run's workers; readers of streams and the writer thread use it.

    Args:
        known: Worker -> program, of a checkpoint.
        where: The flag with the folder or address that holds the run.
    """

    def __init__(self, known: Mapping[int, Rows] | None = None, where: str = "this PS") -> None:
        self._known, self._where = dict(known or {}), where
        self._lock = threading.Lock()

    def refusal_of(self, worker: int, program: Rows, version: int) -> str | None:
        """Return why a worker is refused whose program differs from its program before.

        Args:
            worker: Its number.
            program: As it is now; empty: not known.
            version: Updates that the run has.
        """
        before = self._known.get(worker)
        change = first_change(before, program) if before and program else None
        return None if change is None else refusal(self._where, change, version)

    def record(self, worker: int, program: Rows) -> None:
        """Note the program of a worker that takes part; the first one counts."""
        if program:
            with self._lock:
                self._known.setdefault(worker, program)

    def to_plain(self) -> dict[str, list[list[str]]]:
        """Return plain data for a checkpoint."""
        with self._lock:
            known = dict(self._known)
        return {str(worker): [list(row) for row in rows] for worker, rows in known.items()}
