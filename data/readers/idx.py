"""Strict reader and writer of IDX files, the format of MNIST and Fashion-MNIST.

An IDX file consists of two zero bytes, a type byte, the number of dimensions, each dimension as a
big-endian uint32, then the data in row-major order. The module `idx` supports only IDX files of
unsigned bytes (type 8). The name of an IDX file that is compressed by gzip ends in ``.gz``.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError

UNSIGNED_BYTE = 8
_READ_BYTES = 1 << 24


def read(path: Path, ranks: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the array of an IDX file.

    Args:
        path: Path of the IDX file, which is decompressed if the name ends in ``.gz``.
        ranks: Accepted numbers of dimensions of the array: (1,) for labels, (3, 4) for images.

    Returns:
        A writable uint8 array with the shape of the header.

    Raises:
        ConfigurationError: The IDX file is missing, unreadable, truncated, too long, or has another
            magic number. The error's text names the file, the fault and the expected content.
    """
    try:
        with _open(path) as stream:
            shape = _read_header(stream, path, ranks)
            return _read_body(stream, path, shape)
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
    ) as error:  # no array can have the shape in the file's header, which raises ValueError
        raise ConfigurationError(
            f"Data file {path} cannot be read: {error}. Expected "
            f"{'a gzip-compressed' if path.suffix == '.gz' else 'an uncompressed'} IDX file. "
            "Fetch or unpack it again."
        ) from error


def read_pair(images_path: Path, labels_path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images of one IDX file and the labels of another IDX file.

    Returns:
        Images uint8 [N, height, width] or [N, height, width, channels], and labels uint8 [N].

    Raises:
        ConfigurationError: ``read`` rejects a file, or the numbers of images and labels differ.
    """
    images = read(images_path, ranks=(3, 4))
    labels = read(labels_path, ranks=(1,))
    if len(images) != len(labels):
        raise ConfigurationError(
            f"{images_path} holds {len(images)} images but {labels_path} holds {len(labels)} "
            f"labels; expected one label for each image. Take both files from the same data set."
        )
    return images, labels


def write(path: Path, array: NDArray[np.uint8]) -> None:
    """Write a uint8 array as an IDX file; compress the file if the name ends in ``.gz``.

    Equal arrays give byte-identical IDX files, because the gzip header contains neither a name nor
    a time.

    Raises:
        ValueError: The array is not uint8, or its rank is not in 1..255.
    """
    if array.dtype != np.uint8 or not 1 <= array.ndim <= 255:
        raise ValueError(
            f"an IDX file holds uint8 arrays of rank 1 to 255, not {array.dtype} {array.shape}"
        )
    content = header(array.shape) + np.ascontiguousarray(array).tobytes()
    if path.suffix == ".gz":
        content = gzip.compress(content, compresslevel=9, mtime=0)
    path.write_bytes(content)


def header(shape: tuple[int, ...]) -> bytes:
    """Return the IDX header of an array of unsigned bytes with this shape."""
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, UNSIGNED_BYTE, len(shape), *shape)


def _open(path: Path) -> BinaryIO:
    # GzipFile has all methods of BinaryIO, but is not declared as one.
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _read_header(stream: BinaryIO, path: Path, ranks: tuple[int, ...]) -> tuple[int, ...]:
    magic = stream.read(4)
    accepted = [bytes((0, 0, UNSIGNED_BYTE, rank)) for rank in ranks]
    if magic not in accepted:
        raise ConfigurationError(
            f"Data file {path} starts with the bytes {magic.hex(' ') or '(none)'}; expected the "
            f"IDX magic number {' or '.join(value.hex(' ') for value in accepted)}. The file is "
            "not the IDX file that its name states: fetch it again, or correct --data_dir."
        )
    rank = magic[3]
    sizes = stream.read(4 * rank)
    if len(sizes) < 4 * rank:
        raise ConfigurationError(
            f"Data file {path} is truncated: its header has {4 + len(sizes)} bytes, expected "
            f"{4 + 4 * rank}. Fetch it again."
        )
    return struct.unpack(f">{rank}I", sizes)


def _read_body(stream: BinaryIO, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    expected = math.prod(shape)
    content = bytearray()
    # The IDX file is read in pieces, because a corrupt header may announce more bytes than the
    # memory holds.
    while len(content) <= expected:
        piece = stream.read(min(_READ_BYTES, expected + 1 - len(content)))
        if not piece:
            break
        content += piece
    if len(content) != expected:
        amount = f"only {len(content)}" if len(content) < expected else "more"
        raise ConfigurationError(
            f"Data file {path} has {amount} bytes of data; its header announces shape {shape}, "
            f"that is {expected} bytes. The file is truncated or corrupt: fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
