"""Record of each worker's program, to refuse a worker that reconnects with another program.

Workers of one run may run different programs, but a worker id must always run the same program.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from thinwire.runtime.run.program import Rows, first_change
from thinwire.runtime.run.resuming import refusal


class Programs:
    """Programs (script and versions) of a run's workers; thread-safe.

    Args:
        known: Worker id -> program, read from a checkpoint; None for a new run.
        where: Flag and value of the folder or address that holds the run, for error messages.
    """

    def __init__(self, known: Mapping[int, Rows] | None = None, where: str = "this PS") -> None:
        self._known, self._where = dict(known or {}), where
        self._lock = threading.Lock()

    def refusal_of(self, worker: int, program: Rows, version: int) -> str | None:
        """Return an error text if a worker's program differs from its recorded program.

        Args:
            worker: Number of the worker.
            program: Rows that describe the worker's current program; empty if it is not known.
            version: Number of updates that the run has applied.

        Returns:
            The reason to refuse the worker, or None if the worker may join.
        """
        before = self._known.get(worker)
        change = first_change(before, program) if before and program else None
        return None if change is None else refusal(self._where, change, version)

    def record(self, worker: int, program: Rows) -> None:
        """Record the program of an admitted worker. A program that is already recorded stays."""
        if program:
            with self._lock:
                self._known.setdefault(worker, program)

    def to_plain(self) -> dict[str, list[list[str]]]:
        """Return the workers' programs as plain data for a checkpoint."""
        with self._lock:
            known = dict(self._known)
        return {str(worker): [list(row) for row in rows] for worker, rows in known.items()}
