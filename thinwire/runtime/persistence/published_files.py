"""Copies files of a run directory to a remote address (publishes them) under equal names.

A published file is one object of an object store, written whole or not written. Only one process
writes published files at a storage address. The writing process claims the address as
`CheckpointLog` does, and checks its claim before each write.
"""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Mapping

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.checkpoint_log import CheckpointLog
from thinwire.runtime.persistence.object_store import ObjectStore, StorageError, sync
from thinwire.runtime.run.files import naming

#: Prefix of the names of claims, objects by which a process becomes the only writer of an address.
CLAIMS = "supervisor"


class PublishedFiles:
    """Published files of a run: copies of files of its run directory in an object store.

    Args:
        store: Object store that only this run uses.
        owner: Description of this process, for the error message of a writer that this process
            replaces.
    """

    def __init__(self, store: ObjectStore, owner: str) -> None:
        self._store, self._owner = store, owner
        self._claims = CheckpointLog(store.below(CLAIMS))

    def claim(self) -> None:
        """Make this process the only writer of published files; fence (end) earlier writers.

        Raises:
            ConfigurationError: The storage of the published files failed.
        """
        self._claims.take_over(self._owner)

    def discard(self) -> None:
        """Make this process the only writer of published files; remove all published files.

        Raises:
            ConfigurationError: The storage of the published files failed.
        """
        self.claim()
        try:
            self._store.remove(self._names())
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error

    def put(self, files: Mapping[str, bytes]) -> None:
        """Copy files of the run directory to the object store, one after the other.

        Args:
            files: Name of a file in the run directory -> content of the file.

        Raises:
            StorageError: The storage of the published files failed.
            Fenced: Another process has become the only writer of the address.
        """
        self._claims.check_owner()
        for name, data in files.items():
            self._store.put(name, data)

    def restore(self, folder: pathlib.Path) -> list[str]:
        """Write the published files that a folder lacks into the folder; return the files' names.

        Raises:
            ConfigurationError: The storage of the published files failed.
        """
        restored = []
        try:
            for name in self._names():
                path = folder / name
                if path.exists() or ".." in pathlib.PurePosixPath(name).parts:
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
                try:
                    with naming(path), open(temporary, "xb") as file:
                        file.write(self._store.get(name))
                        sync(file)
                    os.replace(temporary, path)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
                restored.append(name)
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error
        return restored

    def _names(self) -> list[str]:
        return [name for name in self._store.names() if not name.startswith(f"{CLAIMS}/")]
