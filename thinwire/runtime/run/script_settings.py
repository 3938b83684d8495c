"""File by which a launcher passes a run's settings to the script of a worker or evaluator.

The settings file is in the run directory on the script's host. An environment variable holds the
settings file's path, and only the file's owner can read the file. The settings file holds the paths
of secrets, never the secrets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import stat
from collections.abc import Iterable, Mapping, Sequence

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import naming

#: Name of the environment variable with the path of a script's settings file.
SETTINGS_VARIABLE = "THINWIRE_SETTINGS"
#: Word among a worker's flags, with which the worker runs the script in the script's own folder.
IN_SCRIPT_FOLDER = "--in_script_folder"
#: Folder of the copied code on a remote host with the script's folder, or for a module (``-m``)
#: with the folder in which the launcher was started.
SENT_SCRIPT = "sent/script"
#: Prefix of a word among a worker's flags, before a path. With this word, Keras' `fit` writes
#: measurements to the file at the path and does not train.
MEASURED_TO = "--measured_to="
#: Word among a script's flags, with which `fit` evaluates the model for the Supervisor and does not
#: train.
EVALUATES = "--evaluates"
#: Prefix of a word among a script's flags, before the run's start time in seconds since 1970.
RUN_BEGAN = "--run_began="
#: Folder in the run directory with the settings files of scripts.
SETTINGS_FOLDER = "settings"
_EVALUATOR = "evaluator"
#: Prefix of the name of a file with a copy of the launcher's standard input.
INPUT_COPY = "stdin-"
#: Suffix of the name of a file that lists the files which a node has written, and the stem of this
#: name for the chief (the worker that writes the script's files).
WRITTEN, CHIEF = ".written", "chief"
#: Name of a file whose modification time shows when workers have started to train.
TRAINING = "training"
#: Prefix of the name of a file that lists the files which a host's processes have downloaded.
DOWNLOADS = "downloads-"
_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class LaunchedScript:
    """Settings of a process that runs a user's script, from the file that the launcher wrote."""

    flags: tuple[str, ...]  # Thinwire's flags, for example --nb_workers=2
    script: tuple[str, ...]  # path and arguments of the user's script
    measured_to: str = ""  # file to which `fit` writes measurements; empty: `fit` trains
    evaluates: bool = False  # True if `fit` only evaluates the PS's model


def write_settings(
    run_dir: pathlib.Path, node: str, flags: Sequence[str], script: Sequence[str]
) -> pathlib.Path:
    """Write the settings file of a node, for example ``worker-3``; return its absolute path."""
    folder = run_dir.resolve() / SETTINGS_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{node}.json"
    path.unlink(missing_ok=True)  # an earlier, killed process may have left the file
    document = {
        "flags": [
            word for word in flags if not word.startswith((MEASURED_TO, EVALUATES, RUN_BEGAN))
        ],
        "script": list(script),
        "measured_to": "".join(
            word.removeprefix(MEASURED_TO) for word in flags if word.startswith(MEASURED_TO)
        ),
        "evaluates": EVALUATES in flags,
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with naming(path), open(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def remove_own_settings(path: pathlib.Path) -> None:
    """Remove a node's settings file; the host's last node also removes the nodes' shared files."""
    path.unlink(missing_ok=True)
    if not any(path.parent.glob("*.json")):
        _remove_shared(path.parent)
        for lists in path.parent.glob(f"*{WRITTEN}"):
            lists.unlink(missing_ok=True)


def _remove_shared(folder: pathlib.Path) -> None:
    for name in (f"{CHIEF}{WRITTEN}", TRAINING):
        (folder / name).unlink(missing_ok=True)
    for pattern in (f"{INPUT_COPY}*", f"{DOWNLOADS}*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def remove_settings(run_dir: pathlib.Path, nodes: Iterable[str]) -> None:
    """Remove the settings files that nodes have left, and their folder if it is empty.

    The settings file of the evaluator is removed together with the Supervisor's files.
    """
    for node in nodes:
        name = _EVALUATOR if node.startswith("supervisor") else node
        (run_dir / SETTINGS_FOLDER / f"{name}.json").unlink(missing_ok=True)
        (run_dir / SETTINGS_FOLDER / f"{name}{WRITTEN}").unlink(missing_ok=True)
    # A node that has its settings file still runs and needs the files that nodes share.
    if not any((run_dir / SETTINGS_FOLDER).glob("*.json")):
        _remove_shared(run_dir / SETTINGS_FOLDER)
    with contextlib.suppress(OSError):  # fails if the folder holds files of running nodes
        (run_dir / SETTINGS_FOLDER).rmdir()


def read_settings_file(environment: Mapping[str, str]) -> LaunchedScript | None:
    """Return a script's settings from the launcher's file; None if no launcher started it.

    Args:
        environment: Environment variables of this process.

    Raises:
        ConfigurationError: The settings file is missing or malformed, or other users may read it.
    """
    name = environment.get(SETTINGS_VARIABLE, "")
    if not name:
        return None
    path = pathlib.Path(name)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigurationError(
                f"environment variable {SETTINGS_VARIABLE}={path}: other users may read this "
                f"file; expected mode 0600. Run `chmod 600 {path}`, or unset the variable."
            )
        document = dict(json.loads(path.read_bytes()[:_MOST_BYTES]))
        measured_to = str(document.get("measured_to", ""))
        evaluates = bool(document.get("evaluates", False))
        words = _words(document["flags"]), _words(document["script"])
        return LaunchedScript(*words, measured_to, evaluates)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"environment variable {SETTINGS_VARIABLE}={path} cannot be read ({error}); expected "
            "the file that `thinwire run` writes. Unset the variable to train alone."
        ) from error


def _words(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise TypeError(f"{found!r:.50} is not a list of strings")
    return tuple(found)
