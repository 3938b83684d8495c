"""An index of the images and labels in TFRecord files whose records are tf.train.Examples.

A worker reads single images from TFRecord files in its own order, but tf.data reads a file only
from the start. The module `tfrecords` scans the TFRecord files once to build an index of their
images. During the scan, `tf.data.TFRecordDataset` reads the records and checks the checksums of the
contents, and `tf.train.Example` parses the contents. The index of TFRecord files contains the
position, the length and the label of each image. The index is saved in the folder of the TFRecord
files if the folder is writable, so that the next process need not scan the files.

Before tf.data opens a TFRecord file, `_walk` reads the framing (length, checksum, content,
checksum) of its records. The library tf.data returns no offsets of records, stops without an error
if a file ends inside a record's header, and ends the process if a header announces more bytes than
the memory holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import struct
from collections.abc import Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from absl import logging
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from thinwire.ops.crc32c import masked_crc32c
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import replace_file

IMAGE, LABEL = "image/encoded", "image/class/label"
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
# Size of tf.data's read buffer, its default; if no size is passed, tf.data logs a line.
_BUFFER_BYTES = 1 << 18
#: Number of bytes of an image's start that `_place` searches for first.
_HEAD_BYTES = 64
_READERS = 8
_NAME = r"(?:.*[-_.])?(?:{parts})(?:\.tfrecords?)?-(\d+)-of-(\d+)(?:\.tfrecords?)?"


@dataclasses.dataclass(frozen=True)
class RecordIndex:
    """Positions and labels of the images in TFRecord files, in the order of the records."""

    starts: NDArray[np.int64]  # offset of each image in its file, in bytes, [N] int64
    lengths: NDArray[np.int64]  # size of each encoded image in bytes, [N] int64
    labels: NDArray[np.int64]  # label of each image as stored in its record, [N] int64
    file_offsets: NDArray[np.int64]  # index of each file's first record, then N, [files + 1] int64


def files_of(folders: Sequence[Path], parts: Sequence[str]) -> list[Path]:
    """Return the files NAME-00000-of-00010 ... of the training or test part, from the first folder
    with a match.

    Args:
        folders: Folders to search for the files, in this order.
        parts: Possible names of the training or test part in file names, for example ("val",
            "validation").

    Returns:
        Paths in the order of the file numbers; empty if no folder holds a file of the part.

    Raises:
        ConfigurationError: Some TFRecord files of the training or test part are missing.
    """
    pattern = re.compile(_NAME.format(parts="|".join(parts)))
    for folder in folders:
        numbered = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if (match := pattern.fullmatch(path.name)) and path.is_file():
                numbered[int(match[1])] = path, int(match[2])
        if numbered:
            total = max(of for _, of in numbered.values())
            if set(numbered) != set(range(total)) or len({of for _, of in numbered.values()}) > 1:
                missing = sorted(set(range(total)) - set(numbered))
                raise ConfigurationError(
                    f"the folder {folder} contains {len(numbered)} TFRecord files (for example "
                    f"{numbered[min(numbered)][0].name}); expected all files 0 to {total - 1} of "
                    f"one set{f', and {missing[0]} is missing' if missing else ''}. Copy all "
                    "files there."
                )
            return [numbered[number][0] for number in range(total)]
    return []


def index(files: Sequence[Path]) -> RecordIndex:
    """Return the index of the images in TFRecord files, from the saved index or from a new scan.

    Raises:
        ConfigurationError: A TFRecord file cannot be read, is truncated or damaged, or a record has
            no image or label.
    """
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    saved = files[0].with_name(f".thinwire-{files[0].name}.index.npz")
    if (known := _load(saved, state)) is not None:
        return known
    logging.info("data: indexing images of %d TFRecord files, first %s", len(files), files[0])
    with ThreadPoolExecutor(_READERS) as readers:
        tables = list(readers.map(_scan, files))
    starts, lengths, labels = np.concatenate(tables, axis=1)
    counts = [table.shape[1] for table in tables]
    records = RecordIndex(starts, lengths, labels, np.cumsum([0, *counts], dtype=np.int64))
    _save(saved, state, records)
    return records


def _scan(path: Path) -> NDArray[np.int64]:
    """Return the start, length and label of each image in one TFRecord file: [3, n] int64."""
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
    """Add the file and the record number to errors; ``done`` has one entry per TFRecord read so
    far.
    """
    import tensorflow as tf

    try:
        yield
    except (OSError, ValueError, DecodeError, tf.errors.OpError) as error:
        reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", getattr(error, "message", str(error)))
        raise ConfigurationError(
            f"Data file {path}, record {len(done)}: {reason}. Expected uncompressed TFRecords "
            f"with the features {IMAGE} and {LABEL} in each record. Write or fetch the file again."
        ) from error


def _walk(path: Path, contents: list[int]) -> None:
    """Append the offset of the content of each TFRecord in a file to ``contents``."""
    with path.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        position = 0
        while position < size:
            stream.seek(position)
            header = stream.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES:
                raise ValueError(
                    f"the file ends after {len(header)} of {_HEADER_BYTES} bytes of a header"
                )
            length, checksum = struct.unpack("<QI", header)
            if checksum != masked_crc32c(header[:8]):
                raise ValueError("the checksum of the record's length is wrong")
            start = position + _HEADER_BYTES
            position = start + length + _FOOTER_BYTES
            if position > size:
                raise ValueError(f"the file ends {position - size} bytes before the record")
            contents.append(start)


def _image_and_label(record: bytes) -> tuple[bytes, int]:
    """Return the encoded image and the label of a serialized tf.train.Example."""
    import tensorflow as tf

    features = tf.train.Example.FromString(record).features.feature
    for name in (IMAGE, LABEL):
        if name not in features:
            raise ValueError(f"the record has no {name}")
    images, labels = features[IMAGE].bytes_list.value, features[LABEL].int64_list.value
    if not images or not images[0] or not labels:
        raise ValueError("the image or the label is empty, or of another type")
    return images[0], labels[0]


def _place(image: bytes, record: bytes) -> int:
    """Return the offset of an encoded image in its TFRecord, in bytes.

    `_place` searches the record for the first 64 bytes of the image, because a search for the whole
    image takes as long as reading the record. If the first match of 64 bytes is not the image,
    `_place` searches the record for the whole image.
    """
    place = record.index(image[:_HEAD_BYTES])
    return place if record.startswith(image, place) else record.index(image)


# -- the saved index --------------------------------------------------------------------------

#: Name, size in bytes and modification time of each TFRecord file.
_State = list[tuple[str, int, int]]


def _load(path: Path, state: _State) -> RecordIndex | None:
    """Return the saved index of TFRecord files if it is usable and the files are unchanged, else
    None.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if archive["state"].tolist() != [repr(row) for row in state]:
                return None
            known = RecordIndex(
                **{field.name: archive[field.name] for field in dataclasses.fields(RecordIndex)}
            )
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - a damaged archive may raise any exception, even MemoryError
        logging.info("data: saved index %s is not usable: %s", path, error or type(error).__name__)
        return None
    return known if _is_sound(known, state) else None


def _is_sound(known: RecordIndex, state: _State) -> bool:
    """Return True if the arrays of an index are consistent and each image is within its file."""
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
    """Save the index of TFRecord files atomically; only log an error if the folder cannot be
    written.
    """
    content = io.BytesIO()
    np.savez(content, state=[repr(row) for row in state], **vars(found))
    try:
        replace_file(path, content.getvalue())
    except OSError as error:
        logging.info("data: the index of the TFRecords is not saved: %s", error)
