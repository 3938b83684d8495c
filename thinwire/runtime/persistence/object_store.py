"""Named objects at one address: what snapshots and reports need of a storage, and no more.

An object is there whole or not at all, and `create` writes only where there is none yet: of two
processes that create the same name one is refused by the storage itself. `LocalObjects` is a
folder, on a disk that hosts may share; `thinwire.runtime.persistence.fsspec_objects` everything
else.
"""

from __future__ import annotations

import abc
import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterable, Iterator

from thinwire.runtime.persistence.checkpoint import sync, sync_directory

_TEMPORARY_PREFIX = ".tmp-"


class StorageError(OSError):
    """The storage has failed or refused; the message has no secret."""


class ObjectExistsError(Exception):
    """There is an object of this name already."""


class ObjectMissingError(Exception):
    """There is no object of this name."""


class ObjectStore(abc.ABC):
    """Objects by name; a name may have slashes.

    Every method raises `StorageError` where the storage fails.

    Attributes:
        address: Of the storage, for messages.
    """

    address: str

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write an object, over one of this name."""

    @abc.abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write an object where there is none.

        Raises:
            ObjectExistsError: There is one. It may be of this very call, where the storage's reply
                was lost: compare what it holds.
        """

    @abc.abstractmethod
    def get(self, name: str) -> bytes:
        """Return an object's bytes.

        Raises:
            ObjectMissingError: There is none.
        """

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return the names of all objects, in order; leftovers of writers that died included."""

    @abc.abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is none to remove."""

    @abc.abstractmethod
    def below(self, name: str) -> ObjectStore:
        """Return the part of this storage whose names begin with ``name/``."""

    def check(self) -> None:
        """Try what is needed: create, refuse to create again, read, list, remove.

        Raises:
            StorageError: Something of it does not work; the message names what.
        """
        name, data = f"parts/probe-{secrets.token_hex(4)}", b"thinwire"
        self.create(name, data)
        try:
            self.create(name, data)
        except ObjectExistsError:
            pass
        else:
            raise StorageError(
                f"{self.address} writes over an object that was to be created only if there was "
                "none (If-None-Match: *), so that two writers could not be kept apart; expected a "
                "storage that refuses this, as S3 does"
            )
        try:
            is_whole = self.get(name) == data
        except ObjectMissingError:
            is_whole = False
        if not is_whole or name not in self.names():
            raise StorageError(f"{self.address} does not show what was just written there")
        self.remove([name])


class LocalObjects(ObjectStore):
    """Objects as files of a folder; each is written beside its place, synced, and put there.

    Args:
        folder: Made when the first object is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(folder)
        self.address = str(folder)

    def put(self, name: str, data: bytes) -> None:
        """See ObjectStore."""
        with self._failures(name):
            temporary, path = self._write(name, data)
            os.replace(temporary, path)
            sync_directory(path.parent)

    def create(self, name: str, data: bytes) -> None:
        """See ObjectStore; a second name of a file is the one thing that never replaces another."""
        with self._failures(name):
            temporary, path = self._write(name, data)
            try:
                os.link(temporary, path)
            except FileExistsError as error:
                raise ObjectExistsError(name) from error
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(path.parent)

    def get(self, name: str) -> bytes:
        """See ObjectStore."""
        with self._failures(name):
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError as error:
                raise ObjectMissingError(name) from error

    def names(self) -> list[str]:
        """See ObjectStore."""
        with self._failures(""):
            found = self._folder.rglob("*")
            return sorted(str(p.relative_to(self._folder)) for p in found if p.is_file())

    def remove(self, names: Iterable[str]) -> None:
        """See ObjectStore."""
        for name in names:
            with self._failures(name):
                (self._folder / name).unlink(missing_ok=True)

    def below(self, name: str) -> LocalObjects:
        """See ObjectStore."""
        return LocalObjects(self._folder / name)

    def _write(self, name: str, data: bytes) -> tuple[pathlib.Path, pathlib.Path]:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                sync(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary, path

    @contextlib.contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            where = str(self._folder / name)
            raise StorageError(error.errno, error.strerror or str(error), where) from error
