"""Where a shard that serves one model takes that of the script's next phase.

Workers whose Hello names a later phase than the shard's are handed to an `OfferStage`, beside the
streams that stay as they are: control streams, supervisors, other shards. An offer is built in the
thread that has read it, so that the writer thread goes on meanwhile, which then begins the phase.

Source: design, section 10, "Life of a model".
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from thinwire.proto.grpc import ServerStream
from thinwire.ps.scripts.offering import OfferReader, OfferStage


class NextPhase:
    """The stage of the next phase, while workers wait for it.

    Args:
        make: Makes the stage of a phase.
        is_agreed: Whether the scripts have agreed on a phase, as far as this shard knows.
    """

    def __init__(self, make: Callable[[int], OfferStage], is_agreed: Callable[[int], bool]) -> None:
        self._make, self._is_agreed = make, is_agreed
        self._stage: OfferStage | None = None
        self._lock = threading.Lock()

    def reader(self, phase: int, stream: ServerStream) -> OfferReader | None:
        """Return who reads the stream of a worker of a later phase (reader threads).

        Returns:
            None: The phase is not agreed on yet; the worker is to come again.
        """
        if not self._is_agreed(phase):
            return None
        with self._lock:
            if self._stage is None or self._stage.phase < phase:
                if self._stage is not None:
                    self._stage.close(True)
                self._stage = self._make(phase)
            return OfferReader(self._stage, stream)

    def tick(self) -> None:
        """Look after those who wait (writer thread)."""
        stage = self._stage
        if stage is not None:
            stage.tick()

    def close(self, stage: OfferStage) -> None:
        """Send everybody away who waits at a stage: its phase has begun, or nobody wants it."""
        with self._lock:
            if self._stage is stage:
                self._stage = None
        stage.close(True)
