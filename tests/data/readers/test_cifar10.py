"""CIFAR-10: folders and archives, the pickled version, damaged files, augmentation."""

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.cifar_files import PER_BATCH, STEMS, batches, pack, write_binary
from thinwire.data import registry, sources
from thinwire.data.defaults import check_augmentation
from thinwire.data.pipeline import lazy
from thinwire.data.pipeline.lazy import CHANNELS, scale
from thinwire.data.readers import cifar10
from thinwire.ops.types import ConfigurationError


def load(folder: Path | None, **changes: object) -> registry.Dataset:
    arguments: dict[str, object] = {
        "name": "cifar10",
        "data_dir": None if folder is None else str(folder),
        "image_size": 32,
        "image_depth": 3,
        "nb_classes": 10,
        "scaling": None,
        "seed": 0,
    }
    return registry.load(**(arguments | changes))  # type: ignore[arg-type]


def write_archive(folder: Path, packing: str = "gz") -> None:
    write_binary(folder / "unpacked" / "cifar-10-batches-bin")
    pack(folder / "unpacked" / "cifar-10-batches-bin", folder / "cifar-10-binary.tar.gz", packing)


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "files": write_binary,
    "folder": lambda folder: write_binary(folder / "cifar-10-batches-bin"),
    "archive": write_archive,
    "unpacked by a browser": lambda folder: write_archive(folder, ""),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout](tmp_path)
    raw = registry.load_raw(registry.DatasetRequest("cifar10", str(tmp_path), 32, 3), "train")
    pixels = np.concatenate([batches()[stem][0] for stem in STEMS[:5]])
    labels = np.concatenate([batches()[stem][1] for stem in STEMS[:5]])
    assert raw.labels.tolist() == labels.tolist() and raw.labels.dtype == np.int32
    assert raw.images.shape == (5 * PER_BATCH, 32, 32, 3)
    for number, row, column, channel in ((0, 0, 0, 0), (7, 3, 30, 1), (19, 31, 31, 2)):
        stored = pixels[number, 1024 * channel + 32 * row + column]
        assert raw.images[number, row, column, channel] == stored
    test = registry.load_raw(registry.DatasetRequest("cifar10", str(tmp_path), 32, 3), "test")
    assert test.labels.tolist() == batches()["test_batch"][1].tolist()


def test_usual_scaling_and_augmentation(tmp_path: Path) -> None:
    write_binary(tmp_path)
    dataset = load(tmp_path)
    assert isinstance(dataset.train_images, lazy.Augmented)
    raw = registry.load_raw(registry.DatasetRequest("cifar10", str(tmp_path), 32, 3), "test").images
    mean, deviation = (np.array(values) for values in CHANNELS["cifar10"])
    assert (mean == (0.4914, 0.4822, 0.4465)).all() and deviation[2] == 0.2010
    np.testing.assert_allclose(dataset.test_images, (raw / 255 - mean) / deviation, atol=1e-5)
    plain = load(tmp_path, augment="none").train_images
    np.testing.assert_array_equal(plain, dataset.train_images[np.arange(len(plain))])
    np.testing.assert_array_equal(plain[:5], dataset.train_images[:5])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_found_in_the_keras_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "_fetch", refuse)
    LAYOUTS[layout](tmp_path / "datasets")
    assert len(load(None, parts=("test",)).test_labels) == PER_BATCH


def refuse(*arguments: object) -> None:
    raise OSError("no network")


def test_nowhere_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "_fetch", refuse)
    with pytest.raises(ConfigurationError) as caught:
        load(None)
    for way in ("no network", cifar10.ADDRESS, "--data_dir", str(tmp_path), "data_batch_1.bin to"):
        assert way in str(caught.value)


def test_a_download_is_the_published_file_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setattr(cifar10, "ADDRESS", archive.as_uri())
    with pytest.raises(ConfigurationError, match="another file than the published one"):
        load(None)
    assert list((tmp_path / "keras" / "datasets").iterdir()) == []
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(cifar10, "SHA256", digest)
    assert len(load(None).train_labels) == 5 * PER_BATCH


