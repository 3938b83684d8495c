"""ImageNet in both layouts: contents, order, split over workers, and restarts."""

import shutil
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.data.imagenet_files import CLASSES, colours, encoded, write_folders, write_records
from thinwire.data import registry
from thinwire.data.loading import TrainingShard, load_shard
from thinwire.data.pipeline.cursor import uniforms
from thinwire.data.pipeline.decode import WIDTH, random_box
from thinwire.data.pipeline.lazy import scale
from thinwire.data.readers import imagenet
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import DataChoice, ModelChoice

SIZE = 16


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images as folders, as records counted from 0 and from 1."""
    root = tmp_path_factory.mktemp("imagenet")
    write_folders(root / "folders")
    write_records(root / "records")
    write_records(root / "from 0", first_label=0, num_files=1)
    for part in ("train", "validation"):
        (root / "below" / part).mkdir(parents=True)
        for path in (root / "records").glob(f"{part}-*"):
            shutil.copy(path, root / "below" / part)
    return {path.name: path for path in root.iterdir()}


def load(folder: Path | None, **changes: object) -> registry.Dataset:
    arguments: dict[str, object] = {
        "name": "imagenet",
        "data_dir": None if folder is None else str(folder),
        "image_size": SIZE,
        "image_depth": 3,
        "nb_classes": len(CLASSES),
        "scaling": "unit",
        "seed": 0,
    }
    return registry.load(**(arguments | changes))  # type: ignore[arg-type]


def take(folder: Path, id_worker: int = 1, nb_workers: int = 2, **changes: object) -> TrainingShard:
    """Take a shard as a worker does."""
    data = DataChoice("imagenet", str(folder), "unit", "iid", None)
    data = types.SimpleNamespace(**vars(data) | changes)
    model = ModelChoice("cnn", None, SIZE, 3, len(CLASSES))
    run = types.SimpleNamespace(data=data, model=model, seed=5, batch_size=3, nb_workers=nb_workers)
    return load_shard(run, None, id_worker)


def draw(shard: TrainingShard, count: int) -> list[np.ndarray]:
    return [np.array(shard.next()[0]) for _ in range(count)]


def guess(images: np.ndarray, part: str) -> list[int]:
    """Which image each one is, by the colour of its darker pixels."""
    darker = np.quantile(np.asarray(images).reshape(len(images), -1, 3), 0.05, axis=1)
    known = colours(part) // 2 / 255
    return np.abs(darker[:, None] - known).sum(axis=2).argmin(axis=1).tolist()


@pytest.mark.parametrize("layout", ["folders", "records", "from 0", "below"])
def test_both_layouts_give_the_same(places: dict[str, Path], layout: str) -> None:
    dataset = load(places[layout])
    assert dataset.train_labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert dataset.test_labels.tolist() == [0, 0, 1, 1, 2, 2]
    source = imagenet.find(str(places[layout]), "train", len(CLASSES))
    assert [source.read(number) for number in range(15)] == encoded("train")
    offsets = {"folders": None, "from 0": [0, 15]}.get(layout, [0, 5, 10, 15])
    assert offsets is None or dataset.train_file_offsets.tolist() == offsets


def test_an_evaluation_sees_the_middle(places: dict[str, Path]) -> None:
    images = load(places["folders"], image_size=28).test_images
    assert images.shape == (6, 28, 28, 3) and images.dtype == np.float32
    assert guess(images[:], "val") == list(range(6))
    # The first is 40 x 56: its shorter side becomes 32, and 28 columns of the 45 are left.
    left, right = np.asarray(images[:1])[0, :, :13], np.asarray(images[:1])[0, :, 15:]
    assert left.mean() > right.mean() + 0.15
    np.testing.assert_allclose(
        right, np.broadcast_to(colours("val")[0] // 2 / 255, right.shape), atol=0.03
    )
    walked = list(images.walk([np.array([4, 0]), np.array([1, 1, 5])]))
    assert [guess(batch, "val") for batch in walked] == [[4, 0], [1, 1, 5]]


def test_training_sees_the_parts_that_the_draws_say(places: dict[str, Path]) -> None:
    shard = take(places["records"], nb_workers=1)
    place, positions = shard.cursor.place, shard.cursor.fork().next()
    images, labels = shard.next()
    assert labels.tolist() == shard.labels[positions].tolist()
    draws = uniforms(shard.cursor.seed, place, 3, WIDTH)
    for image, position, row in zip(np.asarray(images), positions, draws, strict=True):
        whole = tf.io.decode_image(encoded("train")[position]).numpy()
        top, left, height, width = random_box(*whole.shape[:2], row.tolist())
        part = whole[top : top + height, left : left + width].astype(np.float32)
        expected = tf.image.resize(part, [SIZE, SIZE], antialias=True).numpy() / 255
        expected = expected[:, ::-1] if row[-1] < 0.5 else expected
        np.testing.assert_allclose(image, expected, atol=0.04)  # a crop decodes with other borders


@pytest.mark.parametrize("scaling", ["unit", "imagenet", "standardize"])
def test_scalings_are_those_of_images_in_memory(places: dict[str, Path], scaling: str) -> None:
    plain = np.asarray(load(places["folders"]).test_images[:2]) * 255
    scaled = load(places["folders"], scaling=scaling).test_images[:2]
    np.testing.assert_allclose(scaled, scale(plain, scaling), atol=1e-4)


@pytest.mark.parametrize("layout", ["folders", "records"])
def test_shards_are_disjoint_and_complete(places: dict[str, Path], layout: str) -> None:
    shards = [take(places[layout], worker, augment="none") for worker in (1, 2)]
    seen = [guess(shard.images[:], "train") for shard in shards]
    assert sorted(seen[0] + seen[1]) == list(range(15))
    for shard, mine in zip(shards, seen, strict=True):
        assert shard.labels.tolist() == [number // 5 for number in mine]
        batches = [guess(batch, "train") for batch in draw(shard, 8)]
        assert all(len(batch) == 3 and set(batch) <= set(mine) for batch in batches)


def test_files_are_dealt_out_whole(places: dict[str, Path]) -> None:
    mine = take(places["records"], 2, 3, partition="contiguous", augment="none")
    assert guess(mine.images[:], "train") == list(range(5, 10))


@pytest.mark.parametrize("layout", ["folders", "records"])
def test_resumes_bit_for_bit_in_mid_epoch(places: dict[str, Path], layout: str) -> None:
    going = take(places[layout])
    draw(going, 4)
    state = going.cursor.state()
    expected = draw(going, 4)
    again = take(places[layout])
    draw(again, 1)  # the images decoded ahead are useless after the jump
    again.cursor.restore(state)
    for one, other in zip(draw(again, 4), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert again.cursor.state() == going.cursor.state()
    assert (np.concatenate(draw(again, 3)) != np.concatenate(expected[:3])).any()


def test_decoding_goes_ahead_of_the_training(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader reads ahead of the requested batch, and reads each batch once."""
    read, enough = [], __import__("threading").Event()
    whole = imagenet.ImageFolders.read

    def counting(self: imagenet.ImageFolders, index: int) -> bytes:
        read.append(index)
        if len(read) >= 6:
            enough.set()
        return whole(self, index)

    monkeypatch.setattr(imagenet.ImageFolders, "read", counting)
    shard = take(places["folders"], nb_workers=1)
    shard.next()
    assert enough.wait(20)
    draw(shard, 4)
    first_epoch = read[:15]
    assert sorted(first_epoch) == list(range(15))


