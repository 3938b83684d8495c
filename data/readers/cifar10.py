"""CIFAR-10 in its published formats: binary or pickled batches, in a folder or still packed.

A binary record is a label byte and 3,072 bytes of pixels: red, green, blue planes of 32 x 32. A
pickled batch is a dict of ``data`` ([N, 3072] uint8, the same planes) and ``labels``.

A pickle is a program: it may name any function and have it called. `load_dict` therefore reads
pickles of plain values and numpy arrays without running anything that they name: the names that an
array needs stand for plain records, which are checked and made into an array afterwards; every
other name is rejected.

Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from absl import logging
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError

_UNSIGNED_BYTE = (b"u1", "u1")


class _DataType:
    """Stands for numpy.dtype: keeps its name."""

    def __init__(self, name: Any, *unused: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and layout: single bytes have none."""


class _ArrayName:
    """Stands for numpy.ndarray, which a pickle names but does not call."""

    def __new__(cls) -> _ArrayName:
        raise pickle.UnpicklingError("it calls numpy.ndarray, which arrays do not need")


@dataclasses.dataclass
class _Array:
    """Stands for an array; pickles first make an empty one, then hand it its state."""

    values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        """Take (version, shape, dtype, is in Fortran order, bytes).

        Raises:
            UnpicklingError: Of another form, or not of unsigned bytes.
        """
        try:
            _, shape, kind, is_fortran, content = state
            sizes = tuple(int(size) for size in shape)
        except (TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"it holds an array of another form: {error}") from error
        if not isinstance(kind, _DataType) or kind.name not in _UNSIGNED_BYTE:
            raise pickle.UnpicklingError("it holds an array of something else than unsigned bytes")
        if isinstance(content, str):  # how Python 3 reads a text of Python 2 by default
            content = content.encode("latin1")
        if not isinstance(content, bytes) or min(sizes, default=0) < 0:
            raise pickle.UnpicklingError(f"it holds an array of shape {sizes} without its bytes")
        if math.prod(sizes) != len(content):
            raise pickle.UnpicklingError(
                f"it holds an array of shape {sizes} with {len(content)} bytes"
            )
        flat = np.frombuffer(content, dtype=np.uint8)
        self.values = flat.reshape(sizes, order="F" if is_fortran else "C")


def _reconstruct(*unused: Any) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it encodes a text as {encoding!r:.40}; expected latin1")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _ArrayName,
    ("numpy", "dtype"): _DataType,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle._Unpickler):
    """In Python: the one in C allocates gigabytes where a few bytes announce so many."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return the record that stands for an admitted name."""
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data needs")
        return _ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to elsewhere."""
        raise pickle.UnpicklingError(f"it refers to {pid!r:.40} outside of it")


def load_dict(stream: BinaryIO, where: str) -> dict[bytes, Any]:
    """Return the dict of a pickle by Python 2 or 3, its own arrays made real.

    Args:
        stream: The pickle; what follows it is not read.
        where: Names it in errors.

    Returns:
        Keys as bytes; values as they are, arrays uint8.

    Raises:
        ConfigurationError: Not a pickle, not a dict, damaged, or it names a function or class that
            plain data does not need.
    """
    try:
        content = _Unpickler(stream, encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not a dict")
        return {
            key.encode("latin1") if isinstance(key, str) else key: (
                value.values if isinstance(value, _Array) else value
            )
            for key, value in content.items()
        }
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigurationError(
            f"Data file {where} cannot be read: {error or type(error).__name__}. Expected a "
            "pickled dict of numbers, texts and arrays of bytes. Fetch it again, from where it is "
            "published."
        ) from error


ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
NUM_CLASSES = 10
_SIZE, _DEPTH = 32, 3
_PIXELS = _SIZE * _SIZE * _DEPTH
_NUM_PUBLISHED = {"train": 50_000, "test": 10_000}
_STEMS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
#: A batch has 31 MB; a file of another kind should not fill the memory before it is refused.
_MOST_BYTES = 1 << 27

#: [N, 3072] uint8 pixels, [N] labels.
Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _of_binary(content: bytes, where: str) -> Batch:
    if not content or len(content) % (1 + _PIXELS):
        raise ConfigurationError(
            f"Data file {where} has {len(content)} bytes; expected records of {1 + _PIXELS} bytes "
            "(label and 3 x 32 x 32 pixels). It is truncated or of another kind: fetch it again."
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _of_pickle(content: bytes, where: str) -> Batch:
    batch = load_dict(io.BytesIO(content), where)
    pixels, labels = batch.get(b"data"), batch.get(b"labels")
    numbers = labels if isinstance(labels, list) else []
    is_fit = isinstance(pixels, np.ndarray) and pixels.shape == (len(numbers), _PIXELS)
    if not is_fit or not numbers or any(type(label) is not int for label in numbers):
        raise ConfigurationError(
            f"Data file {where} holds data {_shape(pixels)} and {_shape(labels)} labels; expected "
            f"bytes of shape (N, {_PIXELS}) and N whole numbers. Fetch it again."
        )
    if not 0 <= min(numbers) <= max(numbers) < NUM_CLASSES:
        _refuse_label(where, min(numbers) if min(numbers) < 0 else max(numbers))
    return np.asarray(pixels), np.array(numbers, np.int64)


def _shape(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return str(value.shape)
    return str(len(value)) if isinstance(value, list) else f"({type(value).__name__})"


@dataclasses.dataclass(frozen=True)
class _Format:
    """How one of the two published forms is named and read."""

    folder: str
    archives: tuple[str, ...]
    suffix: str
    read: Callable[[bytes, str], Batch]


_FORMATS = (
    _Format("cifar-10-batches-bin", ("cifar-10-binary.tar.gz",), ".bin", _of_binary),
    _Format(
        "cifar-10-batches-py",
        ("cifar-10-python.tar.gz", "cifar-10-batches-py.tar.gz"),
        "",
        _of_pickle,
    ),
)


def find(place: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int32]] | None:
    """Return one part from a folder that holds the batches, their folder, or the archive.

    Args:
        place: The folder.
        part: "train" or "test".

    Returns:
        Images uint8 [N, 32, 32, 3] and labels int32 [N]; None where there is no batch of it.

    Raises:
        ConfigurationError: A batch is missing beside others, or damaged.
    """
    for form in _FORMATS:
        names = [stem + form.suffix for stem in _STEMS[part]]
        for folder in (place, place / form.folder):
            if any((folder / name).is_file() for name in names):
                batches = [_read_file(folder / name, form) for name in names]
                return _joined(batches, part, str(folder))
        for archive in (place / name for name in form.archives):
            if archive.is_file():
                return _joined(_read_archive(archive, form, names), part, str(archive))
    return None


def names_of(part: str) -> str:
    """Return the files of a part, for messages."""
    first, last = _STEMS[part][0], _STEMS[part][-1]
    both = first if first == last else f"{first} to {last[-1]}"
    archives = " or ".join(form.archives[0] for form in _FORMATS)
    return f"{both} (pickled, or with the ending .bin), or {archives}"


def check_archive(path: Path) -> None:
    """Raise OSError if a downloaded archive is not the published one."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != SHA256:
        raise OSError(f"{ADDRESS} gave another file than the published one (SHA-256)")


