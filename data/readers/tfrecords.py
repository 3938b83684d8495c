"""Where the images lie in TFRecord files of tf.train.Example, and their labels.

Files are scanned once: of each record the framing and the names of its features are read, and the
image itself is stepped over. What is found is kept beside the files if they lie where one may
write, so that the next process need not scan.

Source: the framing and the messages ``Example``, ``Features`` and ``Feature`` as TensorFlow
documents them. Difference: the checksum of a record's length is checked, that of its content is
not, because most of it is never read here.
"""

from __future__ import annotations

import dataclasses
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from absl import logging
from numpy.typing import NDArray

from thinwire.ops.crc32c import masked_crc32c
from thinwire.ops.types import ConfigurationError

IMAGE, LABEL = b"image/encoded", b"image/class/label"
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_WINDOW_BYTES = 1024  # the features besides the image, mostly
_READERS = 8
_NAME = r"(?:.*[-_.])?(?:{parts})(?:\.tfrecords?)?-(\d+)-of-(\d+)(?:\.tfrecords?)?"


@dataclasses.dataclass(frozen=True)
class RecordIndex:
    """All records of some files, in order."""

    starts: NDArray[np.int64]  # [N] int64, first byte of the image in its file
    lengths: NDArray[np.int64]  # [N] int64, bytes of the image
    labels: NDArray[np.int64]  # [N] int64, as stored
    file_offsets: NDArray[np.int64]  # [files + 1] int64, first record of each file, then N


class _InvalidTfRecord(ValueError):
    """The bytes are not what they should be."""


def files_of(folders: Sequence[Path], parts: Sequence[str]) -> list[Path]:
    """Return the files NAME-00000-of-00010 ... of a part, from the first folder that has any.

    Args:
        folders: Where to look.
        parts: What a part is called, such as ("val", "validation").

    Raises:
        ConfigurationError: Some of them are missing.
    """
    pattern = re.compile(_NAME.format(parts="|".join(parts)))
    for folder in folders:
        found = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if (match := pattern.fullmatch(path.name)) and path.is_file():
                found[int(match[1])] = path, int(match[2])
        if found:
            total = max(of for _, of in found.values())
            if set(found) != set(range(total)) or len({of for _, of in found.values()}) > 1:
                missing = sorted(set(range(total)) - set(found))
                raise ConfigurationError(
                    f"{folder} holds {len(found)} files such as {found[min(found)][0].name}; "
                    f"expected all of 0 to {total - 1} of one set"
                    f"{f', and {missing[0]} is missing' if missing else ''}. Copy all there."
                )
            return [found[number][0] for number in range(total)]
    return []


def index(files: Sequence[Path]) -> RecordIndex:
    """Return where the images of some files lie, as kept beside them or by reading them.

    Raises:
        ConfigurationError: A file cannot be read, is truncated or damaged, or a record has no
            image or label.
    """
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    kept = files[0].with_name(f".thinwire-{files[0].name}.index.npz")
    if (known := _load(kept, state)) is not None:
        return known
    logging.info("data: looking for the images in %d files such as %s", len(files), files[0])
    with ThreadPoolExecutor(_READERS) as readers:
        tables = list(readers.map(_scan, files))
    starts, lengths, labels = np.concatenate(tables, axis=1)
    counts = [table.shape[1] for table in tables]
    found = RecordIndex(starts, lengths, labels, np.cumsum([0, *counts], dtype=np.int64))
    _save(kept, state, found)
    return found


def _scan(path: Path) -> NDArray[np.int64]:
    """Return starts, lengths and labels of one file: [3, n] int64."""
    rows: list[tuple[int, int, int]] = []
    try:
        with path.open("rb", buffering=_WINDOW_BYTES) as stream:
            size = os.fstat(stream.fileno()).st_size
            position = 0
            while position < size:
                stream.seek(position)
                length = _length(stream.read(_HEADER_BYTES))
                begin = position + _HEADER_BYTES
                position = begin + length + _FOOTER_BYTES
                if position > size:
                    raise _InvalidTfRecord(
                        f"it ends {position - size} bytes before the record does"
                    )
                stream.seek(begin)
                rows.append(_example(stream, begin + length))
    except (OSError, _InvalidTfRecord) as error:
        raise ConfigurationError(
            f"Data file {path}, record {len(rows)}: {error}. Expected uncompressed TFRecords with "
            f"{IMAGE.decode()} and {LABEL.decode()} in each. Write or fetch the file again."
        ) from error
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


