"""Finds out, before a node starts, whether a training run begins or resumes.

The newest checkpoint of PS shard 0 decides whether the run resumes
(`thinwire.runtime.run.resuming`). If the checkpoint is on another host, the launcher reads only the
Supervisor's records in the run directory. If the launcher cannot read the checkpoint, the PS
compares the run's settings with the checkpoint when the PS starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from thinwire.ops.types import State
from thinwire.ps.persistence.journal import read_mark
from thinwire.runtime.persistence.places import checkpoints_at
from thinwire.runtime.run.directory import (
    METRICS_FILE,
    SUMMARY_FILE,
    checkpoints_of,
    update_of_failure,
)
from thinwire.runtime.run.finished import finished_summary, resumed_settings
from thinwire.runtime.run.resuming import (
    OtherRun,
    changed_script,
    first_setting,
    programs_of,
    refusal,
)
from thinwire.runtime.run.settings import SCRIPT_FAILURES, Run

_FIRST_SHARD = "ps-0"


@dataclasses.dataclass(frozen=True)
class RunStart:
    """Result of `find_start`: whether a training run begins, resumes or is finished.

    Attributes:
        run: Settings of the run. `run.overwrite` is True if the run replaces an earlier run whose
            script failed.
        finished: Stop reason of a run that is already finished; None if the run trains.
        updates: Number of updates that the run has made before this start; 0 if it begins.
        line: Text for the log that states whether the run begins, resumes or is finished.
    """

    run: Run
    finished: str | None = None
    updates: int = 0
    line: str = ""


def find_start(run: Run, script: Sequence[str] = (), is_elsewhere: bool = False) -> RunStart:
    """Find out from the run directory whether a run begins, resumes or is finished.

    Args:
        run: Settings of the run, from the flags.
        script: Path and arguments of the user's script; empty if the workers run no script.
        is_elsewhere: True if the PS may run on hosts that do not share this host's disk.

    Raises:
        OtherRun: The run directory holds a run of a different script or different settings, and
            neither --resume nor --overwrite is given.
    """
    if run.overwrite:
        return _begin(run, "")
    state, difference = _newest(run), None
    updates = _recorded(run) if is_elsewhere else None
    if state is not None:
        updates = _version(run, state)
        difference = first_setting(state.get("settings", {}), resumed_settings(run))
        difference = difference or changed_script(programs_of(state), script)
        if not run.resume and _has_failed(run, state):
            return _begin(run, ", because the script of the run before failed")
        if difference is not None and not run.resume:
            raise OtherRun(refusal(_place(run), difference, updates))
    elif is_elsewhere and not run.resume and _has_failed(run, {}):
        return _begin(run, ", because the script of the run before failed")
    finished = None if difference is not None else finished_summary(run, script)
    if finished is not None:
        report = run.run_dir / "report" / "index.html"
        what = f"this run is finished ({finished}); see {report}, or --overwrite it"
    elif updates is None:
        return _begin(run, "")
    else:
        changed = f", although {difference}" if difference is not None else ""
        what = f"resumes from update {updates}{changed}"
    return RunStart(run, finished, updates or 0, f"run {run.run_dir}: {what}")


def _begin(run: Run, why: str) -> RunStart:
    begun = dataclasses.replace(run, overwrite=run.overwrite or bool(why))
    return RunStart(begun, line=f"run {run.run_dir}: begins{why}")


def _newest(run: Run) -> State | None:
    """Return PS shard 0's newest checkpoint without arrays; None if this host has no checkpoint."""
    folder = checkpoints_of(run.run_dir, _FIRST_SHARD)
    store = checkpoints_at(run.checkpoint_dir, _FIRST_SHARD, folder, run.keep_checkpoints)
    return store.load_values()


def _version(run: Run, state: State) -> int:
    """Return the number of updates in a model that a PS loads from a checkpoint and its journal."""
    core, mark = state["core"], read_mark(checkpoints_of(run.run_dir, _FIRST_SHARD))
    version = int(core["model"]["version"])
    if state.get("journal") is None or mark is None or mark.generation < core["generation"]:
        return version
    return max(version, mark.version)


def _has_failed(run: Run, state: State) -> bool:
    """Return whether the earlier run in the run directory trained until its script failed."""
    begun_at = update_of_failure(run.run_dir)
    if begun_at is not None and (not state or _version(run, state) > begun_at):
        return True
    if state:
        return bool(state.get("script_failed"))
    return _summary(run).get("stop_reason") in SCRIPT_FAILURES


def _recorded(run: Run) -> int | None:
    """Return the number of updates in the newest line of metrics.jsonl; None without the file."""
    try:
        with open(run.run_dir / METRICS_FILE, encoding="utf-8") as file:
            newest = json.loads(file.readlines()[-1])
        return int(newest["version"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _summary(run: Run) -> State:
    try:
        summary = json.loads((run.run_dir / SUMMARY_FILE).read_text())
        return dict(summary)
    except (OSError, ValueError, TypeError):
        return {}


def _place(run: Run) -> str:
    if run.checkpoint_dir is not None:
        return f"--checkpoint_dir={run.checkpoint_dir}"
    return f"--run_dir={run.run_dir}"
