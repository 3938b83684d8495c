"""Detection of a server that will never train because all clients have been refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

#: Reasons for which the guard and the core refuse nodes of a run; other reasons concern strangers.
_OF_NODES = frozenset({"hello", "identity", "token", "offer", "id_range", "id_taken"})


class AdmissionWatch:
    """Watch over a server from its start until the first worker is admitted.

    Args:
        patience_seconds: Time in which a user may restart nodes that had wrong settings.
        refused: Returns the number of streams refused so far, by reason.
        clock: Monotonic clock in seconds; tests replace it.
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
        """Record that a worker was admitted: the run can train, so refusals do not end it."""
        self._admitted = True

    def verdict(self) -> str | None:
        """Return an error text if the server should stop waiting for workers; None to wait on."""
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
