"""Small programs, each in a fork of a Python that has imported their common modules.

A start of Python takes a tenth of a second with these imports, a fork of it a hundredth.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMPORTED = ("thinwire.worker.held_files", "thinwire.worker.temporary", "shutil", "textwrap")


class Forks:
    """Runs programs as ``python -c`` does; to be closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        program: str,
        arguments: Sequence[str],
        cwd: pathlib.Path,
        environment: Mapping[str, str],
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end.

        Args:
            program: Its text.
            arguments: What follows it in `sys.argv`.
            cwd: Its folder.
            environment: More variables.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        words = ["-c", *arguments]
        self._process.stdin.write(json.dumps([program, words, str(cwd), environment]) + "\n")
        self._process.stdin.flush()
        return subprocess.CompletedProcess(words, *json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the forking process; it ends when no request can arrive."""
        self._process.communicate()


# -- the process that forks -----------------------------------------------------------------------


def main() -> None:
    """Fork at every line of stdin; in a fork, run the program."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        program, words, cwd, environment = json.loads(line)
        files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        pid = os.fork()
        if pid == 0:
            for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
                os.dup2(file, number)
            for file in files:
                os.close(file)
            os.chdir(cwd)
            os.environ.update(environment)
            tempfile.tempdir, sys.argv, sys.path[:0] = None, words, [""]
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), module.__dict__)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(json.dumps([code, *map(_content, files)]) + "\n")
        sys.stdout.flush()


def _content(file: int) -> str:
    with open(file, "rb") as opened:
        opened.seek(0)
        return opened.read().decode()


if __name__ == "__main__":
    main()
