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

import errno
import json
import logging
import math
import os
import pathlib
import re
import shutil
import zlib
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError, State


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
_ALIGNMENT_BYTES = 64
_ARRAY_KINDS = "biufc"  # bool, integers, floats, complex: whatever is raw memory and no object
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_TEMPORARY_PREFIX = ".tmp-"
_ARRAYS = "arrays.bin"
_MANIFEST = "manifest.json"

_log = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """A checkpoint is incomplete, altered, or of an unknown format; the message names which."""


class Checkpoints:
    """The checkpoints of one role in one directory, which belongs to that role alone.

    Args:
        directory: created when missing.
        keep: how many of the newest to leave on disk, at least 1.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1 checkpoint to keep")
        self.directory = pathlib.Path(directory)
        self.keep = keep
        self.num_skipped = 0  # damaged ones, newer than what was loaded

    def save(self, step: int, state: State) -> pathlib.Path:
        """Write ``state`` so that it is on disk, whole, when this returns.

        The state must not change meanwhile: hand in ``copy_state(state)`` to save on another
        thread. What a failed save has written is removed: others need the space.

        Returns:
            The new checkpoint's directory.

        Raises:
            TypeError: the state holds something that is not plain data, and where it is.
            OSError: the disk refused.
        """
        if step < 0:
            raise ValueError(f"step is {step}, expected 0 or more")
        encoder = _Encoder()
        tree = encoder.encode(state, "state")
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f"{_TEMPORARY_PREFIX}{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            check_free_space(temporary, sum(array.nbytes for array in encoder.arrays))
            records = _write_arrays(temporary / _ARRAYS, encoder.arrays)
            content = {"format": FORMAT_VERSION, "step": step, "arrays": records, "tree": tree}
            _write_manifest(temporary / _MANIFEST, content)
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
        """Return (step, state) of the newest whole checkpoint, or None when there is none.

        A damaged one is logged as a warning and the one before it is tried.

        Raises:
            ConfigurationError: Another version of Thinwire wrote the newest whole one.
        """
        self.num_skipped = 0
        for _, path in reversed(self._found()):
            try:
                return load(path)
            except DamagedCheckpointError as error:
                self.num_skipped += 1
                _log.warning("Skipping a checkpoint: %s. Trying the one before it.", error)
        return None

    def load_all(self) -> list[State]:
        """Return the states of all whole checkpoints, oldest first; damaged ones are logged."""
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
        content = _read_manifest(path / _MANIFEST)
        arrays = _read_arrays(path / _ARRAYS, content["arrays"])
        state = _decode(content["tree"], arrays)
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


class _Encoder:
    """Turns state into JSON values, putting arrays and bytes aside in ``arrays``."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []

    def encode(self, value: Any, where: str) -> Any:
        """Return the JSON form of ``value``; containers and arrays become tagged objects."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": [self._encode_item(item, where) for item in value.items()]}
        if type(value) in (bytes, bytearray):
            return {"bytes": self._put_aside(np.frombuffer(value, np.uint8), where)}
        if isinstance(value, np.generic):
            return {"scalar": self._put_aside(np.asarray(value), where)}
        if isinstance(value, np.ndarray):
            return {"array": self._put_aside(value, where)}
        raise TypeError(
            f"{where} is a {type(value).__name__}; a checkpoint holds dicts, lists, tuples, numpy "
            "arrays, ints, floats, strings, bools, bytes and None"
        )

    def _encode_item(self, item: tuple[Any, Any], where: str) -> list[Any]:
        key, value = item
        if type(key) not in (str, int):
            raise TypeError(f"{where} has the key {key!r}, expected a string or an int")
        return [key, self.encode(value, f"{where}[{key!r}]")]

    def _put_aside(self, array: NDArray[Any], where: str) -> int:
        if array.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(
                f"{where} is an array of {array.dtype}, expected bools, integers, floats or "
                "complex numbers"
            )
        self.arrays.append(np.asarray(array, order="C"))
        return len(self.arrays) - 1


def _decode(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Undo ``_Encoder.encode``."""
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag == "dict":
        return {key: _decode(item, arrays) for key, item in body}
    if tag == "tuple":
        return tuple(_decode(item, arrays) for item in body)
    if tag == "array":
        return arrays[body]
    if tag == "scalar":
        return arrays[body][()]
    if tag == "bytes":
        return arrays[body].tobytes()
    if tag == "float":
        return float(body)
    raise ValueError(f"unknown tag {tag!r} in the manifest")


def _write_arrays(path: pathlib.Path, arrays: list[NDArray[Any]]) -> list[dict[str, Any]]:
    """Write the arrays' bytes, synced to disk, and return their records for the manifest."""
    records: list[dict[str, Any]] = []
    with open(path, "wb") as file:
        end = 0
        for array in arrays:
            start = end + -end % _ALIGNMENT_BYTES
            file.write(bytes(start - end))
            raw = array.reshape(-1).view(np.uint8)
            end = start + raw.size
            place = {"offset": start, "crc32": zlib.crc32(raw.data)}
            records.append({"dtype": array.dtype.str, "shape": list(array.shape), **place})
            file.write(raw.data)
        sync(file)
    return records


def _read_arrays(path: pathlib.Path, records: list[dict[str, Any]]) -> list[NDArray[Any]]:
    """Read and check what ``_write_arrays`` wrote; lengths are checked before allocation."""
    arrays = []
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        for number, record in enumerate(records):
            dtype, shape = np.dtype(record["dtype"]), tuple(record["shape"])
            num_bytes = math.prod(shape) * dtype.itemsize
            if dtype.kind not in _ARRAY_KINDS or min(shape, default=0) < 0:
                raise ValueError(f"array {number} has dtype {dtype} and shape {shape}")
            if record["offset"] + num_bytes > file_bytes:
                raise ValueError(f"{path.name} ends within array {number}: {file_bytes} bytes")
            raw = np.empty(num_bytes, np.uint8)
            file.seek(record["offset"])
            if file.readinto(raw.data) != num_bytes or zlib.crc32(raw.data) != record["crc32"]:
                raise ValueError(f"the checksum of array {number} does not match its bytes")
            arrays.append(raw.view(dtype).reshape(shape))
    return arrays


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _write_manifest(path: pathlib.Path, content: dict[str, Any]) -> None:
    text = _canonical(content)
    with open(path, "wb") as file:
        file.write(b'{"crc32":%d,"content":%b}\n' % (zlib.crc32(text), text))
        sync(file)


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
    document = json.loads(path.read_bytes())
    content: dict[str, Any] = document["content"]
    if zlib.crc32(_canonical(content)) != document["crc32"]:
        raise ValueError(f"the checksum of {path.name} does not match its text")
    if content["format"] != FORMAT_VERSION:  # whole: going back to an older one would lose it
        raise ConfigurationError(
            f"{path.parent} is a checkpoint of format {content['format']!r}, and this version of "
            f"Thinwire reads {FORMAT_VERSION}; go on with the one that wrote it, or --overwrite."
        )
    return content
