"""Data sets by name: the sample's contents, search order, scaling, errors, user data."""

import io
import types
from pathlib import Path

import numpy as np
import pytest

from thinwire.data import make_sample, registry, sources
from thinwire.data.pipeline.lazy import scale
from thinwire.data.readers import idx
from thinwire.ops.types import ConfigurationError


def load(name: str, data_dir: Path | None = None, **changes: object) -> registry.Dataset:
    arguments: dict[str, object] = {
        "name": name,
        "data_dir": None if data_dir is None else str(data_dir),
        "image_size": 28,
        "image_depth": 1,
        "nb_classes": 10,
        "scaling": "unit",
        "seed": 0,
    }
    return registry.load(**(arguments | changes))  # type: ignore[arg-type]


def write_idx(folder: Path, count: int = 20, suffix: str = ".gz", mark: str = "-") -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(count).integers(256, size=(count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for prefix in ("train", "t10k"):
        idx.write(folder / f"{prefix}-images{mark}idx3-ubyte{suffix}", images)
        idx.write(folder / f"{prefix}-labels{mark}idx1-ubyte{suffix}", labels)
    return images


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without data packages and network; returns its Keras cache."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    for name, source in sources._SOURCES.items():
        if name != "fashion_mnist_sample":
            bare = sources.dataclasses.replace(source, folders=())
            monkeypatch.setitem(sources._SOURCES, name, bare)

    def refuse(address: str, target: Path) -> None:
        raise OSError("no network")

    monkeypatch.setattr(sources, "_fetch", refuse)
    return tmp_path / "keras" / "datasets"


def test_sample_is_balanced_and_whole() -> None:
    dataset = load("fashion_mnist_sample")
    assert dataset.train_images.shape == (10000, 28, 28, 1)
    assert dataset.test_images.shape == (2000, 28, 28, 1)
    assert dataset.train_images.dtype == np.float32 and dataset.train_labels.dtype == np.int32
    assert np.bincount(dataset.train_labels).tolist() == [1000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [200] * 10
    assert dataset.train_images.min() == 0.0 and dataset.train_images.max() == 1.0


def test_sample_carries_its_licence() -> None:
    notice = Path(registry.__file__).parent / "fashion_mnist_sample" / "NOTICE"
    assert "Zalando SE" in notice.read_text() and "MIT" in notice.read_text()


def test_sample_is_a_draw_without_repetition() -> None:
    labels = np.repeat(np.arange(10), 30).astype(np.uint8)
    chosen = make_sample.draw_balanced(labels, 100, seed=1)
    assert len(set(chosen.tolist())) == 100
    assert np.bincount(labels[chosen]).tolist() == [10] * 10
    with pytest.raises(ValueError, match="cannot draw"):
        make_sample.draw_balanced(labels, 310, seed=1)


def test_one_part_only() -> None:
    dataset = load("fashion_mnist_sample", parts=("test",))
    assert len(dataset.train_images) == len(dataset.train_labels) == 0
    np.testing.assert_array_equal(dataset.test_images, load("fashion_mnist_sample").test_images)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("name", ["fashion_mnist", "mnist", "fashion_mnist_sample"])
def test_data_dir_comes_first(tmp_path: Path, suffix: str, mark: str, name: str) -> None:
    images = write_idx(tmp_path, suffix=suffix, mark=mark)
    dataset = load(name, tmp_path)
    np.testing.assert_allclose(dataset.train_images[..., 0], images / 255, rtol=1e-6)


def test_data_dir_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="train-images-idx3-ubyte") as caught:
        load("fashion_mnist_sample", tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ConfigurationError, match="but not .* labels"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_nowhere_says_how_to_get_it(nowhere: Path, name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(name)
    for way in ("no network", "--data_dir", str(nowhere), "fashion_mnist_sample"):
        assert way in str(caught.value)
    assert ("apt-get install" in str(caught.value)) == (name == "fashion_mnist")


def test_keras_cache_idx(nowhere: Path) -> None:
    write_idx(nowhere / "fashion-mnist")
    assert len(load("fashion_mnist").test_labels) == 20


def test_keras_cache_archive(nowhere: Path) -> None:
    nowhere.mkdir(parents=True)
    arrays = {"x": np.zeros((5, 28, 28), np.uint8), "y": np.arange(5, dtype=np.uint8)}
    both = {f"{key}_{part}": value for key, value in arrays.items() for part in ("train", "test")}
    np.savez(nowhere / "mnist.npz", **both)
    assert load("mnist").train_labels.tolist() == [0, 1, 2, 3, 4]
    (nowhere / "mnist.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ConfigurationError, match=r"mnist\.npz"):
        load("mnist")


def test_download_fills_the_cache(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(address: str, target: Path) -> None:
        content = np.zeros((3, 28, 28) if "images" in address else 3, dtype=np.uint8)
        idx.write(target, content)

    monkeypatch.setattr(sources, "_fetch", fetch)
    assert len(load("fashion_mnist", parts=("train",)).train_labels) == 3
    assert len(list((nowhere / "fashion-mnist").iterdir())) == 2


def test_fetch_leaves_no_partial_file(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_bytes(b"content")
    folder = tmp_path / "cache"
    folder.mkdir()
    sources._fetch(original.as_uri(), folder / "copy")
    with pytest.raises(OSError, match="absent"):
        sources._fetch((tmp_path / "absent").as_uri(), folder / "other")
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("copy", b"content")]


def test_fetch_refuses_a_cut_off_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = io.BytesIO(b"12345")
    answer.headers = {"Content-Length": "9"}  # type: ignore[attr-defined]
    monkeypatch.setattr(sources.urllib.request, "urlopen", lambda *_, **__: answer)
    with pytest.raises(OSError, match="after 5 of 9 bytes"):
        sources._fetch("address", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"image_size": 32}, "--image_size 28"),
        ({"image_depth": 3}, "--image_depth 1"),
        ({"nb_classes": 9}, "--nb_classes 10"),
        ({"scaling": "log"}, "standardize, unit"),
        ({"name": "cifar11"}, "fashion_mnist_sample, fashion_mnist"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        load(**({"name": "fashion_mnist_sample", "parts": ("test",)} | changes))  # type: ignore[arg-type]


def test_synthetic_is_reproducible_and_learnable() -> None:
    options = {"image_size": 9, "image_depth": 2, "nb_classes": 3}
    one, two = load("synthetic", **options), load("synthetic", parts=("test",), **options)
    np.testing.assert_array_equal(one.test_images, two.test_images)
    assert (one.test_images != load("synthetic", seed=1, **options).test_images).any()
    means = np.stack([one.train_images[one.train_labels == label].mean(0) for label in range(3)])
    distances = ((one.test_images[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(1) == one.test_labels).mean() > 0.9
    with pytest.raises(ConfigurationError, match="--data_dir"):
        load("synthetic", Path("somewhere"))


def test_standardize_equals_the_formula() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(3000, 28, 28, 1), dtype=np.uint8)
    images[5] = 77
    images[6] = 0
    images[6, 0, 0] = 1
    pixels = images.astype(np.float64)
    mean = pixels.mean(axis=(1, 2, 3), keepdims=True)
    deviation = np.maximum(pixels.std(axis=(1, 2, 3), keepdims=True), 1 / 28)
    scaled = scale(images, "standardize")
    np.testing.assert_allclose(scaled, (pixels - mean) / deviation, atol=2e-5)
    assert scaled.dtype == np.float32 and not scaled[5].any()


def user_module(returned: object) -> types.ModuleType:
    module = types.ModuleType("mine")
    module.load_data = lambda: returned  # type: ignore[attr-defined]
    return module


def test_user_data_is_converted() -> None:
    x, y = np.ones((4, 5)), np.arange(4)
    dataset = registry.from_user_module(user_module(((x, y), (x[:2], y[:2, None]))), seed=1)
    assert dataset.train_images.dtype == np.float32 and dataset.test_labels.tolist() == [0, 1]


def test_user_data_follows_the_seed() -> None:
    module = types.ModuleType("mine")

    def load_data() -> object:
        x = np.random.normal(size=(4, 5))
        return (x, np.zeros(4, int)), (x, np.zeros(4, int))

    module.load_data = load_data  # type: ignore[attr-defined]
    one, two = (registry.from_user_module(module, seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.train_images, two.train_images)


X, Y = np.ones((4, 5)), np.arange(4)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, "load_data"),
        ((X, Y), "load_data"),
        (((X, Y[:3]), (X, Y)), "x_train"),
        (((X, Y), (X, np.eye(4))), "argmax"),
        (((X, Y), (np.ones((4, 6)), Y)), "same shape"),
        (((X, Y), (X * np.nan, Y)), "NaN"),
        (((X, -Y), (X, Y)), "negative"),
        (((X[:0], Y[:0]), (X, Y)), "at least 1"),
        (((Y, Y), (X, Y)), "x_train"),
        (((["a"], Y), (X, Y)), "numbers"),
    ],
)
def test_bad_user_data_is_refused(returned: object, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        registry.from_user_module(user_module(returned), seed=0)


def test_user_module_without_data() -> None:
    with pytest.raises(ConfigurationError, match="no function load_data"):
        registry.from_user_module(types.ModuleType("mine"), seed=0)
