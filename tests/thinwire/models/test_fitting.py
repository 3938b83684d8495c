"""Examples that do not fit a model are rejected in one line, before the first step."""

import keras
import numpy as np
import pytest

from thinwire.models.fitting import check_examples
from thinwire.ops.types import ConfigurationError


def model_of(inputs, *layers, **compiled):
    model = keras.Sequential([keras.Input(inputs), *layers], name="m")
    if compiled:
        model.compile(**compiled)
    return model


def examples(*shape):
    return np.zeros((6, *shape), np.float32)


LABELS = np.array([0, 1, 2, 0, 1, 2], np.int32)


@pytest.mark.parametrize("loss", [None, "sparse_categorical_crossentropy"])
def test_labels_beyond_the_outputs_are_refused(loss):
    model = model_of((4,), keras.layers.Dense(2), **({"loss": loss} if loss else {}))
    with pytest.raises(ConfigurationError, match="training labels go up to 2, .*'m' has 2 outp"):
        check_examples(model, examples(4), LABELS)
    check_examples(model, examples(4), LABELS.clip(max=1))


def test_labels_that_are_no_classes_are_not_looked_at():
    model = model_of((4,), keras.layers.Dense(1), loss="mse")
    check_examples(model, examples(4), LABELS)
    check_examples(model_of((4,), keras.layers.Dense(1)), examples(4), LABELS.astype(np.float32))


@pytest.mark.parametrize("shape", [(5,), (4, 4), (2, 2)])
def test_inputs_of_another_width_are_refused(shape):
    with pytest.raises(ConfigurationError, match=r"test examples have the shape .*takes \(4,\)"):
        check_examples(model_of((4,), keras.layers.Dense(3)), examples(*shape), LABELS, "test")


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_what_keras_itself_mends_is_taken(shape):
    check_examples(model_of((4,), keras.layers.Dense(3)), examples(*shape), LABELS)
    check_examples(model_of((None, 1), keras.layers.GRU(3)), examples(9, 1), LABELS)


def test_what_is_not_known_is_left_to_keras():
    class Own(keras.Model):
        def call(self, x):
            return x

    check_examples(Own(), examples(4), LABELS)
    inputs = [keras.Input((2,)), keras.Input((3,))]
    two = keras.Model(inputs, keras.layers.Concatenate()(inputs))
    check_examples(two, examples(9), LABELS)
