"""File with which a launcher passes a run's settings to the script of a worker or the evaluator.

The file is in the run directory on the script's host. An environment variable holds its path, and
only the file's user can read it. The file holds the paths of secrets, never the secrets.
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

#: Environment variable with the path of the file.
SETTINGS_VARIABLE = "THINWIRE_SETTINGS"
#: Word among a worker's flags: the current folder becomes the script's own folder.
IN_SCRIPT_FOLDER = "--in_script_folder"
#: Folder of the code on a host that receives a copy of the code: the script's folder, or for a
#: module the folder in which the launcher was started.
SENT_SCRIPT = "sent/script"
#: Prefix of a word among a worker's flags: `fit` writes measurements to this file, and the worker
#: does not train.
MEASURED_TO = "--measured_to="
#: Word among a script's flags: `fit` evaluates for the Supervisor, and the script does not train.
EVALUATES = "--evaluates"
#: Prefix of a word among a script's flags: start of the run, in seconds since 1970.
RUN_BEGAN = "--run_began="
#: Folder of the settings files in the run directory.
SETTINGS_FOLDER = "settings"
_EVALUATOR = "evaluator"
#: Prefix of the name of a copy of the launcher's standard input.
INPUT_COPY = "stdin-"
#: Suffix of the name of a list of files that a node has written; stem of the chief's list.
WRITTEN, CHIEF = ".written", "chief"
#: Name of a file whose modification time shows that workers have started to train.
TRAINING = "training"
#: Prefix of the name of a list of files that the processes of a host have downloaded.
DOWNLOADS = "downloads-"
_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class LaunchedScript:
    """A script's settings, which its launcher has written."""

    flags: tuple[str, ...]  # flags of Thinwire, for example --nb_workers=2
    script: tuple[str, ...]  # path and arguments of the script
    measured_to: str = ""  # file for the measurements of `fit`, which then does not train
    evaluates: bool = False  # True if `fit` evaluates the central model and does not train


def write_settings(
    run_dir: pathlib.Path, node: str, flags: Sequence[str], script: Sequence[str]
) -> pathlib.Path:
    """Write the settings file of a node, for example ``worker-3``; return its absolute path."""
    folder = run_dir.resolve() / SETTINGS_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{node}.json"
    path.unlink(missing_ok=True)  # a killed process may have left its file behind
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
    """Remove a node's settings file; the last node of this host also removes the shared files."""
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
    """Remove the files of nodes that did not remove them, and the folder if it is empty.

    The evaluator's files are removed together with the Supervisor's files.
    """
    for node in nodes:
        name = _EVALUATOR if node.startswith("supervisor") else node
        (run_dir / SETTINGS_FOLDER / f"{name}.json").unlink(missing_ok=True)
        (run_dir / SETTINGS_FOLDER / f"{name}{WRITTEN}").unlink(missing_ok=True)
    # While another node has a settings file, it needs the shared files.
    if not any((run_dir / SETTINGS_FOLDER).glob("*.json")):
        _remove_shared(run_dir / SETTINGS_FOLDER)
    with contextlib.suppress(OSError):  # the folder holds files of other nodes
        (run_dir / SETTINGS_FOLDER).rmdir()


def read_settings_file(environment: Mapping[str, str]) -> LaunchedScript | None:
    """Return the settings that the launcher has written; None if no launcher started this process.

    Args:
        environment: Environment variables of this process.

    Raises:
        ConfigurationError: The file is missing or malformed, or other users may read it.
    """
    name = environment.get(SETTINGS_VARIABLE, "")
    if not name:
        return None
    path = pathlib.Path(name)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigurationError(
                f"{SETTINGS_VARIABLE}={path}: other users may read it; expected mode 0600. Run "
                f"`chmod 600 {path}`, or unset the variable."
            )
        document = dict(json.loads(path.read_bytes()[:_MOST_BYTES]))
        measured_to = str(document.get("measured_to", ""))
        evaluates = bool(document.get("evaluates", False))
        words = _words(document["flags"]), _words(document["script"])
        return LaunchedScript(*words, measured_to, evaluates)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{SETTINGS_VARIABLE}={path} cannot be read ({error}); expected the file that "
            "`thinwire run` writes. Unset the variable to train alone."
        ) from error


def _words(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise TypeError(f"{found!r:.50} is not a list of strings")
    return tuple(found)