def _length(header: bytes) -> int:
    """Return the length a record's header announces."""
    if len(header) < _HEADER_BYTES:
        raise _InvalidTfRecord(f"it ends after {len(header)} of {_HEADER_BYTES} bytes of a header")
    length, checksum = struct.unpack("<QI", header)
    if checksum != masked_crc32c(header[:8]):
        raise _InvalidTfRecord("the checksum of its length is wrong")
    return int(length)


def _example(stream: BinaryIO, stop: int) -> tuple[int, int, int]:
    """Return the image's first byte, its length, and the label of the Example up to `stop`."""
    image: tuple[int, int] | None = None
    label: int | None = None
    for key, value in _features(stream, stop):
        if key == IMAGE:
            image = _first(stream, value, 1)
        elif key == LABEL:
            stream.seek(_first(stream, value, 3)[0])
            label = _varint(stream)
        if image is not None and label is not None:
            return image[0], image[1] - image[0], label - (label >> 63 << 64)
    raise _InvalidTfRecord(f"it has no {(IMAGE if image is None else LABEL).decode()}")


def _features(stream: BinaryIO, stop: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Yield name and place of the value of each feature."""
    for _, begin, end in _fields(stream, stop, 1):
        stream.seek(begin)
        for _, entry, entry_end in _fields(stream, end, 1):
            stream.seek(entry)
            parts = {number: (at, to) for number, at, to in _fields(stream, entry_end, 1, 2)}
            if len(parts) == 2:
                stream.seek(parts[1][0])
                yield stream.read(min(parts[1][1] - parts[1][0], 100)), parts[2]


def _first(stream: BinaryIO, value: tuple[int, int], kind: int) -> tuple[int, int]:
    """Return the place of the first item of a Feature's list of this kind."""
    stream.seek(value[0])
    for _, begin, end in _fields(stream, value[1], kind):
        stream.seek(begin)
        for _, item, item_end in _fields(stream, end, 1):
            if item_end > item:
                return item, item_end
    raise _InvalidTfRecord("its image or label is empty, or of another type")


def _fields(stream: BinaryIO, stop: int, *wanted: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, first byte and end of the wanted fields of a message that ends at `stop`."""
    while stream.tell() < stop:
        tag = _varint(stream)
        wire_type = tag & 7
        if wire_type == 2:
            length = _varint(stream)
            begin = stream.tell()
            end = begin + length
        elif wire_type == 0:
            begin = stream.tell()
            _varint(stream)
            end = stream.tell()
        elif wire_type in (1, 5):
            begin = stream.tell()
            end = begin + (8 if wire_type == 1 else 4)
        else:
            raise _InvalidTfRecord(f"a field has the wire type {wire_type}")
        if end > stop:
            raise _InvalidTfRecord("a field is longer than what holds it")
        if tag >> 3 in wanted:
            yield tag >> 3, begin, end
        stream.seek(end)


def _varint(stream: BinaryIO) -> int:
    """Return the whole number of up to ten bytes that comes next."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            raise _InvalidTfRecord("it ends within a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF
    raise _InvalidTfRecord("a number has more than ten bytes")


# -- what is kept -----------------------------------------------------------------------------

_State = list[tuple[str, int, int]]  # name, bytes and time of change of each file


def _load(path: Path, state: _State) -> RecordIndex | None:
    """Return the index kept for files in this state; None if there is none that can be used."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            if kept["state"].tolist() != [repr(row) for row in state]:
                return None
            known = RecordIndex(
                **{field.name: kept[field.name] for field in dataclasses.fields(RecordIndex)}
            )
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - a damaged archive may raise anything, MemoryError too
        logging.info("data: %s is not used: %s", path, error or type(error).__name__)
        return None
    return known if _is_sound(known, state) else None


def _is_sound(known: RecordIndex, state: _State) -> bool:
    """Return whether every image lies within its file."""
    arrays = (known.starts, known.lengths, known.labels, known.file_offsets)
    if any(array.dtype != np.int64 or array.ndim != 1 for array in arrays):
        return False
    counts = np.diff(known.file_offsets)
    if len(counts) != len(state) or (counts < 0).any() or known.file_offsets[0] != 0:
        return False
    if any(len(array) != counts.sum() for array in arrays[:3]):
        return False
    sizes = np.repeat([size for _, size, _ in state], counts)
    fits = (known.starts >= 0) & (known.lengths > 0) & (known.lengths <= sizes - known.starts)
    return bool(fits.all())


def _save(path: Path, state: _State, found: RecordIndex) -> None:
    """Write the index whole or not at all; a folder that may not be written to is no error."""
    try:
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-", suffix=".npz")
        with os.fdopen(descriptor, "wb") as out:
            np.savez(out, state=[repr(row) for row in state], **vars(found))
        os.replace(partial, path)
    except OSError as error:
        logging.info("data: the index is not kept: %s", error)
