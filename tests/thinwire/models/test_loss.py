"""The loss of compiled and of plain models."""

from typing import Any

import keras
import numpy as np
import pytest

from thinwire.models.loss import ensure_compiled_loss
from thinwire.ops.types import ConfigurationError

LABELS = np.array([0, 2, 1], dtype=np.int32)
LOGITS = np.array([[2.0, 0, 0], [0, 1, 0], [0, 0, 3]], dtype=np.float32)
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
CROSS_ENTROPY = -np.log(PROBABILITIES[np.arange(3), LABELS]).mean()


def make(*layers: Any, loss: Any = None) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), *layers])
    if loss is not None:
        model.compile(optimizer="sgd", loss=loss)
    return model


def test_logits_by_default() -> None:
    loss = ensure_compiled_loss(make(keras.layers.Dense(3)))
    assert float(loss(LABELS, LOGITS)) == pytest.approx(CROSS_ENTROPY, rel=1e-5)


@pytest.mark.parametrize(
    "last",
    [
        lambda: keras.layers.Dense(3, activation="softmax"),
        lambda: keras.layers.Softmax(),
        lambda: keras.layers.Activation("softmax"),
        lambda: make(keras.layers.Dense(3, activation="softmax")),
    ],
)
def test_softmax_is_seen(last: Any) -> None:
    loss = ensure_compiled_loss(make(keras.layers.Dense(3), last()))
    assert float(loss(LABELS, PROBABILITIES)) == pytest.approx(CROSS_ENTROPY, rel=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        "sparse_categorical_crossentropy",
        keras.losses.SparseCategoricalCrossentropy(),
        keras.losses.sparse_categorical_crossentropy,
    ],
)
def test_compiled_loss_is_kept(given: Any) -> None:
    loss = ensure_compiled_loss(make(keras.layers.Dense(3), loss=given))
    assert isinstance(loss, keras.losses.Loss)
    assert float(loss(LABELS, PROBABILITIES)) == pytest.approx(CROSS_ENTROPY, rel=1e-5)


def test_compiled_without_a_loss() -> None:
    model = make(keras.layers.Dense(3))
    model.compile(optimizer="sgd")
    assert float(ensure_compiled_loss(model)(LABELS, LOGITS)) == pytest.approx(
        CROSS_ENTROPY, rel=1e-5
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("no_such_loss", "does not know"),
        (["mse", "mse"], "several losses"),
        ("categorical_crossentropy", "one-hot"),
        (keras.losses.CategoricalCrossentropy(), "one-hot"),
    ],
)
def test_unusable_losses(given: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        ensure_compiled_loss(make(keras.layers.Dense(3), loss=given))
