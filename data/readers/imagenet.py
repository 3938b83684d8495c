"""ImageNet (ILSVRC 2012), and whatever lies in the same way: folders of classes, or TFRecords.

- Folders: ``train/n01440764/*.JPEG`` and ``val/n01440764/*.JPEG``, a folder for each class; classes
  are numbered in the order of their folders' names, as is usual.
- TFRecords: ``train-00000-of-01024`` ... and ``validation-00000-of-00128`` ..., in the folder or in
  ``train/`` and ``validation/``, with the features ``image/encoded`` and ``image/class/label``.
  Labels may count from 0 or, as the usual builders write them, from 1.

Only names, places and labels are read here; ``thinwire.data.pipeline.decode`` makes pixels of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from absl import logging
from numpy.typing import NDArray

from thinwire.data.readers import tfrecords
from thinwire.ops.types import ConfigurationError

DEPTH = 3
NAMES = {"train": ("train",), "test": ("val", "validation")}
_SUFFIXES = (".jpeg", ".jpg", ".png")
_HOW = (
    "Its owners give it to those who register at image-net.org; then name by --data_dir a folder "
    "with train/CLASS/*.JPEG and val/CLASS/*.JPEG, or with TFRecords train-00000-of-01024 and "
    "validation-00000-of-00128. To measure without files take --dataset imagenet_synthetic."
)


class EncodedImages(Protocol):
    """Encoded images and their labels.

    Attributes:
        labels: [N] int32.
        file_offsets: [files + 1] int64, where they lie many in a file.
    """

    labels: NDArray[np.int32]
    file_offsets: NDArray[np.int64] | None

    def read(self, index: int) -> bytes:
        """Return one image as it is stored; raises OSError."""

    def name(self, index: int) -> str:
        """Return where an image lies, for messages."""


def find(data_dir: str | None, part: str, nb_classes: int) -> EncodedImages:
    """Return one part.

    Args:
        data_dir: The folder; None is an error that explains how to get the set.
        part: "train" or "test".
        nb_classes: Classes that the network distinguishes.

    Raises:
        ConfigurationError: The files are missing, incomplete or damaged, or have other classes.
    """
    if data_dir is None:
        raise ConfigurationError(f"--dataset imagenet needs --data_dir. {_HOW}")
    root = Path(data_dir)
    if files := _records_of(root, part):
        found: EncodedImages = ImageRecords(files, _first_label(root, part, nb_classes))
    elif folder := _folder_of(root, part):
        classes = _classes(_folder_of(root, "train") or folder, nb_classes)
        found = ImageFolders(folder, classes)
    else:
        raise ConfigurationError(f"--data_dir {root} holds no {part} data of ImageNet. {_HOW}")
    if not len(found.labels):
        raise ConfigurationError(f"--data_dir {root} holds no {part} images. {_HOW}")
    lowest, highest = int(found.labels.min()), int(found.labels.max())
    if not 0 <= lowest <= highest < nb_classes:
        raise ConfigurationError(
            f"--data_dir {root} has classes {lowest} to {highest}; expected 0 to {nb_classes - 1}. "
            f"Set --nb_classes {highest + 1} or more."
        )
    logging.info("data: %d %s examples in %s", len(found.labels), part, root)
    return found


class ImageFolders:
    """Images in a folder for each class."""

    file_offsets: NDArray[np.int64] | None = None

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self._folder, self._classes = folder, classes
        unknown = sorted({path.name for path in _subfolders(folder)} - set(classes))
        if unknown:
            raise ConfigurationError(
                f"{folder} has the class {unknown[0]}, which is not among the {len(classes)} "
                "classes of the training set; expected the same folders in both. Remove it."
            )
        names = [_images_in(folder / name) for name in classes]
        # As bytes of one width: a million strings would take ten times the memory.
        self._names = np.array([name for of_class in names for name in of_class], dtype=np.bytes_)
        counts = [len(of_class) for of_class in names]
        self.labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)

    def read(self, index: int) -> bytes:
        """Return one file's content."""
        return Path(self.name(index)).read_bytes()

    def name(self, index: int) -> str:
        """Return a file's path."""
        name = os.fsdecode(bytes(self._names[index]))
        return os.path.join(self._folder, self._classes[self.labels[index]], name)


class ImageRecords:
    """Images in TFRecord files."""

    def __init__(self, files: Sequence[Path], first_label: int) -> None:
        self._files = files
        self._index = tfrecords.index(files)
        self.labels = (self._index.labels - first_label).astype(np.int32)
        self.file_offsets: NDArray[np.int64] | None = self._index.file_offsets

    def read(self, index: int) -> bytes:
        """Return the image of one record, without the rest of it."""
        length = int(self._index.lengths[index])
        descriptor = os.open(self._files[self._number(index)], os.O_RDONLY)
        try:
            content = os.pread(descriptor, length, int(self._index.starts[index]))
        finally:
            os.close(descriptor)
        if len(content) != length:
            raise OSError("the file has become shorter")
        return content

    def name(self, index: int) -> str:
        """Return file and number of a record."""
        number = self._number(index)
        first = int(self._index.file_offsets[number])
        return f"{self._files[number]}, record {index - first}"

    def _number(self, index: int) -> int:
        """Return which file a record lies in."""
        return int(np.searchsorted(self._index.file_offsets, index, "right")) - 1


def _records_of(root: Path, part: str) -> list[Path]:
    """Return the TFRecord files of a part, in order."""
    names = NAMES[part]
    return tfrecords.files_of([root, *(root / name for name in names)], names)


def _first_label(root: Path, part: str, nb_classes: int) -> int:
    """Return whether labels count from 0 or from 1, which only the ends of the range show.

    Raises:
        ConfigurationError: Neither label 0 nor label `nb_classes` occurs in any part.
    """
    for one in (part, *(other for other in NAMES if other != part)):
        if not (files := _records_of(root, one)):
            continue
        labels = tfrecords.index(files).labels
        if (labels == 0).any():
            return 0
        if (labels == nb_classes).any():
            return 1
    raise ConfigurationError(
        f"{root}: no TFRecord has the label 0 or {nb_classes}, so it is not known whether "
        f"labels count from 0 or from 1. Expected all of --nb_classes={nb_classes}; copy the whole "
        "set there, or mend --nb_classes."
    )


def _folder_of(root: Path, part: str) -> Path | None:
    """Return the folder that holds the classes of a part."""
    folders = [root / name for name in NAMES[part]]
    return next((folder for folder in folders if _subfolders(folder)), None)


def _classes(folder: Path, nb_classes: int) -> list[str]:
    """Return the classes in the order of their numbers."""
    classes = sorted(path.name for path in _subfolders(folder))
    if len(classes) != nb_classes:
        raise ConfigurationError(
            f"{folder} has {len(classes)} folders of classes; expected --nb_classes={nb_classes}. "
            f"Set --nb_classes={len(classes)}, or complete the folder."
        )
    return classes


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]


def _images_in(folder: Path) -> list[bytes]:
    """Return the names of the images in a folder, sorted; other files are none."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [os.fsencode(entry.name) for entry in entries if _is_image(entry.name)]
    return sorted(names)


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")
