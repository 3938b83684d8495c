"""One saver for every role: state is plain data, so one format holds it all.

A checkpoint is a directory ``<sequence>-step-<step>`` with two files: ``arrays.bin`` (the raw
bytes of every array, each aligned to 64 bytes) and ``manifest.json`` (format version, step, the
tree of plain values, and per array its dtype, shape, place and CRC-32). It is written under a
temporary name, synced and renamed, so a process killed at any moment leaves either the whole
checkpoint or a leftover that the next save clears away. Nothing is pickled.

Order is by sequence, not by step: after a return to an older checkpoint, the abandoned steps ahead
of it must not be taken for the newest.

Before a save the disk must have enough free space; after it everything is synced.
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
    """Refuse to begin what the disk cannot take: others on it may still need the space.

    Raises:
        OSError: ENOSPC.
    """
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if needed_bytes > free_bytes:
        text = f"No space left on device: {needed_bytes} bytes are needed, {free_bytes} are free"
        raise OSError(errno.ENOSPC, text, str(folder))


def sync(file: IO[Any]) -> None:
    """Make what was written durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
    """Make the names in ``path`` durable, not only the contents."""
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
    """A checkpoint is incomplete, altered, or of an unknown format; the message names which."""


class CheckpointStore(abc.ABC):
    """Where the checkpoints of one node are kept: `Checkpoints` in a folder, or elsewhere.

    Attributes:
        keep: How many of the newest to leave there, at least 1.
        num_skipped: Damaged ones, newer than what was loaded.
        generation_before: The highest generation that was claimed before; -1: none was.
    """

    keep: int
    num_skipped: int = 0
    generation_before: int = -1

    @abc.abstractmethod
    def claim(self, generation: int, owner: str) -> bool:
        """Let nobody of an earlier generation write from now on.

        Args:
            generation: Of whoever writes from now on, above `generation_before`.
            owner: Who that is, for the messages of the one before.

        Returns:
            Whether nothing was written since it was loaded; if False, nothing is claimed: load
            it again.
        """

    @abc.abstractmethod
    def take_over(self, owner: str) -> None:
        """Let nobody write from now on who did before, whatever was written meanwhile.

        Args:
            owner: Who writes from now on, for the messages of the one before.
        """

    @abc.abstractmethod
    def save(self, step: int, state: State) -> object:
        """Write a state so that it is kept, whole, when this returns.

        The state must not change meanwhile: hand in ``copy_state(state)`` to save on another
        thread.

        Raises:
            TypeError: The state holds something that is not plain data, and where it is.
            OSError: The storage refused.
            Fenced: Another one of a higher generation writes there now.
        """

    @abc.abstractmethod
    def load_latest(self) -> tuple[int, State] | None:
        """Return (step, state) of the newest whole checkpoint, or None when there is none.

        A damaged one is logged as a warning and the one before it is tried.

        Raises:
            ConfigurationError: Another version of Thinwire wrote the newest whole one.
        """

    @abc.abstractmethod
    def load_values(self) -> State | None:
        """Return the newest state with zeros for its arrays, which are not read; None: no state.

        Raises:
            ConfigurationError: Another version of Thinwire wrote it.
        """

    @abc.abstractmethod
    def load_all(self) -> list[State]:
        """Return the states of all whole checkpoints, oldest first; damaged ones are logged."""

    @abc.abstractmethod
    def discard(self, owner: str) -> None:
        """Remove all that is there; nobody that writes now may go on.

        Args:
            owner: Who removes it.
        """


class Fenced(ConfigurationError):
    """A successor of a higher generation writes; the message names both."""


class Checkpoints(CheckpointStore):
    """The checkpoints of one role in one directory, which belongs to that role alone.

    Its lock (`thinwire.runtime.run.lock`) keeps others out, so that there is nothing to claim.

    Args:
        directory: created when missing.
        keep: how many of the newest to leave on disk, at least 1.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1 checkpoint to keep")
        self.directory = pathlib.Path(directory)
        self.keep = keep

    def claim(self, generation: int, owner: str) -> bool:
        """See CheckpointStore."""
        del generation, owner
        return True

    def take_over(self, owner: str) -> None:
        """See CheckpointStore."""
        del owner

    def discard(self, owner: str) -> None:
        """See CheckpointStore."""
        del owner
        shutil.rmtree(self.directory, ignore_errors=True)

    def save(self, step: int, state: State) -> pathlib.Path:
        """Write ``state``; see CheckpointStore.

        What a failed save has written is removed: others need the space.

        Returns:
            The new checkpoint's directory.
        """
        if step < 0:
            raise ValueError(f"step is {step}, expected 0 or more")
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
        """See CheckpointStore."""
        self.num_skipped = 0
        for _, path in reversed(self._found()):
            try:
                return load(path)
            except DamagedCheckpointError as error:
                self.num_skipped += 1
                _log.warning("Skipping a checkpoint: %s. Trying the one before it.", error)
        return None

    def load_values(self) -> State | None:
        """See CheckpointStore."""
        for _, path in reversed(self._found()):
            try:
                state: State = decode_values(_read_content(path)["tree"])
                return state
            except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                _log.debug("%s cannot be read: %s", path, error)
        return None

    def load_all(self) -> list[State]:
        """See CheckpointStore."""
        states = []
        for _, path in self._found():
            try:
                states.append(load(path)[1])
            except DamagedCheckpointError as error:
                _log.warning("Skipping a checkpoint: %s.", error)
        return states

    @staticmethod
    def load(path: str | os.PathLike[str]) -> tuple[int, State]:
        """See the function ``load``."""
        return load(path)

    def _found(self) -> list[tuple[int, pathlib.Path]]:
        """Return (sequence, path) of every finished checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())

    def _prune(self) -> None:
        """Remove what is older than the newest ``keep``, and leftovers of killed saves."""
        for _, path in self._found()[: -self.keep]:
            # Renamed first: a kill in the middle must not leave half a checkpoint with a good name.
            doomed = path.with_name(_TEMPORARY_PREFIX + path.name)
            os.rename(path, doomed)
        for leftover in self.directory.glob(_TEMPORARY_PREFIX + "*"):
            shutil.rmtree(leftover, ignore_errors=True)


def load(path: str | os.PathLike[str]) -> tuple[int, State]:
    """Read the checkpoint at ``path`` and check every byte of it.

    Returns:
        (step, state); arrays are fresh and writable.

    Raises:
        DamagedCheckpointError: with the path and what is wrong.
        ConfigurationError: Another version of Thinwire wrote it.
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
            raise ValueError("step or state is of the wrong type")
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: {type(error).__name__}: {error}") from error
    return step, state


def copy_state(value: Any) -> Any:
    """Return a deep copy of plain state; quick enough to be taken between two updates."""
    if isinstance(value, dict):
        return {key: copy_state(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_state(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _write_arrays(
    path: pathlib.Path, arrays: list[NDArray[Any] | FrozenArray]
) -> list[dict[str, Any]]:
    """Write the arrays' bytes, synced to disk, and return their records for the manifest."""
    written = ArrayBytes(arrays)
    with open(path, "wb") as file:
        for piece in written:
            file.write(piece)
        sync(file)
    return written.records


def _read_content(path: pathlib.Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint's directory."""
    content = read_manifest((path / _MANIFEST).read_bytes(), _MANIFEST)
    if content["format"] != FORMAT_VERSION:  # whole: going back to an older one would lose it
        raise ConfigurationError(
            f"{path} is a checkpoint of format {content['format']!r}, and this version of "
            f"Thinwire reads {FORMAT_VERSION}; go on with the one that wrote it, or --overwrite."
        )
    return content
