"""Finds that a server will never train: clients came, and all of them were refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

#: Refusals of nodes, by the guard and the core; all others are of strangers who sent no Hello.
_OF_NODES = frozenset({"hello", "identity", "token", "offer", "id_range", "id_taken"})


class AdmissionWatch:
    """Watches a server from its start until the first worker is admitted.

    Args:
        patience_seconds: How long at least nodes may be started with wrong settings, and again.
        refused: Returns how many streams were refused so far, by reason.
        clock: Of the deadline.
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
        """Record that a worker was admitted: from now on refusals concern nobody's run."""
        self._admitted = True

    def verdict(self) -> str | None:
        """Return why nobody needs to be waited for any longer; None: wait on."""
        if self._admitted or self._clock() < self._deadline:
            return None
        found = {reason: n for reason, n in self._refused().items() if reason in _OF_NODES}
        if not found:
            return None
        counts = ", ".join(f"{count} for {reason}" for reason, count in sorted(found.items()))
        return (
            f"no worker was admitted within {self._patience_seconds:g} s "
            f"(--start_timeout_seconds), though clients came and were refused: {counts}. Their "
            "logs and this one name what differs; start all nodes again with the same settings."
        )