def spoil(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    path = folder / "train" / CLASSES[1] / f"{CLASSES[1]}_007.JPEG"
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda content: content[: len(content) // 2], "."),
        (lambda content: b"<html>not an image</html>", "3c 68"),
        (lambda content: b"", "none"),
    ],
)
def test_a_damaged_image_is_named(
    tmp_path: Path, change: Callable[[bytes], bytes], expected: str
) -> None:
    write_folders(tmp_path)
    path = spoil(tmp_path, change)
    with pytest.raises(ConfigurationError, match=f"{path.name} cannot be used: .*{expected}"):
        draw(take(tmp_path, nb_workers=1), 5)
    path.unlink()
    images = load(tmp_path).train_images
    assert len(images) == 14


def test_a_file_that_vanishes_while_training_is_named(tmp_path: Path) -> None:
    write_folders(tmp_path)
    dataset = load(tmp_path)
    path = tmp_path / "train" / CLASSES[0] / f"{CLASSES[0]}_002.JPEG"
    path.unlink()
    with pytest.raises(ConfigurationError, match=f"{path.name} cannot be used: .*No such file"):
        dataset.train_images[:]


def with_extra_class(folder: Path) -> None:
    (folder / "val" / "n99999999").mkdir()


def without_label_zero(folder: Path) -> None:
    shutil.rmtree(folder)
    write_records(folder, first_label=2)


@pytest.mark.parametrize(
    ("change", "flags", "expected"),
    [
        (lambda folder: None, {"nb_classes": 1000}, "3 folders of classes; .*--nb_classes=3"),
        (lambda folder: None, {"image_depth": 1}, "--image_depth 3"),
        (lambda folder: None, {"augment": "crop_flip"}, "none or resized_crop_flip"),
        (lambda folder: shutil.rmtree(folder / "val"), {}, "holds no test data .*val/CLASS"),
        (with_extra_class, {}, "n99999999, which is not among the 3 classes"),
        (without_label_zero, {"nb_classes": 5}, "from 0 or from 1"),
        (without_label_zero, {"nb_classes": 3}, "classes 1 to 3; .* Set --nb_classes 4"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Path], None], flags: dict[str, object], expected: str
) -> None:
    write_folders(tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigurationError, match=expected):
        load(tmp_path, **flags)


def test_no_folder_says_how_to_get_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(None)
    for way in ("--data_dir", "image-net.org", "train-00000-of-01024", "imagenet_synthetic"):
        assert way in str(caught.value)


def test_other_files_in_a_class_are_none_of_its_images(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for name in (".hidden.JPEG", "notes.txt", "Thumbs.db"):
        (tmp_path / "train" / CLASSES[0] / name).write_bytes(b"x")
    assert len(load(tmp_path).train_labels) == 15
