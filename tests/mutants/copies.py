"""A copy of the tree with its own virtual environment, in which one mutant at a time is planted.

Tests in a copy must import the copy's package, and so must every process that they start, with
any command line and environment. Therefore a copy has its own virtual environment: the
interpreter finds the copy first and then the packages of this environment, without the editable
install of the tree that is copied.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator

from tests.mutants import sources

_WITHOUT_IDENTITY = ("-c", "user.name=mutants", "-c", "user.email=mutants@localhost")


class CopyProblem(RuntimeError):
    """A copy would not run its own code."""


class Copy:
    """The files that git knows or could know, below `folder`."""

    def __init__(self, folder: pathlib.Path, root: pathlib.Path = sources.ROOT) -> None:
        self.folder = folder.resolve()
        self.python = self.folder / ".venv" / "bin" / "python"
        _copy_files(root, self.folder)
        self._make_environment()
        _compile(self.folder)
        self._commit()

    def check_package(self, package: str = "thinwire") -> None:
        """Raise CopyProblem unless a new process imports the copy's package, wherever it starts."""
        code = f"import {package}; print({package}.__file__)"
        done = subprocess.run(
            [self.python, "-c", code], cwd="/", env={}, capture_output=True, text=True, check=False
        )
        if done.returncode or not self.has(done.stdout.strip()):
            raise CopyProblem(
                f"a process of {self.python} imports {package} from {done.stdout.strip()!r},"
                f" expected a file below {self.folder}; {done.stderr[-500:]}"
            )

    def has(self, file: str) -> bool:
        """True if a file exists in the copy."""
        return pathlib.Path(file).resolve().is_relative_to(self.folder)

    @contextlib.contextmanager
    def planted(self, mutated: dict[pathlib.Path, str]) -> Iterator[None]:
        """Replace the text of files (relative paths) for a while."""
        originals = {path: (self.folder / path).read_bytes() for path in mutated}
        try:
            for path, text in mutated.items():
                (self.folder / path).write_text(text)
            yield
        finally:
            for path, content in originals.items():
                (self.folder / path).write_bytes(content)

    def _make_environment(self) -> None:
        environment = self.folder / ".venv"
        venv.EnvBuilder(symlinks=True, with_pip=False).create(environment)
        paths = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        # The .pth files of a folder that a .pth file names are not read: so the editable install
        # of the copied tree has no effect here.
        lines = [str(self.folder), *sorted(paths)]
        (packages / "copy.pth").write_text("".join(f"{line}\n" for line in lines))
        _copy_scripts(pathlib.Path(sysconfig.get_path("scripts")), environment / "bin")
        (environment / ".complete").touch()  # the Makefile's mark of a complete environment

    def _commit(self) -> None:
        """Make the copy a git repository, for tests that list the repository's files."""
        for words in (
            ("init", "--quiet"),
            ("add", "--all"),
            (*_WITHOUT_IDENTITY, "commit", "--quiet", "--no-verify", "--message=copy"),
        ):
            subprocess.run(["git", *words], cwd=self.folder, check=True)


def _copy_files(root: pathlib.Path, folder: pathlib.Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        source, target = root / name, folder / name
        if not (source.is_symlink() or source.is_file()):
            continue  # deleted, and the deletion is not committed
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    # pytest compiles test files itself, which takes a minute for all; it compares size and time.
    for compiled in (root / "tests").rglob("__pycache__/*-pytest-*.pyc"):
        target = folder / compiled.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(compiled, target)


def _copy_scripts(source: pathlib.Path, target: pathlib.Path) -> None:
    """Give the copy the commands of this environment, run by the copy's interpreter."""
    interpreter = str(target / "python")
    for script in source.iterdir():
        copied = target / script.name
        if copied.exists() or script.is_dir():
            continue
        head, _, rest = script.read_bytes().partition(b"\n")
        if head.startswith(b"#!") and os.fsencode(source) in head:
            copied.write_bytes(b"#!" + os.fsencode(interpreter) + b"\n" + rest)
            shutil.copymode(script, copied)
        else:
            copied.symlink_to(script)


def _compile(folder: pathlib.Path) -> None:
    """Compile all modules so that a compiled one is used only for the very source it is of.

    By default Python compares size and time in seconds, and takes the code of the last mutant for
    another that has the same length and is planted within the same second.
    """
    for path in folder.rglob("*.py"):
        if ".venv" not in path.parts and not path.is_symlink():
            with contextlib.suppress(py_compile.PyCompileError):  # an example of broken code
                py_compile.compile(
                    str(path),
                    doraise=True,
                    invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
                )
