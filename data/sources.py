"""Finds the files of a named data set, and downloads files that are missing.

The files of a data set are searched first in the folder of an operating system's package, then in
the Keras cache, and otherwise downloaded into the Keras cache. If the user names a folder with
--data_dir, the search is limited to that folder, so that other data never replaces the user's data
silently.
"""

from __future__ import annotations

import dataclasses
import http.client
import io
import os
import shutil
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from numpy.typing import NDArray

from thinwire.data.readers import adacomp, cifar10, idx
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import replace_file

_DOWNLOAD_ROOT = "https://storage.googleapis.com/tensorflow/tf-keras-datasets"
_DOWNLOAD_TIMEOUT_SECONDS = 20
_PREFIXES = {"train": "train", "test": "t10k"}
_KINDS = ("images", "labels")


@dataclasses.dataclass(frozen=True)
class DatasetPart:
    """Training or test part of a data set, in its stored form or scaled for training."""

    # Array or `Lazy` of model inputs, [N, ...]: stored images [N, height, width, channels] uint8,
    # scaled images float32, or tokens int32.
    images: Any
    labels: NDArray[Any]  # labels [N, ...] in the task's form; [N] int32 for classes
    # Number of the first example of each file, [files + 1] int64; None if unknown.
    file_offsets: NDArray[np.int64] | None = None
    # Classes of the examples, [N] int32; None except for autoencoders.
    classes: NDArray[np.int32] | None = None


@dataclasses.dataclass(frozen=True)
class _Source:
    """Folders in which the files of one data set may be found."""

    folders: tuple[Path, ...] = ()  # folders in which a system package installs IDX files
    # Folder of IDX files, or .npz file, in the folder datasets/ of the Keras cache.
    cache: str | None = None
    package: str | None = None  # advice how to install the system package with the data set


_SOURCES = {
    "fashion_mnist_sample": _Source(
        folders=(Path(__file__).resolve().parent / "fashion_mnist_sample",)
    ),
    "fashion_mnist": _Source(
        folders=(Path("/usr/share/datasets/fashion-mnist"),),
        cache="fashion-mnist",
        package="on Debian and Ubuntu run `apt-get install dataset-fashion-mnist`",
    ),
    "mnist": _Source(cache="mnist.npz"),
}


def find(
    name: str, part: str, data_dir: str | None, image_size: int, image_depth: int
) -> DatasetPart:
    """Return the training or test part of a stored data set.

    Args:
        name: Name of the data set: fashion_mnist_sample, fashion_mnist, mnist or cifar10.
        part: Part of the data set, "train" or "test".
        data_dir: Folder of the files (--data_dir); None for the data set's usual folders.
        image_size: Height and width of an image in pixels, for files without headers.
        image_depth: Number of channels of an image, for files without headers.

    Raises:
        ConfigurationError: The files of the data set are missing or damaged, or their download
            failed.
    """
    if name == "cifar10":
        return _cifar10(part, data_dir)
    source = _SOURCES[name]
    if data_dir is not None:
        return _from_data_dir(Path(data_dir), part, image_size, image_depth)
    for folder in source.folders:
        if (raw := _from_folder(folder, part)) is not None:
            return raw
    if source.cache is None:
        raise ConfigurationError(
            f"The shipped data set {name} is not at {source.folders[0]}. Expected its four files "
            "in that folder: restore the files from the repository."
        )
    return _from_cache(name, source, source.cache, part)


def _from_data_dir(folder: Path, part: str, image_size: int, image_depth: int) -> DatasetPart:
    if (raw := _from_folder(folder, part)) is not None:
        return raw
    if adacomp.holds(folder, part):
        images, labels, offsets = adacomp.read(folder, part, image_size, image_depth)
        logging.info("data: read the %s part from AdaComp's files in %s", part, folder)
        return DatasetPart(images, labels.astype(np.int32), offsets)
    names = " and ".join(_names(part, kind)[0] for kind in _KINDS)
    raise ConfigurationError(
        f"--data_dir {folder} holds no {part} data. Expected {names} (with or "
        f"without .gz), or AdaComp's folders, for example "
        f"{adacomp.path_of(folder, part, 'images', 0).parent.name}/. Name the folder that holds "
        "the files, or leave --data_dir out to use the data set's usual places."
    )


def _names(part: str, kind: str) -> list[str]:
    """Return the possible file names of an IDX file, the most common name first."""
    ending = "idx3-ubyte" if kind == "images" else "idx1-ubyte"
    stems = [f"{_PREFIXES[part]}-{kind}{mark}{ending}" for mark in ("-", ".")]
    return [stem + suffix for stem in stems for suffix in (".gz", "")]


