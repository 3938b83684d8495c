"""Checkpoints: PS, worker and Standalone save their state as plain data in one format.

A node's checkpoints are objects of an object store: files below the node's folder in the run
directory, or objects at --checkpoint_dir. A checkpoint has two kinds of objects:

- ``parts/TOKEN-UPLOAD-I.bin``: a part, which is a piece of the bytes of all arrays, each aligned to
  64 bytes. In a folder, a checkpoint has only one part;
- ``log/NUMBER.json``: the checkpoint's entry in the node's log
  (`thinwire.runtime.persistence.checkpoint_log`), which is its manifest: step, the tree of plain
  values, names and sizes of the parts, and dtype, shape, offset and CRC-32 of every array.

The entry is written after the parts, and every object is written whole or not at all. A process
killed at any moment thus leaves either the whole checkpoint, or parts that no entry names, which
the next save removes. Nothing is pickled.

Checkpoints are ordered by the numbers of their entries instead of training steps, because after a
run's return to an older checkpoint, the checkpoints of the abandoned later steps must not count as
the newest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from thinwire.ops.types import ConfigurationError, State
from thinwire.runtime.persistence.array_parts import PartsReader
from thinwire.runtime.persistence.checkpoint_log import CheckpointLog, Entry
from thinwire.runtime.persistence.object_store import LocalObjects, ObjectStore, StorageError
from thinwire.runtime.persistence.state_format import (
    ArrayBytes,
    StateEncoder,
    decode_state,
    decode_values,
    read_arrays,
)

_log = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """A checkpoint is incomplete, altered or of an unknown format; the message names the defect."""


class Checkpoints:
    """Checkpoints of one node in an object store.

    Attributes:
        log: Log of the checkpoints. A node claims the log of a storage that other hosts may write
            to; the run's lock protects a folder of the run directory.
        num_skipped: Number of damaged checkpoints that are newer than the loaded checkpoint.

    Args:
        store: Object store in which only these checkpoints use names below ``log/`` and ``parts/``.
        keep: Number of newest checkpoints to keep, at least 1.
        part_bytes: Largest size of a part (an object with array bytes of a checkpoint), in bytes.
            None: `ObjectStore.part_bytes` of the store.
    """

    def __init__(self, store: ObjectStore, keep: int = 3, part_bytes: int | None = None) -> None:
        if keep < 1:
            raise ValueError(f"the number of checkpoints to keep is {keep}; expected 1 or more")
        self.log = CheckpointLog(store, keep)
        self.num_skipped = 0
        self._store, self._part_bytes = store, part_bytes or store.part_bytes
        self._num_uploads = 0

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str], keep: int = 3) -> Checkpoints:
        """Return the checkpoints in a folder that a lock protects from other writers.

        Args:
            folder: Path of the folder; created by the first save.
            keep: Number of newest checkpoints to keep, at least 1.
        """
        return cls(LocalObjects(folder), keep)

    def save(self, step: int, state: State) -> None:
        """Write a node's state as a checkpoint, which is whole and durable when the call returns.

        The state must not change during the save.

        Raises:
            TypeError: The node's state holds a value that is not plain data. The message names the
                value's place in the state.
            OSError: The checkpoint cannot be written.
            Fenced: A newer process has claimed the storage of the checkpoints.
            ConfigurationError: Another version of Thinwire wrote the newest checkpoints.
        """
        if step < 0:
            raise ValueError(f"the training step of the checkpoint is {step}; expected 0 or more")
        self.log.follow()
        encoder = StateEncoder()
        tree = encoder.encode(state, "state")
        arrays = ArrayBytes(encoder.arrays)
        self._num_uploads += 1
        prefix, number = f"parts/{self.log.token}-{self._num_uploads}-", self.log.next_number
        try:
            parts = list(self._write_parts(prefix, arrays))
            content = {"step": step, "parts": parts, "arrays": arrays.records, "tree": tree}
            self.log.append(content)
        except BaseException:
            with contextlib.suppress(StorageError):
                self.log.remove_unnamed(number, prefix)
            raise

    def _write_parts(self, prefix: str, arrays: ArrayBytes) -> Iterator[dict[str, Any]]:
        """Write the bytes of all arrays in parts with new names; yield the record of each part."""
        for index, start in enumerate(range(0, arrays.num_bytes, self._part_bytes)):
            name, size = f"{prefix}{index}.bin", min(self._part_bytes, arrays.num_bytes - start)
            self._store.put_pieces(name, arrays.take(size), size)
            yield {"name": name, "bytes": size}

    def load_latest(self) -> tuple[int, State] | None:
        """Return training step and state of the newest whole checkpoint; None if none exists.

        A damaged checkpoint is skipped with a warning, and the next older checkpoint is loaded.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote the checkpoints.
        """
        self.log.read()
        self.num_skipped = 0
        for entry in reversed(self.log.entries):
            try:
                return self.load(entry)
            except DamagedCheckpointError as error:
                self.num_skipped += 1
                _log.warning("Skipping an unreadable checkpoint: %s. Trying an older one.", error)
        return None

    def load_values(self) -> State | None:
        """Return the newest checkpoint's state, with zeros for arrays; None without a checkpoint.

        `load_values` does not read the bytes of the arrays, so it is fast.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote the checkpoints.
        """
        self.log.read()
        for entry in reversed(self.log.entries):
            try:
                if entry.content is not None:
                    state: State = decode_values(entry.content["tree"])
                    return state
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                _log.debug("%s cannot be read: %s", self.log.place_of(entry), error)
        return None

    def load_all(self) -> list[State]:
        """Return the states of all whole checkpoints, oldest first; log damaged checkpoints.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote the checkpoints.
        """
        self.log.read()
        states = []
        for entry in self.log.entries:
            try:
                states.append(self.load(entry)[1])
            except DamagedCheckpointError as error:
                _log.warning("Skipping a checkpoint that cannot be read: %s.", error)
        return states

    def load(self, entry: Entry) -> tuple[int, State]:
        """Read the checkpoint of a log entry, and verify the checksum of every array.

        Returns:
            (step, state): the training step, and the saved state with new, writable arrays.

        Raises:
            DamagedCheckpointError: The checkpoint is damaged; the message names the defect.
            ConfigurationError: The checkpoints' storage failed.
        """
        place, content = self.log.place_of(entry), entry.content
        if content is None:
            raise DamagedCheckpointError(f"{place}: {entry.damage}")
        try:
            with contextlib.closing(PartsReader(self._store, content["parts"])) as parts:
                arrays = read_arrays(parts.fill, parts.num_bytes, content["arrays"])
            state, step = decode_state(content["tree"], arrays), content["step"]
            if type(step) is not int or not isinstance(state, dict):
                raise ValueError("the checkpoint's training step or node state has the wrong type")
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise DamagedCheckpointError(f"{place}: {type(error).__name__}: {error}") from error
        return step, state
