"""An index of the images in TFRecord files of tf.train.Example, and their labels.

A worker reads single images in its own order, and tf.data reads a file only from its start. So the
files are scanned once: `tf.data.TFRecordDataset` reads the records and checks their contents'
checksums, `tf.train.Example` parses them, and the index has the place and length of each image, and
its label. It is kept beside the files if they lie where one may write, so that the next process
need not scan.

The framing (length, checksum, content, checksum) is walked here before tf.data opens a file, for
three reasons: tf.data gives no offsets; it ends without an error where a file stops within a
record's header; and a header that announces more bytes than the memory holds ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from absl import logging
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from thinwire.ops.crc32c import masked_crc32c
from thinwire.ops.types import ConfigurationError

IMAGE, LABEL = "image/encoded", "image/class/label"
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_BUFFER_BYTES = 1 << 18  # the default of tf.data, which logs a line where none is given
_HEAD_BYTES = 64
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
    import tensorflow as tf

    contents: list[int] = []
    rows: list[tuple[int, int, int]] = []
    with _explained(path, contents):
        _walk(path, contents)
    with _explained(path, rows):
        records = tf.data.TFRecordDataset(os.fsencode(path), buffer_size=_BUFFER_BYTES)
        for start, record in zip(contents, records.as_numpy_iterator(), strict=True):
            image, label = _image_and_label(record)
            rows.append((start + _place(image, record), len(image), label))
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


@contextlib.contextmanager
def _explained(path: Path, done: Sized) -> Iterator[None]:
    """Name the file in errors, and the record that comes after those that are done."""
    import tensorflow as tf

    try:
        yield
    except (OSError, ValueError, DecodeError, tf.errors.OpError) as error:
        reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", getattr(error, "message", str(error)))
        raise ConfigurationError(
            f"Data file {path}, record {len(done)}: {reason}. Expected uncompressed TFRecords with "
            f"{IMAGE} and {LABEL} in each. Write or fetch the file again."
        ) from error


def _walk(path: Path, contents: list[int]) -> None:
    """Append the first byte of each record's content."""
    with path.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        position = 0
        while position < size:
            stream.seek(position)
            length = _length(stream.read(_HEADER_BYTES))
            start = position + _HEADER_BYTES
            position = start + length + _FOOTER_BYTES
            if position > size:
                raise _InvalidTfRecord(f"it ends {position - size} bytes before the record does")
            contents.append(start)


def _length(header: bytes) -> int:
    """Return the length a record's header announces."""
    if len(header) < _HEADER_BYTES:
        raise _InvalidTfRecord(f"it ends after {len(header)} of {_HEADER_BYTES} bytes of a header")
    length, checksum = struct.unpack("<QI", header)
    if checksum != masked_crc32c(header[:8]):
        raise _InvalidTfRecord("the checksum of its length is wrong")
    return int(length)


def _image_and_label(record: bytes) -> tuple[bytes, int]:
    """Return the encoded image and the label of an Example."""
    import tensorflow as tf

    features = tf.train.Example.FromString(record).features.feature
    for name in (IMAGE, LABEL):
        if name not in features:
            raise _InvalidTfRecord(f"it has no {name}")
    images, labels = features[IMAGE].bytes_list.value, features[LABEL].int64_list.value
    if not images or not images[0] or not labels:
        raise _InvalidTfRecord("its image or label is empty, or of another type")
    return images[0], labels[0]


def _place(image: bytes, record: bytes) -> int:
    """Return the first byte of an image in its record.

    Its first bytes are searched for, because the search for all of it takes as long as reading the
    record; only where they occur before the image, all of it is searched for.
    """
    place = record.index(image[:_HEAD_BYTES])
    return place if record.startswith(image, place) else record.index(image)


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