def _read_file(path: Path, form: _Format) -> Batch:
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"Data file {path} cannot be read: {error}. Expected all batches of CIFAR-10 beside "
            "each other; fetch the missing one, or unpack the archive again."
        ) from error
    return form.read(_bounded(content, str(path)), str(path))


def _read_archive(path: Path, form: _Format, names: list[str]) -> list[Batch]:
    """Read members without unpacking: nothing is written, whatever paths the archive names."""
    found: dict[str, Batch] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and name in names and name not in found:
                    where = f"{path} ({member.name})"
                    stream = archive.extractfile(member)
                    with contextlib.closing(stream) if stream else contextlib.nullcontext():
                        content = stream.read(_MOST_BYTES + 1) if stream else b""
                    found[name] = form.read(_bounded(content, where), where)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ConfigurationError(
            f"Data file {path} cannot be read: {error}. Expected the archive as it is published. "
            "Delete it and fetch it again."
        ) from error
    if missing := [name for name in names if name not in found]:
        raise ConfigurationError(
            f"Data file {path} does not hold {', '.join(missing)}. Expected the archive as it is "
            "published. Delete it and fetch it again."
        )
    return [found[name] for name in names]


def _bounded(content: bytes, where: str) -> bytes:
    if len(content) > _MOST_BYTES:
        raise ConfigurationError(
            f"Data file {where} has more than {_MOST_BYTES} bytes; expected a batch of CIFAR-10, "
            "about 31 MB. It is of another kind: fetch it again."
        )
    return content


def _joined(
    batches: list[Batch], part: str, where: str
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Put batches together, channels last."""
    pixels = np.concatenate([batch[0] for batch in batches])
    labels = np.concatenate([batch[1] for batch in batches]).astype(np.int32)
    if labels.max() >= NUM_CLASSES:
        _refuse_label(where, int(labels.max()))
    if len(labels) != _NUM_PUBLISHED[part]:
        logging.warning(
            "data: %s holds %d %s examples, the published set %d",
            where,
            len(labels),
            part,
            _NUM_PUBLISHED[part],
        )
    logging.info("data: %d %s examples from %s", len(labels), part, where)
    images = pixels.reshape(-1, _DEPTH, _SIZE, _SIZE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def _refuse_label(where: str, label: int) -> None:
    raise ConfigurationError(
        f"Data file {where} holds the label {label}; expected 0 to {NUM_CLASSES - 1}. It is "
        "damaged or of another kind: fetch it again."
    )
