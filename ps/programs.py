"""Record of each worker's program (script), to refuse a worker that returns with another program.

The workers of a run may run different programs, but the processes of one worker id must all run one
program.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from thinwire.runtime.run.program import Rows, first_change
from thinwire.runtime.run.resuming import refusal


class Programs:
    """Programs (script and versions) of a run's workers; thread-safe.

    Args:
        known: Worker id -> program (rows of the script and versions), read from a checkpoint; None
            for a new run.
        where: Flag and value of the folder or address that holds the run, for error messages.
    """

    def __init__(self, known: Mapping[int, Rows] | None = None, where: str = "this PS") -> None:
        self._known, self._where = dict(known or {}), where
        self._lock = threading.Lock()

    def refusal_of(self, worker: int, program: Rows, version: int) -> str | None:
        """Return an error text if a worker's program differs from its recorded program.

        Args:
            worker: Id of the worker, from 1.
            program: Text rows that describe the worker's current program (script and versions);
                empty if the program is not known.
            version: Number of updates that the run has applied to the model.

        Returns:
            The reason to refuse the worker, or None if the worker may join.
        """
        before = self._known.get(worker)
        change = first_change(before, program) if before and program else None
        return None if change is None else refusal(self._where, change, version)

    def record(self, worker: int, program: Rows) -> None:
        """Record the program (script and versions) of an admitted worker. A worker's program that
        is already recorded is not replaced.
        """
        if program:
            with self._lock:
                self._known.setdefault(worker, program)

    def known(self) -> dict[int, Rows]:
        """Return a copy of the workers' programs: worker id -> rows."""
        with self._lock:
            return dict(self._known)
