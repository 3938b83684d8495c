"""Detection of a PS that will never train because it has refused all clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

#: Reasons for refusing nodes that belong to the run. All other reasons concern clients that do not
#: belong to the run.
_OF_NODES = frozenset({"hello", "identity", "token", "offer", "id_range", "id_taken"})


class AdmissionWatch:
    """Watch over a PS from its start until the first worker is admitted.

    Args:
        patience_seconds: Time in seconds for which the PS waits for a user to restart refused nodes
            with correct settings.
        refused: Function that returns reason -> number of streams that the PS has refused so far.
        clock: Function that returns monotonic time in seconds; tests replace the function.
    """

    def __init__(
        self,
        patience_seconds: float,
        refused: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._refused = clock, refused
        self._patience_seconds = patience_seconds
        self._deadline = clock() + patience_seconds
        self._admitted = False

    def admitted(self) -> None:
        """Record that a worker was admitted to the run.

        After the admission of a worker the run can train, so refused clients do not end the run.
        """
        self._admitted = True

    def verdict(self) -> str | None:
        """Return an error text if the PS should stop waiting for workers; None to wait longer."""
        if self._admitted or self._clock() < self._deadline:
            return None
        refusals = {reason: n for reason, n in self._refused().items() if reason in _OF_NODES}
        if not refusals:
            return None
        counts = ", ".join(f"{count} for {reason}" for reason, count in sorted(refusals.items()))
        return (
            f"no worker was admitted within {self._patience_seconds:g} s "
            f"(--start_timeout_seconds), and clients were refused: {counts}. The clients' logs and "
            "this log name the settings that differ; start all nodes again with the same settings."
        )
