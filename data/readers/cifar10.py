"""Reader of the binary version of CIFAR-10: batch files in a folder, or the unextracted archive.

A record of CIFAR-10 is a label byte and 3,072 bytes of pixels: a red, a green and a blue plane of
32 x 32. The "Python version" of CIFAR-10 holds the images of the binary version in pickles. Loading
a pickle can call any function, so the reader of CIFAR-10 does not read pickles; `pickled_in` finds
pickles for an error message.

Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import contextlib
import hashlib
import tarfile
import zlib
from pathlib import Path

import numpy as np
from absl import logging
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
NUM_CLASSES = 10
_SIZE, _DEPTH = 32, 3
_RECORD_BYTES = 1 + _SIZE * _SIZE * _DEPTH
_NUM_PUBLISHED = {"train": 50_000, "test": 10_000}
_NAMES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}
_GZIP = b"\x1f\x8b"
_FOLDER, _ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
#: Names of files and folders of CIFAR-10's Python version, including Keras' names for them.
_PICKLED = (
    "data_batch_1",
    "test_batch",
    "cifar-10-batches-py",
    "cifar-10-batches-py-target",
    "cifar-10-python.tar.gz",
    "cifar-10-batches-py.tar.gz",
)
#: Size limit of a batch file in bytes. A batch file has 31 MB, and without the limit a wrong file
#: could fill the memory before the reader rejects the file.
_MOST_BYTES = 1 << 27

#: Records of CIFAR-10, [N, 3073] uint8: the label and the pixels of each image.
_Records = NDArray[np.uint8]


def find(place: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int32]] | None:
    """Return one part of CIFAR-10 from a folder, or None if the folder has no batch of the part.

    Args:
        place: Folder that contains CIFAR-10's batch files, the extracted folder of batches, or the
            archive.
        part: Part of CIFAR-10, "train" or "test".

    Returns:
        Images uint8 [N, 32, 32, 3] and labels int32 [N]; None if there is no batch of the part.

    Raises:
        ConfigurationError: Some but not all batch files of CIFAR-10 exist, or a batch file is
            damaged.
    """
    names = _NAMES[part]
    for folder in (place, place / _FOLDER):
        if any((folder / name).is_file() for name in names):
            return _joined([_read_file(folder / name) for name in names], part, folder)
    archive = place / _ARCHIVE
    if archive.is_file():
        return _joined(_read_archive(archive, names), part, archive)
    return None


def pickled_in(place: Path) -> Path | None:
    """Return a path in ``place`` that holds CIFAR-10's Python version; None if no path does."""
    return next((place / name for name in _PICKLED if (place / name).exists()), None)


def names_of(part: str) -> str:
    """Return the names of CIFAR-10's batch files of the training or test part, for error
    messages.
    """
    first, last = _NAMES[part][0], _NAMES[part][-1]
    return f"{first if first == last else f'{first} to {last}'}, or {_ARCHIVE}"


def check_archive(content: bytes) -> None:
    """Raise OSError if a downloaded archive of CIFAR-10 does not have the published SHA-256."""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise OSError(f"{ADDRESS} gave another file than the published one (SHA-256)")


def _read_file(path: Path) -> _Records:
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"Data file {path} cannot be read: {error}. Expected all batches of CIFAR-10 in one "
            "folder; fetch the missing batch, or unpack the archive again."
        ) from error
    return _records(content, str(path))


def _read_archive(path: Path, names: list[str]) -> list[_Records]:
    """Read CIFAR-10's batches from the archive without writing files, so that paths in the archive
    are harmless.

    The archive of CIFAR-10 is compressed by gzip, or not compressed, because some browsers
    decompress downloads. The reader rejects other compressions than gzip, because a few bytes of
    LZMA can expand to gigabytes.
    """
    records: dict[str, _Records] = {}
    try:
        with path.open("rb") as stream:
            is_packed = stream.read(len(_GZIP)) == _GZIP
        with tarfile.open(path, "r:gz" if is_packed else "r:") as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and name in names and name not in records:
                    opened = archive.extractfile(member)
                    with contextlib.closing(opened) if opened else contextlib.nullcontext():
                        content = opened.read(_MOST_BYTES + 1) if opened else b""
                    records[name] = _records(content, f"{path} ({member.name})")
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ConfigurationError(
            f"Data file {path} cannot be read: {error}. Expected the published archive. Delete "
            "the file and download it again."
        ) from error
    if missing := [name for name in names if name not in records]:
        raise ConfigurationError(
            f"Data file {path} does not hold {', '.join(missing)}. Expected the published "
            "archive. Delete the file and download it again."
        )
    return [records[name] for name in names]


def _records(content: bytes, where: str) -> _Records:
    """Check the content of one CIFAR-10 batch file and return its records."""
    if len(content) > _MOST_BYTES:
        raise ConfigurationError(
            f"Data file {where} has more than {_MOST_BYTES} bytes; expected a batch of CIFAR-10, "
            "about 31 MB. The file is not a batch: fetch the batch again."
        )
    if not content or len(content) % _RECORD_BYTES:
        raise ConfigurationError(
            f"Data file {where} has {len(content)} bytes; expected records of {_RECORD_BYTES} "
            "bytes (label and 3 x 32 x 32 pixels). The file is truncated or not a batch: fetch it "
            "again."
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD_BYTES)
    if (highest := records[:, 0].max()) >= NUM_CLASSES:
        raise ConfigurationError(
            f"Data file {where} holds the label {highest}; expected 0 to {NUM_CLASSES - 1}. The "
            "file is damaged or not a batch: fetch it again."
        )
    return records


def _joined(
    batches: list[_Records], part: str, where: Path
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Concatenate batches of CIFAR-10 records; return images (channels last) and labels."""
    records = np.concatenate(batches)
    labels = records[:, 0].astype(np.int32)
    if len(labels) != _NUM_PUBLISHED[part]:
        logging.warning(
            "data: %s holds %d %s examples; the published data set has %d",
            where,
            len(labels),
            part,
            _NUM_PUBLISHED[part],
        )
    logging.info("data: read %d %s examples from %s", len(labels), part, where)
    images = records[:, 1:].reshape(-1, _DEPTH, _SIZE, _SIZE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels
