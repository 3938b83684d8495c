"""Writes checkpoints of a worker's optimizers, for a process that replaces the worker.

If workers take local steps, the script's own optimizers update weights on the worker, and only the
worker's process has their moments, step counts and learning rates. A process that replaces the
worker loads the optimizers' state from the checkpoint. If the checkpoint of the optimizers is from
the last step that the shards applied, the process also loads the codec's residual (the part of the
gradient that was not sent yet).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from absl import logging

from thinwire.ops.types import State
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.directory import checkpoints_of
from thinwire.runtime.run.finished import deciding_settings
from thinwire.runtime.run.program import PREFIX
from thinwire.runtime.run.resuming import first_setting
from thinwire.script.session import Session
from thinwire.script.settings import ScriptSettings
from thinwire.worker.script import RECORD

_OPTIMIZER = f"{PREFIX}optimizer"


class KeptOptimizer(Protocol):
    """An optimizer of a script whose state is kept in checkpoints."""

    @property
    def name(self) -> str:
        """Name of the optimizer's class."""

    def values(self) -> State:
        """Return copies of the optimizer's state as plain data."""

    def fits(self, saved: State) -> bool:
        """Return True if the optimizer can load a state that `values` returned."""

    def load(self, saved: State, keeps_rate: bool) -> None:
        """Load a state that `values` returned; keep the present learning rate if requested."""


class KeptState:
    """Writes and reads the checkpoints of the optimizers that step on one worker.

    Args:
        settings: Settings of the script, including the path of the run directory.
    """

    def __init__(self, settings: ScriptSettings) -> None:
        run, number = settings.run, settings.worker().id_worker
        folder = checkpoints_of(run.run_dir, f"worker-{number}")
        self._files = Checkpoints.in_folder(folder, keep=2)
        self._interval_seconds = run.checkpoint_interval_seconds
        self._is_restart = settings.worker().num_restarts > 0
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._is_read = False

    @classmethod
    def of(cls, settings: ScriptSettings) -> KeptState | None:
        """Return a `KeptState` for a worker's checkpoints; None without local steps or run_dir."""
        method = settings.run.method
        is_local = method.takes_local_steps and method.steps_on_workers
        has_folder = settings.is_launched or "run_dir" in settings.given
        return cls(settings) if is_local and has_folder else None

    def is_due(self, session: Session, at_end: bool = False) -> bool:
        """Return True if a checkpoint is due; see `save`."""
        has_waited = time.monotonic() - self._saved_at >= self._interval_seconds
        return (at_end or has_waited) and session.part.core.step != self._saved_step

    def save(
        self, session: Session, optimizers: Sequence[KeptOptimizer], at_end: bool = False
    ) -> None:
        """Write a checkpoint of the optimizers if one is due; log a disk error without raising it.

        Args:
            session: Session of this worker with the servers, between two steps.
            optimizers: Optimizers that step on this worker, in the order in which the PS knows
                them.
            at_end: True at the end of a `fit`. A checkpoint is then due if the optimizers have
                taken a step since the last checkpoint.
        """
        core = session.part.core
        if not self.is_due(session, at_end):
            return
        self._saved_at, self._saved_step = time.monotonic(), core.step
        try:
            state = {
                "run_id": session.part.run_id,
                "phase": session.phase,
                "core": core.save(),
                "program": [list(row) for row in RECORD.program],
                "classes": [optimizer.name for optimizer in optimizers],
                "settings": deciding_settings(session.settings.run),
                "optimizers": {str(n): item.values() for n, item in enumerate(optimizers)},
            }
            self._files.save(core.step, state)
        except OSError as error:
            logging.error("cannot write the optimizer state of the local steps: %s", error)

    def restore(
        self, session: Session, optimizers: Sequence[KeptOptimizer], last_step: int
    ) -> State | None:
        """Load the optimizer state that an earlier process of this worker saved.

        Only the first call of `restore` loads a checkpoint; later calls return None.

        Args:
            session: Session of this worker with the servers, which has just joined the run.
            optimizers: Optimizers, in the order in which the PS knows them.
            last_step: Number of this worker's last training step that the shards applied; 0 if the
                shards applied none.

        Returns:
            Saved state of the worker's core (step count, codec's residual); None if there is no
            usable checkpoint of this run and phase.
        """
        if self._is_read:
            return None
        self._is_read = True
        checkpoint = self._files.load_latest()
        state: State = {} if checkpoint is None else checkpoint[1]
        if (state.get("run_id"), state.get("phase")) != (session.part.run_id, session.phase):
            if self._is_restart or last_step:
                logging.warning(
                    "this worker has restarted, but the state of its optimizer is not on this "
                    "disk: resetting the optimizer's moments and counts"
                )
            return None
        settings = state.get("settings", {})
        if first_setting(settings, deciding_settings(session.settings.run)) is not None:
            logging.warning(
                "the training method has changed (--resume): resetting the optimizer state"
            )
            return None
        saved = [state["optimizers"].get(str(number), {}) for number in range(len(optimizers))]
        pairs = list(zip(optimizers, saved, strict=True))
        is_other = state.get("classes") != [optimizer.name for optimizer in optimizers]
        if is_other or not all(optimizer.fits(values) for optimizer, values in pairs):
            logging.warning(
                "this worker's checkpoint has other optimizers: resetting the script's optimizers"
            )
            return None
        compiled = [rows for name, *rows in state.get("program", ()) if name == _OPTIMIZER]
        is_edited = compiled != [[value] for name, value in RECORD.program if name == _OPTIMIZER]
        for optimizer, values in pairs:
            # --resume with an edited script: use the script's rate
            optimizer.load(values, keeps_rate=is_edited)
        step = state["core"]["step"]
        logging.info("loaded this worker's optimizer state of exchange %d of %d", step, last_step)
        core: State = state["core"]
        return core
