"""Gives a script its worker id and role in the run, and records metrics that it computes itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping

from absl import logging

from thinwire.ops.types import ConfigurationError
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


def evaluate(function: Callable[[], Mapping[str, float]]) -> dict[str, float] | None:
    """Record a script's own metrics of the current model in summary, report and TensorBoard.

    Use `thinwire.evaluate` if `validation_data` cannot describe the evaluation: for a score of
    generated samples, or in a training loop of your own. Call `thinwire.evaluate` on every worker,
    after `fit` or in a training loop. Metrics of `thinwire.evaluate` count for the flag --target,
    which ends the run at a metric's value.

    Args:
        function: Function that returns a dictionary of metric names and numbers. Only the chief
            (normally worker 1) calls it.

    Returns:
        The metrics, on the chief and in a script outside a run. None on all other workers, which do
        not wait for the chief.

    Raises:
        ConfigurationError: The function does not return a dictionary of names and numbers.
    """
    if not is_chief():
        return None
    for refresh in RECORD.refreshers:
        refresh()
    returned = function()
    try:
        metrics = {str(name): float(value) for name, value in dict(returned).items()}
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"thinwire.evaluate: the function returned {returned!r:.200}; expected a dictionary of "
            'names and numbers, such as {"score": 0.5}.'
        ) from error
    if not RECORD.evaluated(metrics):
        logging.info("thinwire.evaluate: no run of Thinwire records these metrics: %s", metrics)
    return metrics