#: A pickle that makes a folder named "ran" when it is loaded.
PICKLE = b"cposix\nmkdir\n(S'ran'\ntR."
PICKLED = {
    "data_batch_1": lambda folder: [(folder / stem).write_bytes(PICKLE) for stem in STEMS],
    "test_batch": lambda folder: (folder / "test_batch").write_bytes(PICKLE),
    "cifar-10-batches-py": lambda folder: (folder / "cifar-10-batches-py").mkdir(),
    "cifar-10-batches-py-target": lambda folder: (folder / "cifar-10-batches-py-target").mkdir(),
    "cifar-10-python.tar.gz": lambda folder: (folder / "cifar-10-python.tar.gz").touch(),
    "cifar-10-batches-py.tar.gz": lambda folder: (folder / "cifar-10-batches-py.tar.gz").touch(),
}


@pytest.mark.parametrize("name", PICKLED)
def test_the_pickled_version_is_named_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "datasets"
    folder.mkdir()
    PICKLED[name](folder)
    with pytest.raises(ConfigurationError) as caught:
        load(folder)
    for words in (f"{folder / name} is of the pickled", "Expected the binary", cifar10.ADDRESS):
        assert words in str(caught.value)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "_fetch", refuse)
    with pytest.raises(ConfigurationError, match=f"{name} is of the pickled .*no network"):
        load(None)
    assert not (tmp_path / "ran").exists()
    write_binary(folder)
    assert len(load(folder).train_labels) == 5 * PER_BATCH


def cut(path: Path, missing: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-missing])


def with_label(path: Path, label: int) -> None:
    path.write_bytes(bytes([label]) + path.read_bytes()[1:])


DAMAGES = {
    "cut": (write_binary, lambda f: cut(f / "data_batch_3.bin"), r"data_batch_3\.bin has 12291"),
    "empty": (write_binary, lambda f: (f / "data_batch_2.bin").write_bytes(b""), "has 0 bytes"),
    "missing": (write_binary, lambda f: (f / "data_batch_5.bin").unlink(), r"data_batch_5\.bin"),
    "label": (write_binary, lambda f: with_label(f / "data_batch_2.bin", 10), r"2\.bin .*label 10"),
    "nothing": (lambda f: None, lambda f: None, "holds no train data of CIFAR-10"),
    "archive cut": (
        write_archive,
        lambda f: cut(f / "cifar-10-binary.tar.gz", 30_000),
        r"cifar-10-binary\.tar\.gz cannot be read",
    ),
    "LZMA": (lambda f: write_archive(f, "xz"), lambda f: None, r"cannot be read: .*header"),
    "no archive": (
        lambda f: (f / "cifar-10-binary.tar.gz").write_bytes(b"<html>"),
        lambda f: None,
        r"cifar-10-binary\.tar\.gz cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    write, spoil, words = DAMAGES[damage]
    write(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        load(tmp_path)


def test_an_archive_without_all_batches_is_not_unpacked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as out:
        member = tarfile.TarInfo("../../data_batch_1.bin")
        content = b"".join(bytes([3]) + row.tobytes() for row in batches()["data_batch_1"][0])
        member.size = len(content)
        out.addfile(member, io.BytesIO(content))
    with pytest.raises(ConfigurationError, match="does not hold data_batch_2"):
        load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"image_size": 28}, "--image_size 32"),
        ({"image_depth": 1}, "--image_depth 3"),
        ({"nb_classes": 5}, "--nb_classes 1?[0-9] or more"),
        ({"augment": "resized_crop_flip"}, "none or crop_flip"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    write_binary(tmp_path)
    with pytest.raises(ConfigurationError, match=expected):
        load(tmp_path, **changes)


def test_channel_scalings_want_channels() -> None:
    with pytest.raises(
        ConfigurationError, match="3 channels, but the images of this data set have 1"
    ):
        scale(np.zeros((1, 2, 2, 1), np.uint8), "cifar10")
    check_augmentation("fashion_mnist", "crop_flip")
