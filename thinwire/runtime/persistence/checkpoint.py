"""Checkpoints on disk: PS, worker and Supervisor save their state as plain data in one format.

A checkpoint is a directory ``<sequence>-step-<step>`` with two files: ``arrays.bin`` (the raw bytes
of every array, aligned to 64 bytes) and ``manifest.json`` (format version, step, the tree of plain
values, and the dtype, shape, offset and CRC-32 of every array). A checkpoint is written under a
temporary name, synced and renamed. A process killed at any moment thus leaves either the whole
checkpoint or a temporary directory that the next save removes. Nothing is pickled.

Checkpoints are ordered by sequence number instead of training step, because after a run's return to
an older checkpoint, the checkpoints of the abandoned later steps must not count as the newest.

A save of a checkpoint first checks that the disk has enough free space, and ends when all files are
synced.
"""

from __future__ import annotations

import abc
import errno
import logging
import os
import pathlib
import re
import shutil
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from thinwire.ops.frozen import FrozenArray
from thinwire.ops.types import ConfigurationError, State
from thinwire.runtime.persistence.state_format import (
    ArrayBytes,
    StateEncoder,
    decode_state,
    decode_values,
    manifest_bytes,
    read_arrays,
    read_manifest,
)


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


FORMAT_VERSION = 1
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_TEMPORARY_PREFIX = ".tmp-"
_ARRAYS = "arrays.bin"
_MANIFEST = "manifest.json"

_log = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """A checkpoint is incomplete, altered or of an unknown format; the message names the defect."""


class CheckpointStore(abc.ABC):
    """Interface of the storage of one node's checkpoints.

    `Checkpoints` stores checkpoints in a folder, `StoredCheckpoints` in an object store.

    Attributes:
        keep: Number of newest checkpoints to keep, at least 1.
        num_skipped: Number of damaged checkpoints that are newer than the loaded checkpoint.
        generation_before: Highest generation (number of a process that has claimed this storage)
            so far; -1 if no process has claimed the storage.
    """

    keep: int
    num_skipped: int = 0
    generation_before: int = -1

    @abc.abstractmethod
    def claim(self, generation: int, owner: str) -> bool:
        """Make this process the only writer of the checkpoints; fence (end) earlier writers.

        Args:
            generation: Number of this process among the writers, above `generation_before`.
            owner: Description of this process, for the error message of a writer that this process
                replaces.

        Returns:
            True if the claim succeeded. False if another process has written to the storage since
            this process loaded its checkpoints, so that the caller must load them again.
        """

    @abc.abstractmethod
    def take_over(self, owner: str) -> None:
        """Make this process the checkpoints' only writer, even if another process has just written.

        Args:
            owner: Description of this process, for the error message of a writer that this process
                replaces.
        """

    @abc.abstractmethod
    def save(self, step: int, state: State) -> object:
        """Write a node's state as a checkpoint, which is whole and durable when the call returns.

        The state must not change during the save, so pass ``copy_state(state)`` to save on another
        thread.

        Raises:
            TypeError: The node's state holds a value that is not plain data. The message names the
                value's place in the state.
            OSError: The checkpoint's files cannot be written.
            Fenced: A newer process has claimed the storage of the checkpoints.
        """

    @abc.abstractmethod
    def load_latest(self) -> tuple[int, State] | None:
        """Return training step and state of the newest whole checkpoint; None if none exists.

        A damaged checkpoint is skipped with a warning, and the next older checkpoint is loaded.

        Raises:
            ConfigurationError: Another version of Thinwire wrote the newest whole checkpoint.
        """

    @abc.abstractmethod
    def load_values(self) -> State | None:
        """Return the newest checkpoint's state, with zeros for arrays; None without a checkpoint.

        `load_values` does not read the bytes of the arrays, so it is fast.

        Raises:
            ConfigurationError: Another version of Thinwire wrote the newest checkpoint.
        """

    @abc.abstractmethod
    def load_all(self) -> list[State]:
        """Return the states of all whole checkpoints, oldest first; log damaged checkpoints."""

    @abc.abstractmethod
    def discard(self, owner: str) -> None:
        """Remove all checkpoints of the storage; fence (end) a process that still writes to it.

        Args:
            owner: Description of this process, for the error message of a writer that this process
                replaces.
        """


class Fenced(ConfigurationError):
    """A newer process has claimed this process's storage; the message names the newer process."""


