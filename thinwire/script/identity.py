"""Which worker of a run this process is: for scripts that share data or write files themselves."""

from __future__ import annotations

import functools
import os

from thinwire.runtime.run.script_settings import SETTINGS_VARIABLE, read_settings_file
from thinwire.script.settings import ScriptSettings, read_settings, source_of
from thinwire.worker.script import RECORD

_given: list[ScriptSettings] = []  # by the script itself, to distribute(); the first counts


def note_settings(settings: ScriptSettings) -> None:
    """Let the settings that a script has given name its place."""
    _given.append(settings)


def worker_id() -> int:
    """Return this worker's number, from 1; 1 where the script runs alone, 0 in the evaluator."""
    if is_evaluator():
        return 0
    settings = _settings()
    return 1 if settings is None else settings.worker().id_worker


def num_workers() -> int:
    """Return the number of workers of the run; 1 where the script runs alone."""
    settings = _settings()
    return 1 if settings is None else settings.run.nb_workers


def is_chief() -> bool:
    """Return whether this worker alone should write files; true without a run.

    It is worker 1; while that one is lost, the lowest that is there.
    """
    return worker_id() == RECORD.chief


def is_evaluator() -> bool:
    """Return whether this process runs the script for the Supervisor, and trains nothing."""
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
    """Return what the process' environment names, read once for each environment."""
    del environment
    if source_of(None, {}) is None:
        return None
    return read_settings(None, {}, type_node="Worker")
