"""What local steps have made of a script's optimizers, on disk for the process that comes next.

Where changes of weights travel after a round of local steps, the script's own optimizers step, and
nobody else has their moments, counts and rates. A process that takes this worker's place goes on
with them, and with what its codec has kept back, if that is of the last step that the shards have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from thinwire.ops.types import State
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.directory import checkpoints_of
from thinwire.runtime.run.finished import deciding_settings
from thinwire.runtime.run.program import PREFIX
from thinwire.runtime.run.resuming import first_setting
from thinwire.script.keras.step import steps_allowed
from thinwire.script.session import Session
from thinwire.script.settings import ScriptSettings
from thinwire.worker.script import RECORD

#: Kinds of arrays that files hold; others, such as bfloat16, are kept as float32.
_KINDS = "biuf"
#: Place of the rate among the variables of an optimizer of Keras, after the count of its steps.
_RATE = 1
_OPTIMIZER = f"{PREFIX}optimizer"


class KeptState:
    """The checkpoints of one worker's local steps.

    Args:
        settings: Of the script; this worker's run directory is its own.
    """

    def __init__(self, settings: ScriptSettings) -> None:
        run, number = settings.run, settings.worker().id_worker
        self._files = Checkpoints(checkpoints_of(run.run_dir, f"worker-{number}"), keep=2)
        self._interval_seconds = run.checkpoint_interval_seconds
        self._is_restart = settings.worker().num_restarts > 0
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._is_read = False

    @classmethod
    def of(cls, settings: ScriptSettings) -> KeptState | None:
        """Return it where a run has local steps of scripts, and a directory; else None."""
        method = settings.run.method
        is_local = method.takes_local_steps and method.steps_on_workers
        has_folder = settings.is_launched or "run_dir" in settings.given
        return cls(settings) if is_local and has_folder else None

    def save(self, session: Session, optimizers: Sequence[Any], at_end: bool = False) -> None:
        """Write the state if it is time for that; a disk that refuses is logged.

        Args:
            session: This worker, between two steps.
            optimizers: In the order of the offer.
            at_end: Of a `fit`: it is time if anything has changed.
        """
        core, now = session.part.core, time.monotonic()
        is_due = at_end or now - self._saved_at >= self._interval_seconds
        if not is_due or core.step == self._saved_step:
            return
        self._saved_at, self._saved_step = now, core.step
        state = {
            "run_id": session.part.run_id,
            "phase": session.phase,
            "core": core.save(),
            "program": [list(row) for row in RECORD.program],
            "classes": _classes(optimizers),
            "settings": deciding_settings(session.settings.run),
            "optimizers": {str(n): _values(each) for n, each in enumerate(optimizers)},
        }
        try:
            self._files.save(core.step, state)
        except OSError as error:
            logging.error("cannot write the state of the local steps: %s", error)

    def restore(self, session: Session, optimizers: Sequence[Any], last_step: int) -> State | None:
        """Give the optimizers the state that a process before this one has kept, once.

        Args:
            session: This worker, which has just joined.
            optimizers: In the order of the offer; built.
            last_step: Of this worker, that the shards have.

        Returns:
            Of the worker's core; None: there is none of this run and phase.
        """
        if self._is_read:
            return None
        self._is_read = True
        found = self._files.load_latest()
        state: State = {} if found is None else found[1]
        if (state.get("run_id"), state.get("phase")) != (session.part.run_id, session.phase):
            if self._is_restart or last_step:
                logging.warning(
                    "this worker was here before, and the state of its optimizer is not on this "
                    "disk: its moments and counts begin anew, from the run's weights"
                )
            return None
        settings = state.get("settings", {})
        if first_setting(settings, deciding_settings(session.settings.run)) is not None:
            logging.warning(
                "the method has changed (--resume): this worker's own state begins again"
            )
            return None
        saved = [state["optimizers"].get(str(number), {}) for number in range(len(optimizers))]
        shapes = [_shapes(_values(each)) for each in optimizers]
        is_other = state.get("classes", _classes(optimizers)) != _classes(optimizers)
        if is_other or [_shapes(each) for each in saved] != shapes:
            logging.warning("the state that was kept is of other optimizers: they begin anew")
            return None
        compiled = [rows for name, *rows in state.get("program", ()) if name == _OPTIMIZER]
        is_edited = compiled != [[value] for name, value in RECORD.program if name == _OPTIMIZER]
        with steps_allowed():
            for optimizer, values in zip(optimizers, saved, strict=True):
                rate = optimizer.variables[_RATE].numpy()
                for number, variable in enumerate(optimizer.variables):
                    variable.assign(values[str(number)])
                if is_edited:  # with --resume the rate is that of the edited script
                    optimizer.variables[_RATE].assign(rate)
        step = state["core"]["step"]
        logging.info("the optimizer goes on from its state at exchange %d of %d", step, last_step)
        core: State = state["core"]
        return core


def _values(optimizer: Any) -> State:
    """Return copies of all that an optimizer remembers, its rate included."""
    arrays = (np.array(variable.numpy()) for variable in optimizer.variables)
    return {
        str(number): array if array.dtype.kind in _KINDS else array.astype(np.float32)
        for number, array in enumerate(arrays)
    }


def _classes(optimizers: Sequence[Any]) -> list[str]:
    return [type(each).__name__ for each in optimizers]


def _shapes(values: State) -> list[tuple[str, tuple[int, ...]]]:
    return [(number, np.shape(values[number])) for number in sorted(values)]
