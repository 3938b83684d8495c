"""Padding, pools, resizing and initial weights of the blocks, against plain numpy."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.thinwire.models.built import Built
from thinwire.models import blocks

Network = Callable[[str], Built]

GENERATOR = np.random.default_rng(11)


def apply(block: Any, images: np.ndarray) -> tuple[np.ndarray, keras.Model]:
    """Return what a block makes of images [N, height, width, channels], and its model."""
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


def layers_of(model: keras.Model, kind: type) -> list[Any]:
    return [layer for layer in model.layers if isinstance(layer, kind)]


def test_resnet50_strides_and_biases(network: Network) -> None:
    first, second = (network(f"resnet50-{v}").model for v in ("v1", "v2"))
    strided = [
        {layer.name for layer in layers_of(model, keras.layers.Conv2D) if layer.strides == (2, 2)}
        for model in (first, second)
    ]
    begins = [f"stage{stage}_block1" for stage in (2, 3, 4)]
    for names, convolution in zip(strided, ("conv1", "conv2"), strict=True):
        expected = {
            f"{begin}_{part}" for begin in begins for part in (convolution, "shortcut_conv")
        }
        assert names == {"stem_conv", *expected}
    for layer in layers_of(first, keras.layers.Conv2D):
        is_outer = layer.name.endswith(("_conv1", "_conv3"))
        assert layer.use_bias == is_outer, layer.name
    assert not any(layer.use_bias for layer in layers_of(second, keras.layers.Conv2D))
    assert len(second.get_layer("input_norm").trainable_variables) == 0
    assert len(second.get_layer("final_norm").trainable_variables) == 2


@pytest.mark.parametrize(
    ("name", "num_norms", "epsilon"), [("mobilenet-v2", 53, 1e-5), ("inception-v3", 94, 1e-3)]
)
def test_normalisation_and_activations(
    network: Network, name: str, num_norms: int, epsilon: float
) -> None:
    model = network(name).model
    norms = layers_of(model, keras.layers.BatchNormalization)
    assert len(norms) == num_norms
    assert {(norm.momentum, norm.epsilon) for norm in norms} == {(0.9, epsilon)}
    activations = layers_of(model, keras.layers.ReLU)
    is_v2 = name == "mobilenet-v2"
    assert len(activations) == num_norms - 17 * is_v2  # no activation after a projection
    assert {layer.max_value for layer in activations} == {6.0 if is_v2 else None}


def test_initial_weights_are_xavier(network: Network) -> None:
    model = network("resnet18-v1").model
    one, other = (model.get_layer(f"stage2_block2_conv{n}").kernel.numpy() for n in (1, 2))
    limit = np.sqrt(6 / (9 * 128 + 9 * 128))
    for kernel in (one, other):
        assert 0.99 * limit < np.abs(kernel).max() <= limit
        assert kernel.std() == pytest.approx(limit / np.sqrt(3), rel=0.01)
    assert (one != other).any()
    assert not model.get_layer("logits").bias.numpy().any()
