"""Whether a run directory holds a finished run, and whether that is the run of now."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.ops.run.directory import SUMMARY_FILE, launched_with
from thinwire.ops.run.fingerprint import fingerprint, shard_settings
from thinwire.ops.run.settings import LIMIT_REASONS, TARGET_REASONS, Run, is_finished
from thinwire.ops.types import ConfigurationError

#: Where a summary or a checkpoint keeps the `deciding_settings` of its run.
SETTINGS = "settings"


def deciding_settings(run: Run) -> dict[str, str]:
    """Return name -> value of everything that decides what a run computes, but for its limits.

    Flags come first under their own names, then what follows from them.
    """
    model, data = run.model, run.data
    flags = {
        "method": run.method.name,
        "model": _whole(model.path),
        "network": model.network if not model.path else None,
        "task": model.task,
        "image_size": model.image_size,
        "image_depth": model.image_depth,
        "nb_classes": model.nb_classes,
        "dataset": data.dataset,
        "data_dir": _whole(data.data_dir),
        "data_sharding_file": _whole(data.sharding_file),
        "partition_file": _whole(data.partition_file),
        "scaling": data.scaling,
        "augment": data.augment,
        "batch": data.batch,
        "shard": data.shard,
        "nb_workers": run.nb_workers,
        "nb_ps": run.nb_ps,
    }
    rows = [*flags.items(), *fingerprint(run), *shard_settings(run)]
    return {name: str(value) for name, value in rows if name not in LIMIT_REASONS}


def _whole(path: str | None) -> str | None:
    return str(pathlib.Path(path).resolve()) if path else None


def finished_summary(run: Run, script: Sequence[str] = ()) -> str | None:
    """Return the stop reason in the run directory's summary.json if that run is finished.

    Args:
        run: The run's settings.
        script: That its workers run, and the script's arguments; empty: they run none.

    Raises:
        ConfigurationError: A finished run is there, and another one than this.
    """
    try:
        summary = json.loads((run.run_dir / SUMMARY_FILE).read_text())
        reason = _finished(run, summary)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if reason is not None:
        refuse_other_run(run, summary.get(SETTINGS), deciding_settings(run))
        _refuse_other_script(run, script)
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


def refuse_other_run(run: Run, found: Any, mine: Mapping[str, str]) -> None:
    """Refuse to take the finished run of a run directory for this one.

    Args:
        run: The run's settings.
        found: What was kept of the settings of that run; of an earlier version: None.
        mine: Those of this one.

    Raises:
        ConfigurationError: A value differs.
    """
    if not isinstance(found, Mapping):
        return
    for name, value in mine.items():
        if name in found and found[name] != value:
            raise _other_run(run, f"{name} was {found[name]!r} and is {value!r}")


def _refuse_other_script(run: Run, script: Sequence[str]) -> None:
    before = launched_with(run.run_dir).get("script")
    if not script or not isinstance(before, dict):
        return
    path, *arguments = script
    if before.get("sha256") != digest_of(pathlib.Path(path)):
        raise _other_run(run, f"the script was {before.get('path')}, and {path} is not the same")
    if before.get("arguments") != arguments:
        given = f"{before.get('arguments')} and are {arguments}"
        raise _other_run(run, f"the script's arguments were {given}")


def digest_of(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _other_run(run: Run, difference: str) -> ConfigurationError:
    return ConfigurationError(
        f"--run_dir={run.run_dir} holds a finished run of other settings ({difference}); give this "
        "one another --run_dir, or --overwrite the old one."
    )


def has_evaluated_summary(run: Run, updates: int, reason: str | None) -> bool:
    """Return whether summary.json is of this very end, and has an evaluation.

    Args:
        run: The run's settings.
        updates: That it ended after.
        reason: Why it ended.
    """
    try:
        summary = json.loads((run.run_dir / SUMMARY_FILE).read_text())
        same = summary["updates"] == updates and summary["stop_reason"] == reason
        return bool(same and (summary.get("metrics") or summary["test_accuracy"] is not None))
    except (OSError, ValueError, KeyError, TypeError):
        return False
