"""Describes a worker's program: script files, arguments and the compiled Keras model.

If a run was continued with changed code, no single program would explain its final weights. A
worker sends its `Program` (a description of its script) in its Hello, the first message to a PS.
The PS saves a worker's program with the weights, and compares it with the program that a worker
with the same id sends later. A worker's `Program` has no addresses, ports, paths and number of
workers, because a scheduler may continue the run on another host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence

#: Prefix of the names of the rows in a worker's Hello message that describe the worker's program.
PREFIX = "program."
_FILE, _ARGUMENTS = f"{PREFIX}file:", f"{PREFIX}arguments"
#: Limits of a program's description in a Hello message: number of files, and characters of a value.
#: A digest replaces everything beyond a limit.
_MOST_FILES, _LONGEST = 500, 300
_OTHERS = "other files"

Rows = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """Program (script, imported files and model) that one worker runs.

    Attributes:
        script: Name of the script's file; empty if the program has no file, for example in a
            notebook.
        files: Name of a source file, relative to the script's folder -> digest of its content.
        arguments: Command-line arguments of the script.
        compiled: Part of the compiled Keras model -> description of the part, for example
            "optimizer" -> "SGD(momentum=0.9)".
    """

    script: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    compiled: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rows(self) -> Rows:
        """Return the (name, value) rows that describe the program in a Hello message to a PS."""
        names = sorted(self.files, key=lambda name: (name != self.script, name))
        rows = [(f"{_FILE}{name}", self.files[name]) for name in names[:_MOST_FILES]]
        if excess := names[_MOST_FILES:]:
            text = "".join(f"{name} {self.files[name]}\n" for name in excess)
            rows.append((f"{_FILE}{_OTHERS}", digest_of_bytes(text.encode())))
        rows.append((_ARGUMENTS, shlex.join(self.arguments)))
        rows += [(f"{PREFIX}{name}", text) for name, text in self.compiled.items()]
        return tuple((name, _bounded(value)) for name, value in rows)


def program_rows(rows: Iterable[tuple[str, str]]) -> Rows:
    """Return the rows of a worker's settings (in its Hello message) that describe its program."""
    return tuple((name, value) for name, value in rows if name.startswith(PREFIX))


def first_change(before: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> str | None:
    """Return a phrase for the first difference between two workers' programs; None if equal."""
    was, present = dict(before), dict(now)
    for name in [*was, *(name for name in present if name not in was)]:
        if was.get(name) != present.get(name):
            return _change(name, was.get(name), present.get(name))
    return None


def changed_file(
    before: Sequence[tuple[str, str]], folder: pathlib.Path, script: str
) -> str | None:
    """Return a phrase for a saved program's first file that has changed; None without changes.

    `changed_file` does not check new source files, because if the script imports a new file, a
    known file has changed, too.

    Args:
        before: (name, value) rows that describe the saved program.
        folder: Folder of the present script, whose files are compared.
        script: Name of the present script's file.
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
    """Return a phrase if a script's arguments differ from the saved arguments; None if equal."""
    was, now = dict(before).get(_ARGUMENTS), _bounded(shlex.join(arguments))
    return None if was in (None, now) else _change(_ARGUMENTS, was, now)


def module_name(name: str) -> str:
    """Return the name by which a worker's `Program` lists a module outside the script's folder."""
    return f"module {name}"


def digest_of(path: pathlib.Path) -> str:
    """Return the SHA-256 digest of a file's content, in hexadecimal."""
    return digest_of_bytes(path.read_bytes())


def digest_of_bytes(content: bytes) -> str:
    """Return the SHA-256 digest of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _is_elsewhere(name: str) -> bool:
    return name == _OTHERS or name.startswith(module_name(""))


def _bounded(text: str) -> str:
    """Return the value of a row of a worker's program; cut a long value and append its digest."""
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
