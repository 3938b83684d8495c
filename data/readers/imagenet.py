"""Reader of ImageNet (ILSVRC 2012) and data sets of the same layout: class folders or TFRecords.

ImageNet in folders has files ``train/n01440764/*.JPEG`` and ``val/n01440764/*.JPEG``, with one
folder per class. The sorted names of ImageNet's class folders define the numbers of the classes.

ImageNet in TFRecords has files ``train-00000-of-01024`` ... and ``validation-00000-of-00128`` ...,
in the folder or in ``train/`` and ``validation/``, whose records have the features
``image/encoded`` and ``image/class/label``. The labels in the TFRecords count from 0 or from 1; the
usual build scripts of ImageNet count from 1.

The reader of ImageNet reads names, positions, labels and encoded images;
``thinwire.data.pipeline.decode`` decodes the pixels.
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
    "To get ImageNet, register at image-net.org. Then set --data_dir to a folder "
    "with train/CLASS/*.JPEG and val/CLASS/*.JPEG, or with TFRecords train-00000-of-01024 and "
    "validation-00000-of-00128. To measure speed without files, use --dataset imagenet_synthetic."
)


class EncodedImages(Protocol):
    """Encoded (JPEG or PNG) images and their labels.

    Attributes:
        labels: Class of each image, [N] int32.
        file_offsets: Index of the first image of each file, then the number N of images, [files +
            1] int64. The offsets are None if each image is a separate file.
    """

    labels: NDArray[np.int32]
    file_offsets: NDArray[np.int64] | None

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of one image; raise OSError if reading fails."""

    def name(self, index: int) -> str:
        """Return the path or position of an image, for error messages."""


def find(data_dir: str | None, part: str, nb_classes: int) -> EncodedImages:
    """Return the encoded images of the training or test part of ImageNet.

    Args:
        data_dir: Folder of the data set; None raises an error that explains how to get ImageNet.
        part: Part of the data set, "train" or "test".
        nb_classes: Number of classes of the network.

    Raises:
        ConfigurationError: The image files are missing, incomplete or damaged, or the classes do
            not fit ``nb_classes``.
    """
    if data_dir is None:
        raise ConfigurationError(f"--dataset imagenet needs --data_dir. {_HOW}")
    root = Path(data_dir)
    if files := _records_of(root, part):
        images: EncodedImages = ImageRecords(files, _first_label(root, part, nb_classes))
    elif folder := _folder_of(root, part):
        classes = _classes(_folder_of(root, "train") or folder, nb_classes)
        images = ImageFolders(folder, classes)
    else:
        raise ConfigurationError(f"--data_dir {root} holds no {part} data of ImageNet. {_HOW}")
    if not len(images.labels):
        raise ConfigurationError(f"--data_dir {root} holds no {part} images. {_HOW}")
    lowest, highest = int(images.labels.min()), int(images.labels.max())
    if not 0 <= lowest <= highest < nb_classes:
        raise ConfigurationError(
            f"--data_dir {root} has classes {lowest} to {highest}; expected 0 to {nb_classes - 1}. "
            f"Set --nb_classes {highest + 1} or more."
        )
    logging.info("data: found %d %s examples in %s", len(images.labels), part, root)
    return images


class ImageFolders:
    """Encoded images of ImageNet's training or test part, with one folder for each class."""

    file_offsets: NDArray[np.int64] | None = None

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self._folder, self._classes = folder, classes
        unknown = sorted({path.name for path in _subfolders(folder)} - set(classes))
        if unknown:
            raise ConfigurationError(
                f"the folder {folder} has the class {unknown[0]}, which is not among the "
                f"{len(classes)} classes of the training set; expected the same class folders in "
                "both parts. Remove the folder."
            )
        names = [_images_in(folder / name) for name in classes]
        # The names of images are stored as bytes of fixed width, because Python strings need ten
        # times the memory.
        self._names = np.array(
            [name for class_names in names for name in class_names], dtype=np.bytes_
        )
        counts = [len(class_names) for class_names in names]
        self.labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)

    def read(self, index: int) -> bytes:
        """Return the content of one image file."""
        return Path(self.name(index)).read_bytes()

    def name(self, index: int) -> str:
        """Return the path of the file that contains an image."""
        name = os.fsdecode(bytes(self._names[index]))
        return os.path.join(self._folder, self._classes[self.labels[index]], name)


