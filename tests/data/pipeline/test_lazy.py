"""Augmented images follow the formula; one position always gives the same pixels."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_registry import user_module
from thinwire.data import registry
from thinwire.data.loading import TrainingShard, load_dataset, take_shard
from thinwire.data.pipeline import lazy
from thinwire.data.pipeline.cursor import Cursor, uniforms
from thinwire.data.pipeline.lazy import scale
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import DataChoice

RNG = np.random.default_rng(4)
IMAGES = RNG.integers(1, 256, size=(30, 8, 8, 3), dtype=np.uint8)


def reference(image: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Obvious: pad with black, cut out, mirror."""
    height, width, _ = image.shape
    padded = np.zeros((height + 8, width + 8, 3), np.uint8)
    padded[4:-4, 4:-4] = image
    top, left = int(draws[0] * 9), int(draws[1] * 9)
    cut = padded[top : top + height, left : left + width]
    return cut[:, ::-1] if draws[2] < 0.5 else cut


def test_crop_flip_equals_the_obvious() -> None:
    draws = uniforms(1, 0, len(IMAGES), 3)
    expected = np.stack([reference(*pair) for pair in zip(IMAGES, draws, strict=True)])
    np.testing.assert_array_equal(lazy.crop_flip(IMAGES, draws), expected)


def test_crop_flip_reaches_every_corner_and_leaves_the_middle() -> None:
    corner = np.array([[0, 0, 0.9], [0.9999, 0.9999, 0.9], [0.5, 0.5, 0.9], [0.5, 0.5, 0.1]])
    first, last, same, mirrored = lazy.crop_flip(IMAGES[:4], corner)
    assert not first[:4].any() and (first[4:, 4:] == IMAGES[0, :4, :4]).all()
    assert not last[4:].any() and (last[:4, :4] == IMAGES[1, 4:, 4:]).all()
    assert (same == IMAGES[2]).all() and (mirrored == IMAGES[3, :, ::-1]).all()


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**45),
    place=st.integers(0, 2**60),
    count=st.integers(1, 9),
    width=st.integers(1, 41),
)
def test_draws_follow_from_seed_and_place(seed: int, place: int, count: int, width: int) -> None:
    together = uniforms(seed, place, count, width)
    alone = [uniforms(seed, place + number, 1, width)[0] for number in range(count)]
    np.testing.assert_array_equal(together, alone)
    assert together.shape == (count, width) and (together >= 0).all() and (together < 1).all()
    assert (together != uniforms(seed + 1, place, count, width)).any()


def test_draws_are_even() -> None:
    counts = np.bincount((uniforms(3, 0, 9000, 3)[:, 1] * 9).astype(int), minlength=9)
    assert (np.abs(counts - 1000) < 150).all()


def shard(kind: str = "crop_flip", batch_size: int = 7) -> TrainingShard:
    images = lazy.Augmented(IMAGES, "unit") if kind == "crop_flip" else scale(IMAGES, "unit")
    labels = (np.arange(len(IMAGES)) % 10).astype(np.int32)
    nothing = np.zeros((0, 8, 8, 3), np.float32)
    dataset = registry.Dataset(images, labels, nothing, labels[:0])
    data = DataChoice("cifar10", None, "unit", "iid", None)
    run = types.SimpleNamespace(data=data, seed=5, batch_size=batch_size, nb_workers=2)
    return take_shard(run, dataset, 2, nb_workers=2)


def draw(shard: TrainingShard, count: int) -> list[np.ndarray]:
    return [np.array(shard.next()[0]) for _ in range(count)]


def test_every_batch_of_a_shard_is_augmented_anew_and_goes_with_its_labels() -> None:
    going, plain = shard(), shard("none")
    differ = 0
    for _ in range(10):
        (images, labels), (originals, same_labels) = going.next(), plain.next()
        np.testing.assert_array_equal(labels, same_labels)
        assert images.dtype == np.float32 and images.shape == originals.shape == (7, 8, 8, 3)
        differ += int((images != originals).any(axis=(1, 2, 3)).sum())
    assert differ > 60
    first, second = np.concatenate(draw(shard(batch_size=15), 2)).reshape(2, 15, -1)
    assert (np.sort(first, axis=0) != np.sort(second, axis=0)).any()


@settings(max_examples=8, deadline=None)
@given(before=st.integers(0, 9), after=st.integers(1, 15))
def test_a_restored_place_gives_the_same_pixels(before: int, after: int) -> None:
    """The pixels are equal also with another batch size: each example has its own crop."""
    going = shard()
    draw(going, before)
    again = shard(batch_size=after)
    again.cursor.restore(going.cursor.state())
    count = 7 * after
    one, other = np.concatenate(draw(going, after)), np.concatenate(draw(again, 7))
    assert len(one) == len(other) == count
    np.testing.assert_array_equal(one, other)


def test_place_and_fork_of_a_cursor() -> None:
    cursor = Cursor(np.arange(5), 3, seed=1)
    assert cursor.place == 0
    for _ in range(4):
        cursor.next()
    assert cursor.place == 12
    ahead, before = cursor.fork(), cursor.state()
    batches = [ahead.next().tolist() for _ in range(4)]
    assert cursor.state() == before and ahead.place == 24
    assert [cursor.next().tolist() for _ in range(4)] == batches


def test_imagenet_sized_images_without_files() -> None:
    sizes = {"image_size": 16, "image_depth": 3, "nb_classes": 1000}
    dataset = registry.load("imagenet_synthetic", None, scaling=None, seed=0, **sizes)
    images = dataset.train_images
    assert len(images) == len(dataset.train_labels) == 1_281_167
    part = images.subset(np.array([3, 300, 259]))
    np.testing.assert_array_equal(part[:], images[np.array([3, 44, 3])])
    labels = dataset.train_labels[[3, 300, 259]]
    assert labels[0] == labels[2] and labels.tolist() == dataset.train_labels[[3, 44, 3]].tolist()
    assert part.shape == (3, 16, 16, 3) and images[:2].dtype == np.float32
    with pytest.raises(ConfigurationError, match="none"):
        registry.load(
            "imagenet_synthetic", None, scaling=None, seed=0, augment="crop_flip", **sizes
        )


def test_own_data_is_not_augmented() -> None:
    data = DataChoice("cifar10", None, None, "iid", None, augment="crop_flip")
    module = user_module(((np.ones((4, 5)), np.arange(4)),) * 2)
    with pytest.raises(ConfigurationError, match="--augment=crop_flip is for .* load_data"):
        load_dataset(data, types.SimpleNamespace(), module, 1)
