"""Command lines of Thinwire, each run in a fork of one process that has imported the command.

A start that imports the flags takes a quarter of a second. The forking process has imported them
and no heavy module: each fork reports its modules at the end. A test of a fresh interpreter, for
example with closed streams, starts its own process.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class End:
    """The exit code, output and imports of a command line that has ended.

    Attributes:
        returncode: Its exit code.
        stdout: What it has written there.
        stderr: What it has written there.
        modules: What it had imported when it ended, by the first part of the name.
        folder: Its own, empty at the start.
    """

    returncode: int
    stdout: str
    stderr: str
    modules: frozenset[str]
    folder: pathlib.Path


def ends(
    lines: Sequence[Sequence[str]], folder: pathlib.Path, **environment: str
) -> dict[tuple[str, ...], End]:
    """Play command lines, -m and a module or a path with arguments; return the end of each.

    Args:
        lines: Arguments of ``python`` for each start.
        folder: Parent of the folders; each command line gets a separate folder.
        environment: Additional environment variables.
    """
    folders = [folder / f"line-{number}" for number in range(len(lines))]
    for each in folders:
        each.mkdir()
    jobs = [[list(line), str(own)] for line, own in zip(lines, folders, strict=True)]
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line, own, (code, out, error, modules) in zip(
        lines, folders, json.loads(done.stdout), strict=True
    ):
        found[tuple(line)] = End(code, out, error, frozenset(modules), own)
    return found


# -- the process that forks -----------------------------------------------------------------------


def main() -> int:
    """Run the requests from stdin, one line after the other; write all ends to stdout."""
    jobs = json.load(sys.stdin)
    for name in ("thinwire.cli.commands", "thinwire.cli.node"):
        importlib.import_module(name)
    found = []
    for words, folder in jobs:
        files = [os.memfd_create(name) for name in ("stdout", "stderr", "modules")]
        pid = os.fork()
        if pid == 0:
            _become(words, folder, files)
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out, error, modules = (_content(file) for file in files)
        found.append([code, out, error, modules.split()])
    sys.stdout.write(json.dumps(found))
    return 0


def _become(words: list[str], folder: str, files: list[int]) -> None:
    """Play a command line in this process, which ends as a fresh one does."""
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files[:2]]):
        os.dup2(file, number)
    os.chdir(folder)
    atexit.register(lambda: os.write(files[2], "\n".join(_modules()).encode()))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _modules() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def _content(file: int) -> str:
    with open(file, "rb") as opened:
        opened.seek(0)
        return opened.read().decode()


if __name__ == "__main__":
    sys.exit(main())
