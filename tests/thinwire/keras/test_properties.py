"""Every source of data x rows of its batches x what a script reads of them: as Keras alone.

The values of bsp with two workers are those of Keras alone: weights, History, and the rate that a
schedule has reached after two fits. What cannot be so is refused, by name.
"""

import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.keras.runs import LOSS, RNG, assert_same, plain_model, scripts
from tests.thinwire.sharing.test_ray_data import Dataset as Rows
from thinwire import distribute
from thinwire.ops.types import ConfigurationError

CONSTANT, SHORT_LAST, VARYING, ONE_ROW = (24, 24, 24), (24, 24, 15), (24, 9, 16, 12), (24, 24, 1)
SIZES = {
    "constant": CONSTANT,
    "short last": SHORT_LAST,
    "varying": VARYING,
    "fewer than workers": ONE_ROW,
}
EPOCHS = 2
X = RNG.normal(size=(96, 6)).astype(np.float32)
Y = (np.arange(96) % 2 + 2 * (X.sum(1) > 0)).astype(np.int32)  # classes alternate


class MeanLabel(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true)


class Batches(keras.utils.PyDataset):
    def __init__(self, sizes):
        super().__init__()
        self._ends = np.cumsum(sizes)

    def __len__(self):
        return len(self._ends)

    def __getitem__(self, index):
        rows = slice(self._ends[index - 1] if index else 0, self._ends[index])
        return X[rows], Y[rows]


class RayRows(Rows):
    """Rows of two columns, with as much of Ray's interface as is used."""

    def columns(self):
        return ["x", "label"]

    def iter_batches(self, batch_size, batch_format):
        for start in range(0, len(self.rows), batch_size):
            rows = self.rows[start : start + batch_size]
            yield {"x": X[rows], "label": Y[rows]}


def _tensors(total):
    return tf.data.Dataset.from_tensor_slices((X[:total], Y[:total]))


def _of_dataset(sizes, shuffle):
    rows = _tensors(sum(sizes))
    rows = rows.shuffle(96, seed=7) if shuffle else rows
    if len(set(sizes[:-1])) == 1:
        return {"x": rows.batch(sizes[0])}
    return {"x": rows.batch(sizes[0]).take(1).concatenate(rows.skip(sizes[0]).batch(12))}


def _of_repeated_rows(sizes, shuffle):
    rows = _tensors(sum(sizes))
    rows = rows.shuffle(96, seed=7) if shuffle else rows
    return {"x": rows.repeat().batch(sizes[0]), "steps_per_epoch": len(sizes)}


def _of_repeated_batches(sizes, shuffle):
    rows = _tensors(sum(sizes))
    rows = rows.shuffle(96, seed=7) if shuffle else rows
    # Each fit begins within the rows, and an epoch ends within them.
    return {"x": rows.batch(sizes[0]).repeat(), "steps_per_epoch": len(sizes) - 1}


def _of_arrays(sizes, shuffle):
    rows = sum(sizes)
    return {"x": X[:rows], "y": Y[:rows], "batch_size": sizes[0], "shuffle": shuffle}


def _of_batches(sizes, shuffle):
    return {"x": Batches(sizes), "shuffle": shuffle}


def _of_ray(sizes, shuffle):
    return {"x": RayRows(np.arange(sum(sizes))), "y": "label", "batch_size": sizes[0]}


SOURCES = {
    "tf.data": _of_dataset,
    "tf.data, rows repeated": _of_repeated_rows,
    "tf.data, batches repeated": _of_repeated_batches,
    "PyDataset": _of_batches,
    "arrays": _of_arrays,
    "Ray Data": _of_ray,
}
#: Sources whose batches all have one size but the last; there a second `fit` has another size.
ONE_SIZE = ("tf.data, rows repeated", "tf.data, batches repeated", "arrays", "Ray Data")
#: What cannot be as alone -> words of its refusal.
REFUSED = {
    ("tf.data, batches repeated", "fewer than workers"): "workers",
}


def compiled():
    model = plain_model()
    rate = keras.optimizers.schedules.CosineDecay(0.3, 20)
    model.compile(keras.optimizers.SGD(rate), LOSS, metrics=["accuracy", MeanLabel(name="label")])
    return model