def _from_folder(folder: Path, part: str) -> DatasetPart | None:
    """Return the training or test part from its two files (images and labels); None if the folder
    has neither file.
    """
    paths = []
    for kind in _KINDS:
        candidates = [folder / name for name in _names(part, kind)]
        paths.append(next((path for path in candidates if path.is_file()), None))
    images_path, labels_path = paths
    if images_path is None and labels_path is None:
        return None
    if images_path is None or labels_path is None:
        missing = "images" if images_path is None else "labels"
        raise ConfigurationError(
            f"folder {folder} has {images_path or labels_path} but not the matching {missing}; "
            f"expected {_names(part, missing)[0]} in the same folder. Copy the file there."
        )
    images, labels = idx.read_pair(images_path, labels_path)
    logging.info("data: read %d %s examples from %s", len(labels), part, folder)
    return DatasetPart(images if images.ndim == 4 else images[..., None], labels.astype(np.int32))


def _cache() -> Path:
    """Return the folder in which Keras caches data sets."""
    return Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "datasets"


def _cifar10(part: str, data_dir: str | None) -> DatasetPart:
    """Read CIFAR-10 from --data_dir or the Keras cache; download missing files to the cache."""
    place = Path(data_dir) if data_dir else _cache()

    def read() -> DatasetPart | None:
        arrays = cifar10.find(place, part)
        return None if arrays is None else DatasetPart(*arrays)

    if (raw := read()) is not None:
        return raw
    pickled, names = cifar10.pickled_in(place), cifar10.names_of(part)
    note = (
        f" ({pickled} is of the pickled version, which Thinwire does not read)" if pickled else ""
    )
    if data_dir:
        raise ConfigurationError(
            f"--data_dir {data_dir} holds no {part} data of CIFAR-10{note}. Expected the binary "
            f"version: {names}. Fetch {cifar10.ADDRESS} into that folder, name "
            "a folder that holds these files, or leave --data_dir out to download the data set."
        )
    root, _, archive = cifar10.ADDRESS.rpartition("/")
    ways = [
        f"copy {archive} into {place}",
        f"set --data_dir to a folder with {names}",
        "train without files with --dataset synthetic",
    ]
    _download(f"cifar10 is not on this machine{note}", root, place, [archive], ways)
    return _checked(read(), "cifar10", place)


def _from_cache(name: str, source: _Source, cache: str, part: str) -> DatasetPart:
    folder, files = _cache() / cache, [_names(part, kind)[0] for kind in _KINDS]
    is_archive = folder.suffix == ".npz"
    if is_archive:
        folder, files = folder.parent, [folder.name]

    def read() -> DatasetPart | None:
        if is_archive:
            return _from_archive(folder / files[0], part)
        return _from_folder(folder, part)

    if (raw := read()) is not None:
        return raw
    ways = [source.package] if source.package else []
    ways += [
        f"copy {' and '.join(files)} into {folder}",
        "set --data_dir to a folder with the four IDX files of the data set",
        "use the shipped sample with --dataset fashion_mnist_sample",
    ]
    _download(f"{name} is not on this machine", _DOWNLOAD_ROOT, folder, files, ways)
    return _checked(read(), name, folder)


def _checked(raw: DatasetPart | None, name: str, folder: Path) -> DatasetPart:
    if raw is None:
        raise ConfigurationError(f"Data set {name} vanished from {folder} after its download.")
    return raw


def _from_archive(path: Path, part: str) -> DatasetPart | None:
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            images, labels = archive[f"x_{part}"], archive[f"y_{part}"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"Data file {path} cannot be read: {error}. Expected an .npz archive with x_{part} and "
            f"y_{part}. Delete the file; the next run downloads it again."
        ) from error
    if images.dtype != np.uint8 or images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ConfigurationError(
            f"Data file {path} holds images {images.dtype} {images.shape} and labels "
            f"{labels.shape}; expected uint8 [N, height, width] and [N]. Delete the file; the "
            "next run downloads it again."
        )
    logging.info("data: read %d %s examples from %s", len(labels), part, path)
    return DatasetPart(images[..., None], labels.astype(np.int32))


def _download(missing: str, root: str, folder: Path, files: list[str], ways: list[str]) -> None:
    """Download files of a data set into a folder; raise an error with other ways to get them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            _fetch(f"{root}/{file}", folder / file)
    except (OSError, http.client.HTTPException) as error:
        ways = [f"connect this machine to the internet (tried {root}/{files[0]})", *ways]
        raise ConfigurationError(
            f"Data set {missing} and its download failed: {error}. To get it: {'; or '.join(ways)}."
        ) from error


def _fetch(address: str, target: Path) -> None:
    """Download one file of a data set to the path ``target``.

    The file at ``target`` is written only if its size and, for CIFAR-10, its checksum are correct,
    and atomically, so that another process never reads a partial or damaged file.
    """
    logging.info("data: downloading %s", address)
    content = io.BytesIO()
    with urllib.request.urlopen(address, timeout=_DOWNLOAD_TIMEOUT_SECONDS) as answer:
        shutil.copyfileobj(answer, content)
        announced = answer.headers.get("Content-Length")
    if announced is not None and content.tell() != int(announced):
        raise OSError(f"{address} ended after {content.tell()} of {announced} bytes")
    if address == cifar10.ADDRESS:
        cifar10.check_archive(content.getvalue())
    replace_file(target, content.getvalue())
