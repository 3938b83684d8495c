"""An object store holds byte strings by name at one address, for checkpoints and reports.

An object of an object store is written whole or not written. `create` writes only if no object of
the name exists, so if two processes create the same name, the storage rejects one process.
`LocalObjects` stores objects as files of a folder, on a disk that several hosts may share.
`thinwire.runtime.persistence.fsspec_objects` stores objects in remote storage.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import io
import os
import pathlib
import secrets
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, BinaryIO

_TEMPORARY_PREFIX = ".tmp-"


def check_free_space(folder: pathlib.Path, needed_bytes: int) -> None:
    """Reject a write that does not fit on the disk, before it uses space of other processes.

    Raises:
        OSError: The disk has fewer than ``needed_bytes`` free bytes (errno ENOSPC).
    """
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if needed_bytes > free_bytes:
        text = f"No space left on device: {needed_bytes} bytes are needed, {free_bytes} are free"
        raise OSError(errno.ENOSPC, text, str(folder))


def sync(file: IO[Any]) -> None:
    """Flush a file and wait until its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
    """Wait until a directory's entries are on the disk; syncing a file does not sync its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StorageError(OSError):
    """The object storage failed or rejected a request; the error message holds no secret."""


class ObjectExistsError(Exception):
    """An object of the given name exists in the object store already."""


class ObjectMissingError(Exception):
    """No object of the given name exists in the object store."""


class ObjectStore(abc.ABC):
    """Interface of a storage of byte strings (objects) by name; a name may have slashes.

    Every method of an object store raises `StorageError` if the object storage fails.

    Attributes:
        address: Path or URL of the storage, for messages.
        part_bytes: Largest size of one object of a checkpoint, in bytes. Parts are small, so that
            an upload needs little memory.
    """

    address: str
    part_bytes: int = 16 << 20

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write an object (a byte string) under a name; replace an existing object of the name."""

    def put_pieces(self, name: str, pieces: Iterable[memoryview], num_bytes: int) -> None:
        """Write an object whose bytes come in pieces; replace an existing object of the name.

        Args:
            name: Name of the object.
            pieces: Consecutive pieces of the object's bytes, each read once.
            num_bytes: Size of the whole object, in bytes.
        """
        data = io.BytesIO()
        data.writelines(pieces)
        self.put(name, data.getvalue())

    @abc.abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write an object (a byte string) under a name that no object has.

        Raises:
            ObjectExistsError: An object with the given name exists. Compare its bytes: if the
                storage's reply was lost and the request was repeated, this call wrote the object.
        """

    @abc.abstractmethod
    def get(self, name: str) -> bytes:
        """Return the bytes of the object with a name.

        Raises:
            ObjectMissingError: No object of the name exists.
        """

    def open(self, name: str) -> BinaryIO:
        """Return the object with a name as a file that is open for reading.

        Reading the file raises an `OSError` other than `StorageError` if the bytes are damaged, for
        example by a bad sector of a disk.

        Raises:
            ObjectMissingError: No object of the name exists.
        """
        return io.BytesIO(self.get(name))

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return the sorted names of all objects, including temporary files of killed writers."""

    @abc.abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove the objects with the given names; ignore missing objects."""

    @abc.abstractmethod
    def below(self, name: str) -> ObjectStore:
        """Return an object store of this store's objects with names that start with ``name/``."""

    def check(self) -> None:
        """Test the storage: create an object twice (must fail the second time), read and remove it.

        Raises:
            StorageError: A storage operation does not work; the message names the operation.
        """
        name, data = f"parts/probe-{secrets.token_hex(4)}", b"thinwire"
        self.create(name, data)
        try:
            self.create(name, data)
        except ObjectExistsError:
            pass
        else:
            raise StorageError(
                f"{self.address} replaced an existing object although the request was to create "
                "it only if none exists (If-None-Match: *), so two writers could overwrite each "
                "other; expected a storage that rejects the request, as S3 does"
            )
        try:
            is_whole = self.get(name) == data
        except ObjectMissingError:
            is_whole = False
        if not is_whole or name not in self.names():
            raise StorageError(f"{self.address} does not return an object that was just written")
        self.remove([name])


class LocalObjects(ObjectStore):
    """Object store in a folder; an object is a file, written under a temporary name and renamed.

    Args:
        folder: Path of the folder of the objects; created when the first object is written.
    """

    part_bytes = sys.maxsize  # one synced file for each checkpoint; `put_pieces` holds no copy

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(folder)
        self.address = str(folder)

    def put(self, name: str, data: bytes) -> None:
        """Write an object (a byte string) under a name; replace an existing object of the name."""
        with self._failures(name):
            self._replace(name, [data])

    def put_pieces(self, name: str, pieces: Iterable[memoryview], num_bytes: int) -> None:
        """Write an object piece by piece, if the disk has enough free space for all pieces."""
        with self._failures(name):
            check_free_space(self._prepare(name).parent, num_bytes)
            self._replace(name, pieces)

    def create(self, name: str, data: bytes) -> None:
        """Write an object (a byte string) under a new name, or raise ObjectExistsError."""
        with self._failures(name):
            temporary, path = self._write(name, [data])
            # A hard link to an existing name fails, while a rename would replace another writer's
            # file.
            try:
                os.link(temporary, path)
            except FileExistsError as error:
                raise ObjectExistsError(name) from error
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(path.parent)

    def get(self, name: str) -> bytes:
        """Return the bytes of the object with a name, or raise ObjectMissingError."""
        with self._failures(name), self.open(name) as file:
            return file.read()

    def open(self, name: str) -> BinaryIO:
        """Open the file of the object with a name, or raise ObjectMissingError."""
        with self._failures(name):
            try:
                return open(self._folder / name, "rb")
            except FileNotFoundError as error:
                raise ObjectMissingError(name) from error

    def names(self) -> list[str]:
        """Return the sorted names of all objects, including temporary files of killed writers."""
        with self._failures(""):
            # Unlike `rglob`, this walk reports a folder that cannot be read. An unreadable log must
            # not look like an empty log, because a run would start again from nothing.
            walk = os.walk(self._folder, onerror=_raise_unless_missing)
            paths = [pathlib.Path(folder, name) for folder, _, names in walk for name in names]
            return sorted(str(p.relative_to(self._folder)) for p in paths if p.is_file())

    def remove(self, names: Iterable[str]) -> None:
        """Remove the objects with the given names; ignore missing objects."""
        for name in names:
            with self._failures(name):
                (self._folder / name).unlink(missing_ok=True)

    def below(self, name: str) -> LocalObjects:
        """Return an object store of this store's objects with names that start with ``name/``."""
        return LocalObjects(self._folder / name)

    def _replace(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        temporary, path = self._write(name, pieces)
        os.replace(temporary, path)
        sync_directory(path.parent)

    def _prepare(self, name: str) -> pathlib.Path:
        """Return the path of an object's file, in a folder that is created if missing."""
        path = self._folder / name
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent.parent)
        return path

    def _write(
        self, name: str, pieces: Iterable[bytes | memoryview]
    ) -> tuple[pathlib.Path, pathlib.Path]:
        path = self._prepare(name)
        temporary = path.with_name(f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                file.writelines(pieces)
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


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
