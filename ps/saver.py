"""Writes snapshots in a thread of its own; only the newest one waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from absl import logging

from ops.checkpoint import Checkpoints
from ops.types import State


class Saver:
    """A background writer of checkpoints."""

    def __init__(
        self, checkpoints: Checkpoints, on_saved: Callable[[State], None] = lambda state: None
    ) -> None:
        """Start the thread; it calls `on_saved` with each state that is safely on disk."""
        self._checkpoints, self._on_saved = checkpoints, on_saved
        self._wake = threading.Condition()
        self._next: tuple[int, State] | None = None
        self._busy = False
        self.failure: Exception | None = None
        threading.Thread(target=self._run, name="saver", daemon=True).start()

    def put(self, version: int, state: State) -> None:
        """Have a snapshot written soon; never blocks."""
        with self._wake:
            self._next = (version, state)
            self._wake.notify_all()

    def flush(self) -> None:
        """Wait until everything handed in is on disk.

        Raises:
            Exception: Why writing failed.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._next is None and not self._busy)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._next is not None)
                assert self._next is not None
                (version, state), self._next, self._busy = self._next, None, True
            try:
                self._checkpoints.save(version, state)
                self._on_saved(state)
                self.failure = None
            except Exception as error:  # noqa: BLE001 - flush() hands it on
                self.failure = error
                logging.error("cannot write the checkpoint of version %d: %s", version, error)
            with self._wake:
                self._busy = False
                self._wake.notify_all()