def train(model, source, rows, shuffle, is_alone=False):
    """Fit twice; return the histories and the rate at the end."""
    sizes = SIZES[rows]
    changes = rows == "varying" and source in ONE_SIZE
    firsts = (CONSTANT, (12,) * 5 + (5,)) if changes else (sizes, sizes)
    histories = []
    for batches in firsts:
        make = _of_arrays if is_alone and source == "Ray Data" else SOURCES[source]
        given = make(batches, shuffle)
        histories.append(model.fit(**given, epochs=EPOCHS, verbose=0).history)
    return histories, float(model.optimizer.learning_rate)


@pytest.fixture(autouse=True)
def _ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", types.SimpleNamespace(Dataset=Rows))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("source", SOURCES)
def test_rounds_over_data_are_keras_alone(source, rows, tmp_path):
    expected = compiled()
    histories, rate = train(expected, source, rows, False, is_alone=True)

    def script(settings):
        model = distribute(compiled(), settings)
        return model, *train(model, source, rows, False)

    with scripts(tmp_path, "bsp", 2) as run:
        if words := REFUSED.get((source, rows)):
            with pytest.raises(ConfigurationError, match=words):
                run.each(script)
            return
        for model, found, last_rate in run.each(script):
            assert_same(model, expected)
            assert last_rate == pytest.approx(rate, abs=1e-6)
            for history, wanted in zip(found, histories, strict=True):
                for name, values in wanted.items():
                    np.testing.assert_allclose(history[name], values, rtol=0, atol=1e-5)


#: Sources whose epochs have all rows, once.
WHOLE_EPOCHS = ("tf.data", "PyDataset", "arrays")


@pytest.mark.parametrize("rows", ["constant", "short last", "fewer than workers"])
@pytest.mark.parametrize("source", WHOLE_EPOCHS)
def test_shuffled_rows_are_all_rows_in_as_many_steps(source, rows, tmp_path):
    expected = compiled()
    histories, rate = train(expected, source, rows, True)

    def script(settings):
        return train(distribute(compiled(), settings), source, rows, True)

    with scripts(tmp_path, "bsp", 2) as run:
        for found, last_rate in run.each(script):
            assert last_rate == pytest.approx(rate, abs=1e-6)
            for history, wanted in zip(found, histories, strict=True):
                np.testing.assert_allclose(history["label"], wanted["label"], rtol=0, atol=1e-5)


def _by_tape(model, optimizer, sizes):
    step = tf.function(lambda x, y: _tape_step(model, optimizer, x, y), reduce_retracing=True)
    for x, y in _batches(sizes):
        step(tf.constant(x), tf.constant(y))


def _tape_step(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def _by_train_on_batch(model, _, sizes):
    for x, y in _batches(sizes):
        model.train_on_batch(x, y)


def _batches(sizes):
    ends = np.cumsum(sizes)
    return [
        (X[end - size : end], Y[end - size : end]) for size, end in zip(sizes, ends, strict=True)
    ]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("loop", [_by_tape, _by_train_on_batch])
def test_loops_whose_workers_have_the_same_batches_are_keras_alone(loop, rows, tmp_path):
    """A loop's batches are the script's own affair; its schedule counts its optimizer's steps."""
    sizes = SIZES[rows] * EPOCHS
    expected = compiled()
    loop(expected, expected.optimizer, SIZES[rows])
    loop(expected, expected.optimizer, SIZES[rows])

    def script(settings):
        model = compiled()
        optimizer = model.optimizer
        if loop is _by_tape:
            optimizer = distribute(optimizer, settings, model=model)
        else:
            model = distribute(model, settings)
        loop(model, optimizer, SIZES[rows])
        loop(model, optimizer, SIZES[rows])
        return model, float(optimizer.learning_rate)

    with scripts(tmp_path, "bsp", 2) as run:
        for model, rate in run.each(script):
            assert_same(model, expected)
            assert rate == pytest.approx(float(expected.optimizer.learning_rate), abs=1e-6)
        assert run.shards[0].core.version == len(sizes)
