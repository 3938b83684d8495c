"""Gives a script its worker id and role in the run, for dividing data and writing files."""

from __future__ import annotations

import functools
import os

from thinwire.runtime.run.script_settings import SETTINGS_VARIABLE, read_settings_file
from thinwire.script.settings import ScriptSettings, is_in_run, read_settings
from thinwire.worker.script import RECORD

# settings that a script gave to distribute(); only the first settings count
_given: list[ScriptSettings] = []


def note_settings(settings: ScriptSettings) -> None:
    """Store this process's worker id and role from the settings given to distribute()."""
    _given.append(settings)


def worker_id() -> int:
    """Return this worker's id, from 1; 1 for a script outside a run, 0 in the run's evaluator."""
    if is_evaluator():
        return 0
    settings = _settings()
    return 1 if settings is None else settings.worker().id_worker


def num_workers() -> int:
    """Return the number of workers of the run; 1 for a script outside a run."""
    settings = _settings()
    return 1 if settings is None else settings.run.nb_workers


def is_chief() -> bool:
    """Return True if this worker is the chief, the only worker that should write files.

    In a script outside a run, `is_chief` returns True.

    The chief, which writes the run's files, is worker 1. While worker 1 is disconnected, the chief
    is the connected worker with the lowest id.
    """
    return worker_id() == RECORD.chief


def is_evaluator() -> bool:
    """Return True if this process only evaluates the model for the Supervisor, without training."""
    return _evaluates(os.environ.get(SETTINGS_VARIABLE, ""))


@functools.lru_cache(maxsize=1)
def _evaluates(settings: str) -> bool:
    launched = read_settings_file({SETTINGS_VARIABLE: settings})
    return launched is not None and launched.evaluates


def _settings() -> ScriptSettings | None:
    if _given:
        return _given[0]
    environment = ("THINWIRE_SETTINGS", "TF_CONFIG", "SLURM_PROCID", "RANK", "JOB_COMPLETION_INDEX")
    return _read(tuple(os.environ.get(name) for name in environment))


@functools.lru_cache(maxsize=1)
def _read(environment: tuple[str | None, ...]) -> ScriptSettings | None:
    """Return the run's settings from environment variables, read once; None outside a run."""
    if not is_in_run(None, {}):
        return None
    return read_settings(None, {}, type_node="Worker")
