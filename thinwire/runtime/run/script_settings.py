"""The file by which a launcher hands a run's settings to a script: to a worker or the evaluator.

It lies in the run directory of the script's own host, is named by an environment variable, and only
its user can read it. Secrets are named in it by their files.
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

#: Names the file.
SETTINGS_VARIABLE = "THINWIRE_SETTINGS"
#: A word among a worker's flags: the script's own folder becomes the current one.
IN_SCRIPT_FOLDER = "--in_script_folder"
#: Where a host that gets the code by a copy has the script's folder; of a module, the folder in
#: which the launcher was started.
SENT_SCRIPT = "sent/script"
#: Begins a word among a worker's flags: `fit` measures into this file, and nobody trains.
MEASURED_TO = "--measured_to="
#: A word among a script's flags: `fit` evaluates for the Supervisor, and nobody trains.
EVALUATES = "--evaluates"
#: Begins a word among a script's flags: when the run began, in seconds since 1970.
RUN_BEGAN = "--run_began="
#: In the run directory.
SETTINGS_FOLDER = "settings"
_EVALUATOR = "evaluator"
#: Begins the name of a copy of the launcher's standard input, on a host that got one.
INPUT_COPY = "stdin-"
#: Ends the name of a list of the files that a node has written; the chief's list has this name.
WRITTEN, CHIEF = ".written", "chief"
#: The name of a file that shows, by its time, that workers have begun to train.
TRAINING = "training"
#: Begins the name of a list of what the processes of a host have downloaded.
DOWNLOADS = "downloads-"
_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class LaunchedScript:
    """A script's settings as its launcher has them."""

    flags: tuple[str, ...]  # words such as --nb_workers=2
    script: tuple[str, ...]  # its path and its arguments
    measured_to: str = ""  # the file into which `fit` measures, in place of training
    evaluates: bool = False  # the central model, in place of training


def write_settings(
    run_dir: pathlib.Path, node: str, flags: Sequence[str], script: Sequence[str]
) -> pathlib.Path:
    """Write the file of a node such as ``worker-3``; return its absolute path."""
    folder = run_dir.resolve() / SETTINGS_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{node}.json"
    path.unlink(missing_ok=True)  # of one that was killed
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
    """Remove a node's file at its end; the last node of this host removes what is beside it."""
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
    """Remove the files of nodes that did not do so themselves, and the folder once it is empty.

    The evaluator's goes with the Supervisor's.
    """
    for node in nodes:
        name = _EVALUATOR if node.startswith("supervisor") else node
        (run_dir / SETTINGS_FOLDER / f"{name}.json").unlink(missing_ok=True)
        (run_dir / SETTINGS_FOLDER / f"{name}{WRITTEN}").unlink(missing_ok=True)
    if not any((run_dir / SETTINGS_FOLDER).glob("*.json")):  # else other parts of the run need it
        _remove_shared(run_dir / SETTINGS_FOLDER)
    with contextlib.suppress(OSError):  # other parts of the run have theirs there
        (run_dir / SETTINGS_FOLDER).rmdir()


def read_settings_file(environment: Mapping[str, str]) -> LaunchedScript | None:
    """Return what the launcher has left for this process; None where there was no launcher.

    Raises:
        ConfigurationError: A file that is missing, that others may read, or of another form.
    """
    name = environment.get(SETTINGS_VARIABLE, "")
    if not name:
        return None
    path = pathlib.Path(name)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigurationError(
                f"{SETTINGS_VARIABLE}={path}: others may read it; expected mode 0600. Run "
                f"`chmod 600 {path}`, or unset the variable."
            )
        found = dict(json.loads(path.read_bytes()[:_MOST_BYTES]))
        measured_to = str(found.get("measured_to", ""))
        evaluates = bool(found.get("evaluates", False))
        words = _words(found["flags"]), _words(found["script"])
        return LaunchedScript(*words, measured_to, evaluates)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{SETTINGS_VARIABLE}={path} cannot be read ({error}); expected the file that "
            "`thinwire run` writes. Unset the variable to train alone."
        ) from error


def _words(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{found!r:.50} is no list of words")
    return tuple(found)
