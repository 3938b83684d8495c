"""What a worker computes with, in words: its files, its arguments, and what its script compiles.

A run that is continued by other code ends with weights that no code explains. So each worker sends
its `Program` in its Hello, the PS keeps it with the weights, and compares it with the program that
a worker of this number has later. Addresses, ports, the number of workers and paths are no part of
it: a scheduler may continue the run on another machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence

#: Begins the names of a program's rows in a Hello.
PREFIX = "program."
_FILE, _ARGUMENTS = f"{PREFIX}file:", f"{PREFIX}arguments"
#: Files and characters of a Hello; what is beyond is sent as one digest.
_MOST_FILES, _LONGEST = 500, 300
_OTHERS = "other files"

Rows = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What one worker computes with.

    Attributes:
        script: Name of the script's file; empty: it has none, as in a notebook.
        files: Name of a file -> digest; names are relative to the script's folder.
        arguments: Of the script.
        compiled: What is compiled -> its description, such as "optimizer" -> "SGD(momentum=0.9)".
    """

    script: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    compiled: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rows(self) -> Rows:
        """Return (name, value) for a Hello, the script first."""
        names = sorted(self.files, key=lambda name: (name != self.script, name))
        rows = [(f"{_FILE}{name}", self.files[name]) for name in names[:_MOST_FILES]]
        if rest := names[_MOST_FILES:]:
            text = "".join(f"{name} {self.files[name]}\n" for name in rest)
            rows.append((f"{_FILE}{_OTHERS}", digest_of_bytes(text.encode())))
        rows.append((_ARGUMENTS, shlex.join(self.arguments)))
        rows += [(f"{PREFIX}{name}", text) for name, text in self.compiled.items()]
        return tuple((name, _bounded(value)) for name, value in rows)


def program_rows(rows: Iterable[tuple[str, str]]) -> Rows:
    """Return those rows of a Hello's fingerprint that are of a program."""
    return tuple((name, value) for name, value in rows if name.startswith(PREFIX))


def first_change(before: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> str | None:
    """Return the first difference between two programs in words; None: there is none."""
    was, present = dict(before), dict(now)
    for name in [*was, *(name for name in present if name not in was)]:
        if was.get(name) != present.get(name):
            return _change(name, was.get(name), present.get(name))
    return None


def changed_file(
    before: Sequence[tuple[str, str]], folder: pathlib.Path, script: str
) -> str | None:
    """Return how the first changed file of a program differs from the files of a folder.

    New files need no look: a script that imports one has changed itself, or a module that it knows.

    Args:
        before: The program's rows.
        folder: The script's.
        script: Name of its file.
    """
    names = [name.removeprefix(_FILE) for name, _ in before if name.startswith(_FILE)]
    if names and script not in names:
        return f"the script was {names[0]} and is {script}"
    for name, digest in before:
        path = folder / name.removeprefix(_FILE)
        if not name.startswith(_FILE) or _is_elsewhere(name.removeprefix(_FILE)):
            continue
        present = digest_of(path) if path.is_file() else None
        if present != digest:
            return _change(name, digest, present)
    return None


def changed_arguments(before: Sequence[tuple[str, str]], arguments: Sequence[str]) -> str | None:
    """Return how a script's arguments differ from those of a program; None: they do not."""
    was, now = dict(before).get(_ARGUMENTS), _bounded(shlex.join(arguments))
    return None if was in (None, now) else _change(_ARGUMENTS, was, now)


def module_name(name: str) -> str:
    """Return the name among a program's files of a module outside the script's folder."""
    return f"module {name}"


def digest_of(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return digest_of_bytes(path.read_bytes())


def digest_of_bytes(content: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _is_elsewhere(name: str) -> bool:
    return name == _OTHERS or name.startswith(module_name(""))


def _bounded(text: str) -> str:
    """Return a value that fits into one line of a message."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}... (sha256 {digest_of_bytes(text.encode())[:12]})"


def _change(name: str, was: str | None, now: str | None) -> str:
    if name.startswith(_FILE):
        file = name.removeprefix(_FILE)
        if file == _OTHERS:
            return "other files have changed"
        if now is None:
            return f"{file} is not there any more"
        return f"{file} has changed" if was is not None else f"{file} is new"
    what = f"the {name.removeprefix(PREFIX)}"
    if name == _ARGUMENTS:
        what = "the script's arguments"
        return f"{what} were {was or 'none'} and are {now or 'none'}"
    return f"{what} was {was or 'none'} and is {now or 'none'}"
