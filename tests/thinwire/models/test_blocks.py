"""Padding, pooling and resizing of the blocks equal plain numpy."""

from typing import Any

import keras
import numpy as np
import pytest

from thinwire.models import blocks

GENERATOR = np.random.default_rng(11)


def apply(block: Any, images: np.ndarray) -> tuple[np.ndarray, keras.Model]:
    """Return a block's output for images [N, height, width, channels], and its model."""
    inputs = keras.Input(images.shape[1:])
    model = keras.Model(inputs, block(inputs))
    return model(images).numpy(), model


def convolve(
    images: np.ndarray, kernel: np.ndarray, strides: int, margins: tuple[int, int]
) -> np.ndarray:
    """Convolve [N, h, w, c] with [kh, kw, c, filters], zeros on each side."""
    rows, columns = margins
    padded = np.pad(images, ((0, 0), (rows, rows), (columns, columns), (0, 0)))
    height = (padded.shape[1] - kernel.shape[0]) // strides + 1
    width = (padded.shape[2] - kernel.shape[1]) // strides + 1
    result = np.zeros((len(images), height, width, kernel.shape[3]))
    for row in range(height):
        for column in range(width):
            y, x = row * strides, column * strides
            window = padded[:, y : y + kernel.shape[0], x : x + kernel.shape[1]]
            result[:, row, column] = np.tensordot(window, kernel, 3)
    return result


@pytest.mark.parametrize(
    ("size", "kernel", "strides", "padding", "margins"),
    [
        (8, 3, 1, None, (1, 1)),
        (8, 3, 2, None, (1, 1)),
        (7, 3, 2, None, (1, 1)),
        (28, 7, 2, None, (3, 3)),
        (8, 1, 2, None, (0, 0)),
        (8, 3, 2, 0, (0, 0)),
        (8, 3, 1, 0, (0, 0)),
        (27, 11, 4, 2, (2, 2)),
        (9, (1, 7), 1, None, (0, 3)),
        (9, (7, 1), 1, None, (3, 0)),
    ],
)
def test_convolution(
    size: int, kernel: Any, strides: int, padding: int | None, margins: tuple[int, int]
) -> None:
    images = GENERATOR.standard_normal((2, size, size, 3)).astype(np.float32)
    result, model = apply(
        lambda x: blocks.convolution(x, 4, kernel, "conv", strides=strides, padding=padding),
        images,
    )
    (weights,) = model.get_layer("conv").weights
    expected = convolve(images, weights.numpy(), strides, margins)
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize("strides", [1, 2])
def test_depthwise_convolution(strides: int) -> None:
    images = GENERATOR.standard_normal((2, 6, 6, 3)).astype(np.float32)
    result, model = apply(lambda x: blocks.depthwise_convolution(x, "conv", strides), images)
    (weights,) = model.get_layer("conv").weights  # [3, 3, channels, 1]
    for channel in range(3):
        one = slice(channel, channel + 1)
        expected = convolve(images[..., one], weights.numpy()[:, :, one], strides, (1, 1))
        np.testing.assert_allclose(result[..., one], expected, atol=1e-5)


def test_max_pool_is_symmetric() -> None:
    images = np.zeros((1, 6, 6, 1), np.float32)
    images[0, 1, 1], images[0, 4, 2] = 3, 5
    result, _ = apply(lambda x: blocks.max_pool(x, "pool", padding=1), images)
    # Windows begin at -1, 1 and 3, not at 0, 2 and 4.
    assert result[0, :, :, 0].tolist() == [[3, 3, 0], [3, 3, 0], [0, 5, 0]]
    result, _ = apply(lambda x: blocks.max_pool(x, "pool"), images)
    assert result[0, :, :, 0].tolist() == [[3, 0], [5, 5]]


def test_average_pool_counts_the_border() -> None:
    result, _ = apply(lambda x: blocks.average_pool(x, "pool"), np.ones((1, 3, 3, 1), np.float32))
    assert np.round(result[0, :, :, 0] * 9).tolist() == [[4, 6, 4], [6, 9, 6], [4, 6, 4]]


def test_relu_limit() -> None:
    values = np.array([[[[-1.0, 5.0, 7.0]]]], np.float32)
    assert apply(lambda x: blocks.relu(x, "relu"), values)[0].ravel().tolist() == [0, 5, 7]
    assert apply(lambda x: blocks.relu(x, "relu", 6.0), values)[0].ravel().tolist() == [
        0,
        5,
        6,
    ]


def test_images_are_resized_bilinearly() -> None:
    model = keras.Model(*blocks.images(2, 1, resize_to=4))
    image = np.array([[0.0, 1.0], [0.0, 1.0]], np.float32)[None, :, :, None]
    np.testing.assert_allclose(model(image)[0, 2, :, 0], [0, 0.25, 0.75, 1], atol=1e-6)
    inputs, x = blocks.images(4, 1, resize_to=4)
    assert x is inputs
