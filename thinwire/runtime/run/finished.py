"""Checks if a run directory holds a finished run with the settings of the current flags."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from thinwire.runtime.run.directory import launched_with, summary_of
from thinwire.runtime.run.fingerprint import fingerprint, shard_settings
from thinwire.runtime.run.program import digest_of
from thinwire.runtime.run.resuming import OtherRun, first_setting, refusal
from thinwire.runtime.run.script_target import ScriptTarget
from thinwire.runtime.run.settings import LIMIT_REASONS, TARGET_REASONS, Run, is_finished

#: Key in summary.json and in checkpoints of the settings that determine a run's result.
SETTINGS = "settings"
_GROUPS = "sync.groups"


def deciding_settings(run: Run) -> dict[str, str]:
    """Return name -> value of the settings, except limits, that determine a run's result.

    `deciding_settings` returns flags first, under the flags' names, then values derived from flags.
    The settings that `deciding_settings` returns lack the number of workers, because it may change
    during a run. A digest of a file's content represents the file in the returned settings, instead
    of its path.
    """
    model, data = run.model, run.data
    flags = {
        "method": run.method.name,
        "model": _content(model.path),
        "network": model.network if not model.path else None,
        "task": model.task,
        "image_size": model.image_size,
        "image_depth": model.image_depth,
        "nb_classes": model.nb_classes,
        "dataset": data.dataset,
        "data_dir": data.data_dir,
        "data_sharding_file": _content(data.sharding_file),
        "partition_file": _content(data.partition_file),
        "scaling": data.scaling,
        "augment": data.augment,
        "batch": data.batch,
        "shard": data.shard,
        "nb_ps": run.nb_ps,
    }
    if run.type_node == "Simulator":  # a simulation's number of workers never changes
        flags["nb_workers"] = run.nb_workers
    rows = [*flags.items(), *fingerprint(run), *shard_settings(run)]
    settings = {name: str(value) for name, value in rows if name not in LIMIT_REASONS}
    settings[_GROUPS] = _groups_of_any_size(run)
    if run.nb_workers == 1:  # with one worker, "all together" and "each alone" are equal
        del settings[_GROUPS]
    return settings


def resumed_settings(run: Run) -> dict[str, str]:
    """Return the settings of PS and workers, stored in checkpoints, that determine a run's result.

    The settings in checkpoints include the workers' batch size, from which a Supervisor's
    --batch_size may differ.
    """
    training: dict[str, object] = {
        "clip_norm": run.clip_norm,
        "worker_weight_decay": run.worker_weight_decay,
    }
    if not run.model_is_offered:
        training["batch_size"] = run.batch_size
    return {name: str(value) for name, value in training.items()} | deciding_settings(run)


def _groups_of_any_size(run: Run) -> str:
    """Return the worker groups as text; for two common groupings, the text has no worker ids."""
    groups, workers = run.method.sync.groups, range(1, run.nb_workers + 1)
    if tuple(groups) == (tuple(workers),):
        return "all together"
    if tuple(groups) == tuple((worker,) for worker in workers):
        return "each alone"
    return str(groups)


def _content(path: str | None) -> str | None:
    """Return name and digest of the file that a flag names; without a file, the flag's value."""
    file = pathlib.Path(path) if path else None
    if file is None or not file.is_file():
        return path
    return f"{file.name} (sha256 {digest_of(file)[:12]})"


def finished_summary(run: Run, script: Sequence[str] = ()) -> str | None:
    """Return the stop reason in a run directory's summary.json; None if the run is not finished.

    Args:
        run: Settings of the run that would start.
        script: Path and arguments of the user's script; empty if the workers run no script.

    Raises:
        OtherRun: The run directory holds a finished run with different settings or another script,
            and --resume is not given.
    """
    try:
        summary = summary_of(run.run_dir)
        reason = _finished(run, summary)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if reason is None:
        return None
    settings = summary.get(SETTINGS)
    known = settings if isinstance(settings, dict) else {}  # early versions wrote no settings
    difference = first_setting(known, deciding_settings(run)) or _other_script(run, script)
    if difference is not None and run.resume:
        return None
    if difference is not None:
        raise OtherRun(refusal(f"--run_dir={run.run_dir}", difference, summary["updates"]))
    return reason


def _finished(run: Run, summary: dict[str, Any]) -> str | None:
    reached = {
        "iter_max": summary["updates"],
        "max_seconds": summary["seconds"],
        "epochs": run.epochs,
    }
    reason = str(summary["stop_reason"])
    if reason in TARGET_REASONS:
        return reason if run.target and run.target.is_reached_in(summary) else None
    return reason if is_finished(run, reason, reached.get(reason)) else None


def _other_script(run: Run, script: Sequence[str]) -> str | None:
    before = launched_with(run.run_dir).get("script")
    if not script or not isinstance(before, dict):
        return None
    target = ScriptTarget.of(script)
    arguments = list(target.arguments)
    if before.get("sha256") != digest_of(target.path):
        return f"the script was {before.get('path')}, and {target.shown} has other content"
    if before.get("arguments") != arguments:
        return f"the script's arguments were {before.get('arguments')} and are {arguments}"
    return None


def has_evaluated_summary(run: Run, updates: int, reason: str | None) -> bool:
    """Return True if summary.json has an evaluation and describes a run with this end.

    Args:
        run: Settings of the run, for the path of summary.json.
        updates: Number of updates that the run had applied at its end.
        reason: Stop reason of the run; None if the run has no stop reason.
    """
    summary = summary_of(run.run_dir)
    is_current = summary.get("updates") == updates and summary.get("stop_reason") == reason
    has_metrics = summary.get("metrics") or summary.get("test_accuracy") is not None
    return bool(is_current and has_metrics)
