"""Whether a launcher's run begins or resumes, found out and reported before anything starts.

The newest checkpoint of shard 0 decides it (`thinwire.runtime.run.resuming`). Where it lies on
another host, the launcher knows only what the Supervisor has recorded here, and the PS compares the
rest.
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
    """How a run starts.

    Attributes:
        run: Its settings; they overwrite what a failed script has left.
        finished: Why it has nothing left to do; None: it trains.
        updates: That it has when it starts.
        line: What is reported of it.
    """

    run: Run
    finished: str | None = None
    updates: int = 0
    line: str = ""


def find_start(run: Run, script: Sequence[str] = (), is_elsewhere: bool = False) -> RunStart:
    """Find out how a run starts.

    Args:
        run: The run's settings.
        script: That its workers run, and the script's arguments; empty: they run none.
        is_elsewhere: Whether PS run on other hosts, whose disks this one may not see.

    Raises:
        OtherRun: The directory holds a run of other code or settings, and no flag allows that.
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
    """Return the newest checkpoint of shard 0 without its arrays; None: there is none here."""
    folder = checkpoints_of(run.run_dir, _FIRST_SHARD)
    store = checkpoints_at(run.checkpoint_dir, _FIRST_SHARD, folder, run.keep_checkpoints)
    return store.load_values()


def _version(run: Run, state: State) -> int:
    """Return the update that a checkpoint, and the journal behind it, lead to."""
    core, mark = state["core"], read_mark(checkpoints_of(run.run_dir, _FIRST_SHARD))
    version = int(core["model"]["version"])
    if state.get("journal") is None or mark is None or mark.generation < core["generation"]:
        return version
    return max(version, mark.version)


def _has_failed(run: Run, state: State) -> bool:
    """Return whether the script of the run before has failed after it had trained."""
    begun_at = update_of_failure(run.run_dir)
    if begun_at is not None and (not state or _version(run, state) > begun_at):
        return True
    if state:
        return bool(state.get("script_failed"))
    return _summary(run).get("stop_reason") in SCRIPT_FAILURES


def _recorded(run: Run) -> int | None:
    """Return the updates in the Supervisor's newest record; None: there is none."""
    try:
        with open(run.run_dir / METRICS_FILE, encoding="utf-8") as file:
            newest = json.loads(file.readlines()[-1])
        return int(newest["version"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _summary(run: Run) -> State:
    try:
        found = json.loads((run.run_dir / SUMMARY_FILE).read_text())
        return dict(found)
    except (OSError, ValueError, TypeError):
        return {}


def _place(run: Run) -> str:
    if run.checkpoint_dir is not None:
        return f"--checkpoint_dir={run.checkpoint_dir}"
    return f"--run_dir={run.run_dir}"
