"""Acceptance of the script's next model while a shard still serves the current model.

A phase is a period in which the run trains one model. A worker whose Hello message names a later
phase (model) than the shard's phase is admitted to an `OfferStage`. While a shard waits for the
script's next model, it serves the streams of scripts, supervisors and other shards as before.
The thread that reads a worker's offered model also builds the model, so that the writer thread can
continue to serve the current model. When the script's next model is built, the shard's writer
thread begins the phase of this model.

Source: design, section 10, "Life of a model".
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from thinwire.ps.scripts.offering import OfferAdmission, OfferStage


class NextPhase:
    """Owner of the object that accepts the script's next model while workers wait for this model.

    Args:
        make: Function that creates the `OfferStage` (acceptor of a model) for the phase with a
            given number.
        is_agreed: Function that returns True if all scripts have agreed to begin the phase (model)
            with a given number.
    """

    def __init__(self, make: Callable[[int], OfferStage], is_agreed: Callable[[int], bool]) -> None:
        self._make, self._is_agreed = make, is_agreed
        self._stage: OfferStage | None = None
        self._lock = threading.Lock()

    def admission(self, phase: int) -> OfferAdmission | None:
        """Return the admission of workers whose scripts already have the model of a later phase.

        Returns:
            The admission, or None if the scripts have not agreed on the phase yet; then the worker
            must retry.
        """
        if not self._is_agreed(phase):
            return None
        with self._lock:
            if self._stage is None or self._stage.phase < phase:
                if self._stage is not None:
                    self._stage.close(True)
                self._stage = self._make(phase)
            return OfferAdmission(self._stage)

    def tick(self) -> None:
        """Send heartbeats to waiting workers; make workers that wait too long retry (called on the
        writer thread).
        """
        stage = self._stage
        if stage is not None:
            stage.tick()

    def close(self, stage: OfferStage) -> None:
        """Refuse all workers that wait to send a model that the shard already serves or has
        replaced.
        """
        with self._lock:
            if self._stage is stage:
                self._stage = None
        stage.close(True)
