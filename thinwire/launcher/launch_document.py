"""Reads and writes ``launch.json``: the script and flags of a run, for a repetition by --like."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from thinwire.launcher.role import given_flags
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.run.directory import LAUNCH_FILE, launched_with
from thinwire.runtime.run.program import digest_of
from thinwire.runtime.run.script_target import ScriptTarget, module_words
from thinwire.runtime.run.settings import Run

#: Packages whose versions may change the result of a run.
_PACKAGES = ("keras", "numpy", "tensorflow", "tensorflow-cpu", "jax", "torch", "grpcio", "protobuf")
#: Flags that a repetition of a run (--like) does not copy from the earlier run.
_NOT_REPEATED = (
    *("type_node", "model_from", "run_dir", "overwrite", "resume", "flagfile"),
    *("dry_run", "like"),
)


def write(run: Run, script: Sequence[str], began: float) -> None:
    """Write ``launch.json`` with a run's script, flags and start time to the run directory.

    Args:
        run: Settings of the run, from the flags.
        script: The user's script (path, or -m and module) and its arguments.
        began: Start time of the run, in seconds since the epoch.
    """
    run.run_dir.mkdir(parents=True, exist_ok=True)
    write_json_atomically(run.run_dir / LAUNCH_FILE, document(run, script) | {"began": began})


def document(run: Run, script: Sequence[str]) -> dict[str, Any]:
    """Return a run's flags, package versions and script, for launch.json and summary.json."""
    target = ScriptTarget.of(script)
    path = target.path.resolve()
    words = given_flags((*_NOT_REPEATED, "policy"))
    if run.policy is not None:  # a repetition may start in another folder
        words.append(f"--policy={run.policy.path}")
    return {
        "flags": [*words, f"--seed={run.seed}", f"--method={run.method.name}"],
        "versions": versions(),
        "script": {
            "path": str(path),
            "module": target.module,
            "folder": str(pathlib.Path.cwd()),
            "arguments": list(target.arguments),
            "sha256": digest_of(path),
        },
    }


@dataclasses.dataclass(frozen=True)
class RecordedLaunch:
    """Flags and script of an earlier run, from its ``launch.json``."""

    flags: list[str]  # flags of the earlier run, as --name=value
    versions: dict[str, str]  # package -> version that the earlier run used
    path: str  # path of the earlier run's script
    folder: str  # working directory of the earlier run's launcher
    arguments: list[str]  # arguments of the earlier run's script
    sha256: str  # SHA-256 digest of the earlier run's script file, in hexadecimal
    module: str = ""  # name of the script's module after -m; empty for a script given by its path

    def words(self) -> list[str]:
        """Return the earlier run's script and its arguments as words of a command line."""
        return module_words(self.module, self.path, self.arguments)

    def warnings(self) -> Iterator[str]:
        """Yield warnings about packages, script or folder that differ from the earlier run's."""
        now = versions()
        for name in sorted({*now, *self.versions}):
            before, after = self.versions.get(name, "none"), now.get(name, "none")
            if before != after:
                yield f"{name} was {before} and is {after}"
        path = pathlib.Path(self.path)
        if not path.is_file():
            yield f"{path} does not exist any more"
        elif digest_of(path) != self.sha256:
            yield f"{path} has changed"
        if self.folder != str(pathlib.Path.cwd()):
            yield f"the run was started in {self.folder}, not in {pathlib.Path.cwd()}"


def recorded(run_dir: str) -> RecordedLaunch:
    """Read the flags and the script of the run in a run directory.

    Args:
        run_dir: Path of the earlier run's directory, or of its ``launch.json``.

    Raises:
        ConfigurationError: The run directory has no ``launch.json`` of `thinwire run`.
    """
    folder = pathlib.Path(run_dir)
    launched = launched_with(folder.parent if folder.is_file() else folder)
    try:
        script = launched["script"]
        return RecordedLaunch(
            [str(word) for word in launched["flags"]],
            {str(name): str(version) for name, version in launched["versions"].items()},
            str(script["path"]),
            str(script["folder"]),
            [str(word) for word in script["arguments"]],
            str(script["sha256"]),
            str(script.get("module", "")),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"--like={run_dir}: expected the run directory of a `thinwire run`, which contains "
            f"the file {LAUNCH_FILE}."
        ) from error


def versions() -> dict[str, str]:
    """Return name -> version of the installed packages that may change a run's result."""
    installed = {
        "python": platform.python_version(),
        "thinwire": str(importlib.import_module("thinwire").__version__),
    }
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
