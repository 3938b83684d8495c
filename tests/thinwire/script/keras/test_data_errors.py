"""Data that does not fit a script's model is rejected in one line, in every form."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import LOSS, X, Y, plain_model, scripts
from thinwire import distribute
from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.data_errors import refusing_unfit

WIDE = np.zeros((24, 7), np.float32)
HIGH = np.arange(24) % 6
ONE_HOT = np.eye(5, dtype=np.float32)[np.arange(24) % 5]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return X[:12], HIGH[:12]


def generated():
    while True:
        yield WIDE, Y[:24]


def of_two():
    inputs = {name: keras.Input((size,), name=name) for name, size in (("a", 6), ("b", 2))}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    return keras.Model(inputs, keras.layers.Dense(4)(joined), name="two")


def compiled(model, loss=LOSS, **keywords):
    model.compile("sgd", loss, **keywords)
    return model


LABELS = r"a batch has the label [45], and 'toy' has 4 outputs; expected labels 0 to 3\. \w"
WIDTH = r"a batch does not fit 'toy', which takes \(None, 6\): .*\((None|12), 7\)\. \w"
#: Name -> model, arguments of fit, words of the line.
FORMS = {
    "labels": (plain_model, {"x": X[:24], "y": HIGH}, LABELS),
    "labels below 0": (plain_model, {"x": X[:24], "y": Y[:24] - 1}, "the label -1"),
    "labels of tf.data": (
        plain_model,
        {"x": tf.data.Dataset.from_tensor_slices((X[:24], HIGH)).batch(12)},
        LABELS,
    ),
    "labels of a PyDataset": (plain_model, {"x": Batches()}, LABELS),
    "labels in one place each": (
        plain_model,
        {"x": X[:24], "y": ONE_HOT, "loss": "categorical_crossentropy"},
        r"\(12, 5\), and 'toy' has outputs .*\(12, 4\)",
    ),
    "values": (
        plain_model,
        {"x": X[:24], "y": ONE_HOT, "loss": "mse"},
        r"\[12,5\], and 'toy' has outputs .*\[12,4\]",
    ),
    "width": (plain_model, {"x": WIDE, "y": Y[:24]}, WIDTH),
    "rank": (
        plain_model,
        {"x": WIDE.reshape(12, 2, 7), "y": Y[:12]},
        r"takes \(None, 6\): Expected",
    ),
    "width of tf.data": (
        plain_model,
        {"x": tf.data.Dataset.from_tensor_slices((WIDE, Y[:24])).batch(12)},
        WIDTH,
    ),
    "width of a generator": (plain_model, {"x": generated(), "steps_per_epoch": 2}, WIDTH),
    "width in a dict": (
        of_two,
        {"x": {"a": X[:24], "b": X[:24, :3]}, "y": Y[:24]},
        r"'two', which takes .*name 'b' of .*shape=\(None, 2\), found shape=\(12, 3\)",
    ),
    "an input that is missing": (of_two, {"x": {"a": X[:24]}, "y": Y[:24]}, "'two'.*input \"b\""),
    "labels to validate by": (
        plain_model,
        {"x": X[:24], "y": Y[:24], "validation_data": (X[:24], HIGH)},
        LABELS,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_of_every_form_is_refused_in_one_line(form):
    make, arguments, words = FORMS[form]
    model = compiled(make(), arguments.get("loss", LOSS))
    given = {name: value for name, value in arguments.items() if name != "loss"}
    with pytest.raises(ConfigurationError, match=words) as raised, refusing_unfit(model):
        model.fit(**given, batch_size=None if "steps_per_epoch" in given else 12, verbose=0)
    assert len(str(raised.value).splitlines()) == 1 and "\x1b" not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such column"),
        ValueError("expected shape=(24, 6), found shape=(12, 6)"),
        RuntimeError("a label value of 4 which is outside the valid range of [0, 3)"),
    ],
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, refusing_unfit(plain_model()):
        raise error
    assert raised.value is error


def fit(model):
    model.fit(X, Y + 1, verbose=0)


def train_on_batch(model):
    model.train_on_batch(X[:24], Y[:24])
    model.train_on_batch(X[:24], HIGH)


@pytest.mark.parametrize("train", [fit, pytest.param(train_on_batch, marks=pytest.mark.product)])
def test_a_worker_of_a_run_refuses_them(train, tmp_path):
    with scripts(tmp_path, "bsp", 1) as run, pytest.raises(ConfigurationError, match="has 4 outp"):
        run.each(lambda settings: train(distribute(compiled(plain_model()), settings)))
