"""Checks if the present script and settings may continue the run that wrote a checkpoint.

The check needs only the checkpoint of PS shard 0, which holds the run's settings, the workers'
programs, the number of updates and the stop reason. A launcher reads the checkpoint of PS shard 0
before it starts a process. A PS that was started by hand or by Kubernetes checks the checkpoint
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.ops.types import ConfigurationError, State
from thinwire.runtime.run import program
from thinwire.runtime.run.program import Rows
from thinwire.runtime.run.script_target import ScriptTarget


class OtherRun(ConfigurationError):
    """A run cannot continue, because the present code or settings differ from the run's own."""


def refusal(where: str, difference: str, updates: int | None) -> str:
    """Return the error message that a run cannot continue with changed code or settings.

    Args:
        where: Flag with the folder or address that holds the run, for example "--run_dir=runs/a".
        difference: Phrase that describes the first difference in code or settings between the runs.
        updates: Number of updates that the run has applied; None if not known.
    """
    at = "" if updates is None else f" at update {updates}"
    return (
        f"{where} holds a run that was trained with other code or settings: {difference}. Nothing "
        f"was deleted; expected the same command and code. Add --resume to continue the run{at} "
        "with the change, or --overwrite to start again."
    )


def first_setting(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return a phrase for the first setting that differs between two runs; None if all are equal.

    A setting that only one of the two runs has is ignored, because different versions of Thinwire
    have different settings.
    """
    for name, value in now.items():
        if name in before and before[name] != value:
            return f"{name} was {before[name]!r} and is now {value!r}"
    return None


def programs_of(state: State) -> dict[int, Rows]:
    """Return worker id -> rows that describe the worker's program, from a PS shard's checkpoint."""
    return {
        int(worker): tuple((str(name), str(value)) for name, value in rows)
        for worker, rows in state.get("programs", {}).items()
    }


def changed_script(programs: Mapping[int, Rows], script: Sequence[str]) -> str | None:
    """Return a phrase if a script or its imports differ from a checkpoint's programs; else None.

    Args:
        programs: Worker id -> (name, value) rows of the worker's program, from the checkpoint.
        script: Path or module of the user's script, and its arguments; empty if workers run no
            script.
    """
    if not script or not programs:
        return None
    target, before = ScriptTarget.of(script), programs[min(programs)]
    path = target.path.resolve()
    return program.changed_file(before, path.parent, path.name) or program.changed_arguments(
        before, target.arguments
    )
