"""Number and role of this process in its run, for scripts that divide data or write files."""

from __future__ import annotations

import functools
import os

from thinwire.runtime.run.script_settings import SETTINGS_VARIABLE, read_settings_file
from thinwire.script.settings import ScriptSettings, read_settings, source_of
from thinwire.worker.script import RECORD

_given: list[ScriptSettings] = []  # settings that the script gave to distribute(); the first counts


def note_settings(settings: ScriptSettings) -> None:
    """Use the settings of a script's distribute() for this process's number and role."""
    _given.append(settings)


def worker_id() -> int:
    """Return this worker's number, from 1; 1 for a script without a run, 0 in the evaluator."""
    if is_evaluator():
        return 0
    settings = _settings()
    return 1 if settings is None else settings.worker().id_worker


def num_workers() -> int:
    """Return the number of workers of the run; 1 for a script without a run."""
    settings = _settings()
    return 1 if settings is None else settings.run.nb_workers


def is_chief() -> bool:
    """Return True if this worker is the chief, which alone should write files; True without a run.

    The chief is worker 1. While worker 1 is lost, the chief is the present worker with the lowest
    number.
    """
    return worker_id() == RECORD.chief


def is_evaluator() -> bool:
    """Return True if this process runs the script for the Supervisor, without training."""
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
    """Return the settings from the environment, cached by the environment; None without a run."""
    if source_of(None, {}) is None:
        return None
    return read_settings(None, {}, type_node="Worker")