class ImageRecords:
    """Encoded images of ImageNet's training or test part, stored in TFRecord files."""

    def __init__(self, files: Sequence[Path], first_label: int) -> None:
        self._files = files
        self._index = tfrecords.index(files)
        self.labels = (self._index.labels - first_label).astype(np.int32)
        self.file_offsets: NDArray[np.int64] | None = self._index.file_offsets

    def read(self, index: int) -> bytes:
        """Return the encoded image of one record, reading only the image's bytes."""
        length = int(self._index.lengths[index])
        descriptor = os.open(self._files[self._number(index)], os.O_RDONLY)
        try:
            content = os.pread(descriptor, length, int(self._index.starts[index]))
        finally:
            os.close(descriptor)
        if len(content) != length:
            raise OSError("the file is shorter than when it was indexed")
        return content

    def name(self, index: int) -> str:
        """Return a text with the file of a TFRecord and the record's number in that file."""
        number = self._number(index)
        first = int(self._index.file_offsets[number])
        return f"{self._files[number]}, record {index - first}"

    def _number(self, index: int) -> int:
        """Return the index of the TFRecord file that holds a record."""
        return int(np.searchsorted(self._index.file_offsets, index, "right")) - 1


def _records_of(root: Path, part: str) -> list[Path]:
    """Return the TFRecord files of the training or test part, in the order of the file numbers."""
    names = NAMES[part]
    return tfrecords.files_of([root, *(root / name for name in names)], names)


def _first_label(root: Path, part: str, nb_classes: int) -> int:
    """Return 0 or 1: the label of the first class in the TFRecords.

    Only the occurrence of the label 0 or of the label ``nb_classes`` shows whether a data set's
    labels count from 0 or from 1. If neither label 0 nor label ``nb_classes`` occurs in the
    requested part, the other part (train or test) decides.

    Raises:
        ConfigurationError: Neither label 0 nor label ``nb_classes`` occurs in any part.
    """
    for name in (part, *(other for other in NAMES if other != part)):
        if not (files := _records_of(root, name)):
            continue
        labels = tfrecords.index(files).labels
        if (labels == 0).any():
            return 0
        if (labels == nb_classes).any():
            return 1
    raise ConfigurationError(
        f"folder {root}: no TFRecord has the label 0 or {nb_classes}, so it is unknown if labels "
        f"count from 0 or from 1. Expected examples of all --nb_classes={nb_classes} classes; copy "
        "the whole data set there, or correct --nb_classes."
    )


def _folder_of(root: Path, part: str) -> Path | None:
    """Return the folder that contains the class folders of the training or test part, or None."""
    folders = [root / name for name in NAMES[part]]
    return next((folder for folder in folders if _subfolders(folder)), None)


def _classes(folder: Path, nb_classes: int) -> list[str]:
    """Return the names of the class folders, in the order of the class numbers."""
    classes = sorted(path.name for path in _subfolders(folder))
    if len(classes) != nb_classes:
        raise ConfigurationError(
            f"the folder {folder} has {len(classes)} folders of classes; expected "
            f"--nb_classes={nb_classes}. Set --nb_classes={len(classes)}, or complete the folder."
        )
    return classes


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]


def _images_in(folder: Path) -> list[bytes]:
    """Return the sorted names of the images in a folder; files of other types are ignored."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.lower().endswith(_SUFFIXES)]
    return sorted(os.fsencode(name) for name in names if not name.startswith("."))
