"""Finds out, before a node starts, whether a training run begins or resumes.

Before that, the launcher checks that no other process writes to the run's directory.

The newest checkpoint of PS shard 0 decides whether the run resumes
(`thinwire.runtime.run.resuming`). If the checkpoint is on another host, the launcher reads only the
Supervisor's records in the run directory. If the launcher cannot read the checkpoint, the PS
compares the run's settings with the checkpoint when the PS starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence

from absl import logging

from thinwire.flags import launch
from thinwire.flags.slurm import SlurmStep
from thinwire.launcher.watchdog import GRACE_SECONDS
from thinwire.ops.types import State
from thinwire.ps.persistence.journal import read_mark
from thinwire.runtime.persistence.places import checkpoints_at, discard_checkpoints, discard_records
from thinwire.runtime.run.directory import (
    METRICS_FILE,
    checkpoints_of,
    clear,
    lock_of,
    node_locks,
    summary_of,
    update_of_failure,
)
from thinwire.runtime.run.finished import finished_summary, resumed_settings
from thinwire.runtime.run.lock import DirectoryLock, LockOwner
from thinwire.runtime.run.resuming import (
    OtherRun,
    changed_script,
    first_setting,
    programs_of,
    refusal,
)
from thinwire.runtime.run.settings import SCRIPT_FAILURES, Run

_FIRST_SHARD = "ps-0"
#: Longest wait for directory locks that nodes of a killed Cluster still hold, in seconds. The
#: watchdogs end such nodes within GRACE_SECONDS.
_PATIENCE_SECONDS = GRACE_SECONDS + 5.0


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


def claim_run_directory(
    run: Run, part: SlurmStep | None = None, patience_seconds: float = _PATIENCE_SECONDS
) -> None:
    """Check that no other process writes to the run directory; with --overwrite, clear it.

    The launcher releases the directory locks before the nodes start, because each node locks its
    own folder. A task of a Slurm step locks only the folders of the nodes that the task starts, and
    these nodes clear their folders themselves.

    Args:
        run: Settings of the run, from the flags.
        part: The task of a Slurm step that this process is; None if this process starts all nodes.
        patience_seconds: Longest wait for directory locks that ending nodes of an earlier run still
            hold, in seconds.

    Raises:
        ConfigurationError: Another process still writes to the run directory.
    """
    owner, deadline = LockOwner.here("Cluster", 0), time.monotonic() + patience_seconds
    with contextlib.ExitStack() as held:
        for lock in _locks(run, part):
            if lock.path.exists():  # a lock without a file was never taken
                held.enter_context(lock.take(owner, max(0.0, deadline - time.monotonic())))
        if run.overwrite and part is None:
            clear(run.run_dir)
            if run.checkpoint_dir is not None:
                discard_checkpoints(run.checkpoint_dir, None, str(owner))
            if run.report_dir is not None:
                discard_records(run.report_dir, str(owner))


def start_in_claimed_directory(
    run: Run, script: Sequence[str] = (), is_elsewhere: bool = False
) -> RunStart:
    """Claim a run directory, log if the run begins or resumes; clear the directory of a new run.

    Args:
        run: Settings of the run, from the flags.
        script: Path and arguments of the user's script; empty if the workers run no script.
        is_elsewhere: True if the PS may run on hosts that do not share this host's disk.

    Raises:
        ConfigurationError: Another process writes to the run directory, or `find_start` rejects the
            run's settings.
    """
    part = launch.part_here()
    claim_run_directory(dataclasses.replace(run, overwrite=False), part)
    start = find_start(run, script, is_elsewhere)
    # Only the first task of a Slurm step starts the PS. The disk of a later Slurm task may lack the
    # files of the PS, so the later task cannot know whether the run begins or resumes.
    if part is None or part.is_first or start.finished is not None:
        logging.info("%s", start.line)
    for warning in run.method.warnings:
        logging.warning("%s", warning)
    if start.finished is None and start.run.overwrite:
        claim_run_directory(start.run, part)
    return start


def _locks(run: Run, part: SlurmStep | None) -> list[DirectoryLock]:
    """Return the directory locks of the nodes to start, or with --overwrite of all nodes."""
    if run.overwrite and part is None:
        return node_locks(run.run_dir)
    nodes = [("PS", shard) for shard in range(run.nb_ps)]
    nodes += [("Worker", worker) for worker in range(1, run.nb_workers + 1)]
    nodes.append(("Supervisor", 0))
    return [lock_of(run.run_dir, *node) for node in nodes if part is None or part.starts(*node)]


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
    return summary_of(run.run_dir).get("stop_reason") in SCRIPT_FAILURES


def _recorded(run: Run) -> int | None:
    """Return the number of updates in the newest line of metrics.jsonl; None without the file."""
    try:
        with open(run.run_dir / METRICS_FILE, encoding="utf-8") as file:
            newest = json.loads(file.readlines()[-1])
        return int(newest["version"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _place(run: Run) -> str:
    if run.checkpoint_dir is not None:
        return f"--checkpoint_dir={run.checkpoint_dir}"
    return f"--run_dir={run.run_dir}"
