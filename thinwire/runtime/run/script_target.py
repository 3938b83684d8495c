"""Parses the program that workers run: a file (``python train.py``) or module (``python -m``).

Thinwire's processes pass the workers' program on as words of a command line, ``train.py
--epochs=3`` or ``-m package.train --epochs=3``.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import pathlib
import sys
from collections.abc import Sequence

from thinwire.ops.types import ConfigurationError

#: Python's command-line option before the name of a module to run.
MODULE_OPTION = "-m"


@dataclasses.dataclass(frozen=True)
class ScriptTarget:
    """Program that workers run: a Python file or module, and its arguments.

    Attributes:
        path: Path of the Python file of the program.
        module: Name of the module on the command line; empty if the command line names a file.
        arguments: Command-line arguments of the program.
    """

    path: pathlib.Path
    module: str
    arguments: tuple[str, ...]

    @property
    def folder(self) -> pathlib.Path:
        """Folder from which the program imports: a file's own folder, a module's current folder."""
        return pathlib.Path.cwd() if self.module else self.path.resolve().parent

    @property
    def shown(self) -> str:
        """The workers' program on the command line, without arguments: file, or -m and module."""
        return f"{MODULE_OPTION} {self.module}" if self.module else str(self.path)

    @property
    def label(self) -> str:
        """Short name of the workers' program, after which the default run directory is named."""
        return self.module.rpartition(".")[2] or self.path.stem

    @classmethod
    def of(cls, words: Sequence[str]) -> ScriptTarget:
        """Return the program that the words of a command line name.

        Args:
            words: Words of the command line: a file, or -m and a module, then the program's
                arguments.

        Raises:
            ConfigurationError: The file or module does not exist.
        """
        if words[0] != MODULE_OPTION:
            path = pathlib.Path(words[0])
            if not path.is_file():
                raise ConfigurationError(
                    f"the script path {path} is no file; expected the path of a Python script, or "
                    "-m and a module. Put flags of Thinwire before the script, and the script's "
                    "own arguments after it."
                )
            return cls(path, "", tuple(words[1:]))
        if len(words) == 1:
            raise ConfigurationError(
                "-m is the last word; expected a module name after -m, as in -m package.train."
            )
        return cls(_file_of(words[1]), words[1], tuple(words[2:]))


def module_words(module: str, path: str, arguments: Sequence[str]) -> list[str]:
    """Return a program as words of a command line: the file, or -m and the module, and arguments.

    Args:
        module: Name of the program's module; empty if the program is a file.
        path: Path of the program's file; not used for a module.
        arguments: Command-line arguments of the program.
    """
    return [*([MODULE_OPTION, module] if module else [path]), *arguments]


def _file_of(module: str) -> pathlib.Path:
    """Return the file that ``python -m`` runs for a module, without importing the module.

    Raises:
        ConfigurationError: The module does not exist or cannot be run.
    """
    folder, spec = str(pathlib.Path.cwd()), None
    place = [folder, *sys.path]
    names = module.split(".")
    for number, _ in enumerate(names):
        spec = importlib.machinery.PathFinder.find_spec(".".join(names[: number + 1]), place)
        if spec is None:
            raise ConfigurationError(
                f"-m {module}: there is no module {'.'.join(names[: number + 1])} in "
                f"{folder} or among the installed modules; expected the module's name without "
                ".py. Start in the folder that holds its package, as for python -m."
            )
        place = list(spec.submodule_search_locations or ())
    if place:  # ``python -m`` runs a package's __main__
        spec = importlib.machinery.PathFinder.find_spec(f"{module}.__main__", place)
    if spec is None or spec.origin is None or not spec.has_location:
        raise ConfigurationError(
            f"-m {module}: this is a package without __main__.py, or a module without a file; "
            "expected a module that python -m runs. Give one of the package's modules."
        )
    return pathlib.Path(spec.origin)
