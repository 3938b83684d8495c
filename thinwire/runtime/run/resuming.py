"""Whether a run begins, or continues what a run directory holds, and the lines that report it.

The checkpoint of shard 0 holds all that decides it: the settings and the programs that the run was
trained with, its version, and why it ended. A launcher looks there before it starts anything; a PS
that was started by hand, or by Kubernetes, looks there itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.ops.types import ConfigurationError, State
from thinwire.runtime.run import program
from thinwire.runtime.run.program import Rows
from thinwire.runtime.run.script_target import ScriptTarget


class OtherRun(ConfigurationError):
    """The run that is to be continued was trained by other code, or with other settings."""


def refusal(where: str, difference: str, updates: int | None) -> str:
    """Return the one line that refuses to continue a run.

    Args:
        where: The flag with the folder or address that holds the run.
        difference: What has changed, in words.
        updates: That the run has; None: not known here.
    """
    at = "" if updates is None else f" at update {updates}"
    return (
        f"{where} holds a run that was trained otherwise: {difference}. Nothing was deleted; "
        f"expected the same command and code. Add --resume to continue it{at} with the change, or "
        "--overwrite to begin again."
    )


def first_setting(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return the first of two runs' settings that differs, in words; None: all are equal.

    A setting that one of them does not know, being of another version, makes no difference.
    """
    for name, value in now.items():
        if name in before and before[name] != value:
            return f"{name} was {before[name]!r} and is {value!r}"
    return None


def programs_of(state: State) -> dict[int, Rows]:
    """Return worker -> program of a shard's checkpoint."""
    return {
        int(worker): tuple((str(name), str(value)) for name, value in rows)
        for worker, rows in state.get("programs", {}).items()
    }


def changed_script(programs: Mapping[int, Rows], script: Sequence[str]) -> str | None:
    """Return how a script, and what it has imported, differ from a checkpoint's programs.

    Args:
        programs: Of the workers.
        script: A file or a module, and its arguments; empty: workers run none.
    """
    if not script or not programs:
        return None
    target, before = ScriptTarget.of(script), programs[min(programs)]
    path = target.path.resolve()
    return program.changed_file(before, path.parent, path.name) or program.changed_arguments(
        before, target.arguments
    )
