"""AdaComp's data layout: 1,200 files of training images, 200 of test images, and label files.

The module `adacomp` reads and writes data files with or without IDX headers. AdaComp's code reads
files without IDX headers, even though the file names end in idx3-ubyte and idx1-ubyte. ``python -m
thinwire.data.write_adacomp`` converts a known data set to this layout.

Source: AdaComp's published code. Differences: if the number of workers does not divide 1,200, the
original code leaves the last files unused; in this module the first workers get one file more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.data import partition
from thinwire.data.readers import idx
from thinwire.ops.types import ConfigurationError

NUM_FILES = {"train": 1200, "test": 200}
_FOLDERS = {"train": "training_set", "test": "test_set"}


def path_of(data_dir: Path, part: str, kind: str, number: int) -> Path:
    """Return the path of a file of "images" or "labels" in AdaComp's layout, numbered from 0."""
    ending = "idx3-ubyte" if kind == "images" else "idx1-ubyte"
    return data_dir / f"{_FOLDERS[part]}_{kind}" / f"{part}-{kind}-{number:05d}.{ending}"


def holds(data_dir: Path, part: str) -> bool:
    """Return True if the folder holds images of the training or test part in AdaComp's layout."""
    return (data_dir / f"{_FOLDERS[part]}_images").is_dir()


def read(
    data_dir: Path, part: str, image_size: int, image_depth: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Read the images and labels of the training or test part, in the order of the file numbers.

    Args:
        data_dir: The folder that holds ``training_set_images``, ``training_set_labels``,
            ``test_set_images`` and ``test_set_labels``.
        part: Part of the data set, "train" or "test".
        image_size: Height and width of an image in pixels.
        image_depth: Number of channels of an image.

    Returns:
        Images [N, height, width, channels], the class of each image [N], and the index of the first
        example of each file, then N, [files + 1].

    Raises:
        ConfigurationError: A data file is missing or has a wrong size, or the numbers of images and
            labels in a pair of files differ.
    """
    shape = (image_size, image_size, image_depth)
    images: list[NDArray[np.uint8]] = []
    labels: list[NDArray[np.uint8]] = []
    for number in range(NUM_FILES[part]):
        paths = [path_of(data_dir, part, kind, number) for kind in ("images", "labels")]
        images.append(_read_records(paths[0], shape))
        labels.append(_read_records(paths[1], ()))
        if len(images[-1]) != len(labels[-1]):
            raise ConfigurationError(
                f"{paths[0]} holds {len(images[-1])} images but {paths[1]} holds "
                f"{len(labels[-1])} labels; expected one label per image. Write both files again."
            )
    offsets = np.cumsum([0] + [len(piece) for piece in labels], dtype=np.int64)
    return np.concatenate(images), np.concatenate(labels), offsets


def write(
    out_dir: Path,
    part: str,
    images: NDArray[np.uint8],
    labels: NDArray[np.integer],
    headers: bool = False,
) -> None:
    """Write the training or test part of a data set in AdaComp's layout.

    If the number of examples is not a multiple of the number of files, each of the first files gets
    one example more than the later files.

    Args:
        out_dir: Folder to write to; created if missing.
        part: Part of the data set, "train" or "test".
        images: Images to write, [N, height, width, channels] uint8.
        labels: Label of each image, [N] integers in 0..255.
        headers: True to start each file with an IDX header; AdaComp's code cannot read files with
            IDX headers.

    Raises:
        ConfigurationError: There are fewer examples than files.
    """
    for kind in ("images", "labels"):
        path_of(out_dir, part, kind, 0).parent.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_FILES[part]):
        owned = partition.equal_range(
            len(labels), NUM_FILES[part], number + 1, f"{part} examples", "files"
        )
        chosen = slice(owned.start, owned.stop)
        pictures = images[chosen, ..., 0] if images.shape[-1] == 1 else images[chosen]
        classes = labels[chosen].astype(np.uint8)
        _write_records(path_of(out_dir, part, "images", number), pictures, headers)
        _write_records(path_of(out_dir, part, "labels", number), classes, headers)


def _read_records(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the records (images or labels) of a file with or without IDX header: [N, *shape]
    uint8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"Data file {path} cannot be read: {error}. Expected all files of AdaComp's layout; "
            "write them again with `python -m thinwire.data.write_adacomp`."
        ) from error
    record = int(np.prod(shape, dtype=np.int64))
    content = content[_header_length(content, shape, record) :]
    if len(content) == 0 or len(content) % record:
        raise ConfigurationError(
            f"Data file {path} has {len(content)} bytes; expected records of {record} bytes (shape "
            f"{shape}), or an IDX header and then these records. Correct --image_size and "
            "--image_depth, or write the file again."
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, *shape)


def _header_length(content: bytes, shape: tuple[int, ...], record: int) -> int:
    """Return the length of the IDX header at the start of a file's content; 0 without a header."""
    shapes = [shape] if not shape or shape[-1] != 1 else [shape[:-1], shape]
    for tail in shapes:
        length = 4 + 4 * (1 + len(tail))
        candidate = idx.header((max(0, len(content) - length) // record, *tail))
        if content.startswith(candidate) and (len(content) - length) % record == 0:
            return length
    return 0


def _write_records(path: Path, array: NDArray[np.uint8], headers: bool) -> None:
    if headers:
        idx.write(path, array)
    else:
        path.write_bytes(np.ascontiguousarray(array).tobytes())