class Checkpoints(CheckpointStore):
    """Checkpoints of one node in a directory that only this node uses.

    The lock of the checkpoint directory (`thinwire.runtime.run.lock`) excludes other writing
    processes, so `claim` has nothing to do.

    Args:
        directory: Path of the directory of the checkpoints; created if missing.
        keep: Number of newest checkpoints to keep on disk, at least 1.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"the number of checkpoints to keep is {keep}; expected 1 or more")
        self.directory = pathlib.Path(directory)
        self.keep = keep

    def claim(self, generation: int, owner: str) -> bool:
        """Return True, because the checkpoint directory's lock excludes other writing processes."""
        return True

    def take_over(self, owner: str) -> None:
        """Do nothing, because the checkpoint directory's lock excludes other writing processes."""

    def discard(self, owner: str) -> None:
        """Remove the directory with all checkpoints of this node."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def save(self, step: int, state: State) -> pathlib.Path:
        """Write a node's state as its newest checkpoint.

        A save that fails removes its files, because other processes need the disk space.

        Returns:
            Directory of the new checkpoint.
        """
        if step < 0:
            raise ValueError(f"the training step of the checkpoint is {step}; expected 0 or more")
        encoder = StateEncoder()
        tree = encoder.encode(state, "state")
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f"{_TEMPORARY_PREFIX}{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            check_free_space(temporary, sum(array.nbytes for array in encoder.arrays))
            records = _write_arrays(temporary / _ARRAYS, encoder.arrays)
            content = {"format": FORMAT_VERSION, "step": step, "arrays": records, "tree": tree}
            with open(temporary / _MANIFEST, "wb") as file:
                file.write(manifest_bytes(content))
                sync(file)
            sync_directory(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        newest = self._found()
        sequence = newest[-1][0] + 1 if newest else 1
        path = self.directory / f"{sequence:06d}-step-{step}"
        os.rename(temporary, path)
        sync_directory(self.directory)
        self._prune()
        return path

    def load_latest(self) -> tuple[int, State] | None:
        """Return training step and state of the newest whole checkpoint; None if none exists."""
        self.num_skipped = 0
        for _, path in reversed(self._found()):
            try:
                return load(path)
            except DamagedCheckpointError as error:
                self.num_skipped += 1
                _log.warning("Skipping an unreadable checkpoint: %s. Trying an older one.", error)
        return None

    def load_values(self) -> State | None:
        """Return the newest checkpoint's state, with zeros for arrays; None if there is none."""
        for _, path in reversed(self._found()):
            try:
                state: State = decode_values(_read_content(path)["tree"])
                return state
            except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                _log.debug("%s cannot be read: %s", path, error)
        return None

    def load_all(self) -> list[State]:
        """Return the states of all whole checkpoints, oldest first; log damaged checkpoints."""
        states = []
        for _, path in self._found():
            try:
                states.append(load(path)[1])
            except DamagedCheckpointError as error:
                _log.warning("Skipping a checkpoint that cannot be read: %s.", error)
        return states

    @staticmethod
    def load(path: str | os.PathLike[str]) -> tuple[int, State]:
        """Read the checkpoint in the directory ``path``; return (training step, node's state)."""
        return load(path)

    def _found(self) -> list[tuple[int, pathlib.Path]]:
        """Return (sequence number, path) of every finished checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())

    def _prune(self) -> None:
        """Remove all but the newest ``keep`` checkpoints, and files of saves that were killed."""
        for _, path in self._found()[: -self.keep]:
            # Rename the directory before its removal, so that a directory of a killed removal,
            # which lacks files, does not have the name of a finished checkpoint.
            doomed = path.with_name(_TEMPORARY_PREFIX + path.name)
            os.rename(path, doomed)
        for leftover in self.directory.glob(_TEMPORARY_PREFIX + "*"):
            shutil.rmtree(leftover, ignore_errors=True)


def load(path: str | os.PathLike[str]) -> tuple[int, State]:
    """Read the checkpoint in the directory ``path``, and verify the checksum of every array.

    Returns:
        (step, state): the training step, and the saved state with new, writable arrays.

    Raises:
        DamagedCheckpointError: The checkpoint is damaged; the message has the path and the defect.
        ConfigurationError: Another version of Thinwire wrote the checkpoint.
    """
    path = pathlib.Path(path)
    try:
        content = _read_content(path)
        with open(path / _ARRAYS, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            arrays = read_arrays(file, size, _ARRAYS, content["arrays"])
        state = decode_state(content["tree"], arrays)
        step = content["step"]
        if type(step) is not int or not isinstance(state, dict):
            raise ValueError("the checkpoint's training step or node state has the wrong type")
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: {type(error).__name__}: {error}") from error
    return step, state


def copy_state(value: Any) -> Any:
    """Return a deep copy of a node's state, fast enough to run between two updates."""
    if isinstance(value, dict):
        return {key: copy_state(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_state(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _write_arrays(
    path: pathlib.Path, arrays: list[NDArray[Any] | FrozenArray]
) -> list[dict[str, Any]]:
    """Write and sync the bytes of the arrays; return the arrays' records for the manifest."""
    written = ArrayBytes(arrays)
    with open(path, "wb") as file:
        for piece in written:
            file.write(piece)
        sync(file)
    return written.records


def _read_content(path: pathlib.Path) -> dict[str, Any]:
    """Return the content of the manifest in a checkpoint's directory."""
    content = read_manifest((path / _MANIFEST).read_bytes(), _MANIFEST)
    # Another format version is no DamagedCheckpointError, because the checkpoint is whole, and a
    # return to an older checkpoint would lose training progress.
    if content["format"] != FORMAT_VERSION:
        raise ConfigurationError(
            f"the checkpoint {path} has format {content['format']!r}, but this version of "
            f"Thinwire reads format {FORMAT_VERSION}; continue with the version that wrote the "
            "checkpoint, or start again with --overwrite."
        )
    return content
