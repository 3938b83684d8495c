"""Describes this process's `Program`: its script, imported local modules and arguments.

An imported module is local unless it belongs to Python, to an installed package, or to Thinwire.
The program's files are read when this worker first joins, after the script has imported the modules
for training.
"""

from __future__ import annotations

import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.runtime.run.program import Program, digest_of, module_name
from thinwire.runtime.run.script_settings import read_settings_file
from thinwire.runtime.run.script_target import MODULE_OPTION
from thinwire.worker.script import RECORD

_INSTALLED = {"site-packages", "dist-packages"}
#: Flags that differ between the processes of a run. They do not belong to the description of the
#: program if the script starts without `thinwire run`.
_PLACES = (
    *("id_worker", "nb_workers", "ip_PS", "port", "ps_hosts", "nb_ps", "run_dir", "insecure"),
    *("metrics_port", "metrics_host", "metrics_login", "log_level", "quiet", "worker_threads"),
    *("reconnect_timeout_seconds", "lease_seconds", "token_file", "device", "measure"),
    *("worker_port", "num_restarts"),
)
_SWITCHES = ("insecure", "quiet")


def program_here(compiled: Mapping[str, str]) -> Program:
    """Return the description of the program that this process runs.

    Args:
        compiled: Maps the name of a compile setting of the model to its description.
    """
    script, digest = _main_file()
    folder = script.parent if script is not None else pathlib.Path.cwd()
    files = dict(_local_files(folder, sys.modules, script))
    if script is not None:
        files[script.name] = digest
    name = "" if script is None else script.name
    return Program(name, files, tuple(_arguments()), dict(compiled))


def _main_file() -> tuple[pathlib.Path | None, str]:
    """Return the script's path and its digest at the script's start; path None: a notebook."""
    if RECORD.source is not None:
        return RECORD.source
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    path = pathlib.Path(name).resolve() if name else None
    if path is None or not path.is_file():
        return None, ""
    return path, digest_of(path)


def _local_files(
    folder: pathlib.Path, modules: Mapping[str, Any], script: pathlib.Path | None
) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) for the file of each local module, except the script."""
    paths = sysconfig.get_paths()
    standard = tuple({os.path.join(paths[name], "") for name in ("stdlib", "platstdlib")})
    for name, module in sorted(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("thinwire", "__main__"):
            continue
        path = pathlib.Path(file).resolve()
        is_installed = _INSTALLED & set(path.parts) or str(path).startswith(standard)
        if is_installed or path == script or not path.is_file():
            continue
        is_below = path.is_relative_to(folder)
        yield (
            path.relative_to(folder).as_posix() if is_below else module_name(name),
            digest_of(path),
        )


def _arguments() -> Sequence[str]:
    launched = read_settings_file(os.environ)
    # use the arguments from the launcher, because the script may have changed sys.argv
    if launched is not None:
        return launched.script[2 if launched.script[0] == MODULE_OPTION else 1 :]
    return [*_without_places(sys.argv[1:])]


def _without_places(words: Sequence[str]) -> Iterator[str]:
    """Yield the script's command-line arguments, except flags that differ by process of the run."""
    is_value = False
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=")
        is_place = word.startswith("-") and name in _PLACES
        if not is_place and not (is_value and not word.startswith("-")):
            yield word
        is_value = is_place and not equals and name not in _SWITCHES
