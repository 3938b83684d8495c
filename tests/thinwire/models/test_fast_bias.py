"""Biases added by broadcasting: same values, no slow operation, no side effects."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from thinwire.models.fast_bias import plain_bias_sums


@pytest.fixture(scope="module")
def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            keras.layers.Conv2D(4, 3, activation="relu", bias_initializer="random_normal"),
            keras.layers.Flatten(),
            keras.layers.Dense(5, bias_initializer="random_normal"),
        ]
    )


def _traced(model: keras.Model, plain: bool) -> tuple[list[Any], set[str]]:
    """Return outputs and gradients of a model, and the types of the operations behind them."""

    @tf.function
    def step(images: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            outputs = model(images)
            loss = tf.reduce_sum(outputs**2)
        return [outputs, *tape.gradient(loss, model.trainable_variables)]

    images = tf.constant(np.random.default_rng(1).standard_normal((6, 8, 8, 2)), tf.float32)
    if plain:
        with plain_bias_sums():
            graph = step.get_concrete_function(images).graph
            found = step(images)
    else:
        graph = step.get_concrete_function(images).graph
        found = step(images)
    return [each.numpy() for each in found], {op.type for op in graph.get_operations()}


def test_values_and_gradients_are_kerass_own(model: keras.Model) -> None:
    plain, operations = _traced(model, plain=True)
    kerass, usual = _traced(model, plain=False)
    for mine, theirs in zip(plain, kerass, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-5)
    assert "BiasAddGrad" in usual  # otherwise Keras has changed, and this module can be removed
    assert "BiasAddGrad" not in operations


def test_channels_in_front_are_left_alone() -> None:
    value, bias = tf.ones((2, 3, 4, 4)), tf.constant([1.0, 2.0, 3.0])
    with plain_bias_sums():
        found = tf.nn.bias_add(value, bias, data_format="NCHW")
    np.testing.assert_array_equal(found[0, :, 0, 0], [2.0, 3.0, 4.0])


def test_an_error_while_tracing_leaves_nothing_behind() -> None:
    before = tf.nn.bias_add
    with pytest.raises(RuntimeError), plain_bias_sums():
        raise RuntimeError
    assert tf.nn.bias_add is before
