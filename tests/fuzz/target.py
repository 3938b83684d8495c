"""Fuzz targets, and the reader that decodes a target's input."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

HERE = pathlib.Path(__file__).parent
CORPUS, CRASHES = HERE / "corpus", HERE / "crashes"
#: Processor time that one input may take; most take less than a millisecond.
HANG_SECONDS = 10.0

Choice = TypeVar("Choice")


class Hang(Exception):
    """An input takes far too long."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One decoder, or one conversation.

    Attributes:
        about: What is fuzzed, in a few words.
        one: Runs one input; any exception is a crash.
        seeds: Valid inputs to start from.
        longest: Maximum length of an input, in bytes.
        message: Kind of the message behind an input's first `head` bytes, to be changed by field.
    """

    about: str
    one: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    longest: int = 4096
    message: type[Message] | None = None
    head: int = 0


class Reader:
    """Takes an input apart; behind its end there are zeros for ever."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """Return the next bytes, as many as there are."""
        taken = self._data[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(len(self._data))

    def number(self, num_bytes: int = 1) -> int:
        """Return an unsigned number."""
        return int.from_bytes(self.take(num_bytes), "little")

    def choice(self, choices: Sequence[Choice]) -> Choice:
        """Return one of at most 256."""
        return choices[self.number() % len(choices)]

    def interesting(self) -> int:
        """Return a number that is small, or on an edge of some width, or anything."""
        edges = (2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1)
        kind = self.number()
        if kind < 192:
            return kind % 64
        return edges[kind % len(edges)] if kind < 240 else self.number(8)

    def real(self) -> float:
        """Return a float, NaN and infinity among them."""
        odd = (0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e300, 1e-300)
        kind = self.number()
        if kind < 200:
            return odd[kind % len(odd)]
        return float(struct.unpack("<f", self.take(4).ljust(4, b"\0"))[0])

    def piece(self) -> bytes:
        """Return bytes behind their own length (two bytes)."""
        return self.take(self.number(2))

    def pieces(self) -> Iterator[bytes]:
        """Yield all that is left, piece by piece."""
        while self:
            yield self.piece()


def joined(pieces: Sequence[bytes]) -> bytes:
    """Return what `Reader.pieces` takes apart."""
    return b"".join(len(piece).to_bytes(2, "little") + piece for piece in pieces)


def parsed(message: Message, data: bytes) -> bool:
    """Fill a message; return whether protobuf takes the bytes, which is its own business."""
    try:
        message.ParseFromString(data)
    except DecodeError:
        return False
    return True


@contextlib.contextmanager
def watched(seconds: float = HANG_SECONDS) -> Iterator[None]:
    """Raise Hang after this much processor time; time in a stopped process does not count."""

    def give_up(number: int, frame: Any) -> None:
        raise Hang(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


#: Variable that names an existing folder for the files that decoders read.
FOLDER_VARIABLE = "THINWIRE_FUZZ_FOLDER"


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, in memory if the machine has a memory file system."""
    memory = pathlib.Path("/dev/shm")
    return tempfile.TemporaryDirectory(
        prefix="thinwire-fuzz-", dir=memory if memory.is_dir() else None
    )


class Folder:
    """A folder for decoders that read files."""

    def __init__(self) -> None:
        self._path: pathlib.Path | None = None

    @property
    def path(self) -> pathlib.Path:
        """The folder: the one that the environment names, else one of this process."""
        if self._path is None:
            given = os.environ.get(FOLDER_VARIABLE)
            if given is None:
                self._holder = in_memory()
            self._path = pathlib.Path(given or self._holder.name)
        return self._path

    def write(self, name: str, content: bytes) -> pathlib.Path:
        """Write a file; return its path."""
        path = self.path / name
        path.write_bytes(content)
        return path

    def empty(self, name: str) -> pathlib.Path:
        """Return an empty folder in this one."""
        path = self.path / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path


FOLDER = Folder()
