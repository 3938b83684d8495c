"""Every data source x batch rows x values that a script reads: equal to Keras alone.

bsp with two workers must give the values of Keras alone: weights, History, and the rate that a
schedule has reached. One model is fitted to all sources in sequence, so each fit except the
first continues from another fit. Combinations that cannot be equal are rejected by name.
"""

import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.data.test_ray_data import Dataset as Rows
from tests.thinwire.script.keras.runs import (
    LOSS,
    RNG,
    alone_and_shared,
    assert_weights,
    plain_model,
    scripts,
)
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


class Rates(keras.callbacks.Callback):
    """Puts the rate after each batch into History, as Keras' own callbacks read it."""

    def on_epoch_begin(self, epoch, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        logs["rates"] = self.seen


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
#: Sources with batches of one size except for the last; their fits vary in size.
ONE_SIZE = ("tf.data, rows repeated", "tf.data, batches repeated", "arrays", "Ray Data")
#: Combinations that cannot equal Keras alone -> words of the error.
REFUSED = {
    ("tf.data, batches repeated", "fewer than workers"): "workers",
}
#: Their last batch has one row, and so a worker has a step less.
LACKING = {("tf.data", "varying"), *((source, "fewer than workers") for source in SOURCES)}
#: Combinations that another source of the same kind covers as well.
ALIKE = {
    ("tf.data, rows repeated", "constant"),
    ("tf.data, rows repeated", "fewer than workers"),  # they fill the last batch, as any other
    ("PyDataset", "constant"),
    ("tf.data, batches repeated", "varying"),
    ("arrays", "varying"),
    ("Ray Data", "varying"),
    ("Ray Data", "constant"),
}


#: Sources with all rows once in each epoch.
WHOLE_EPOCHS = ("tf.data", "PyDataset", "arrays")
CELLS = [
    (source, rows, False)
    for source in SOURCES
    for rows in SIZES
    if (source, rows) not in {*REFUSED, *ALIKE}
]
#: The last: their batches have other rows on workers than alone, and so the weights are others.
#: A last batch that has rows for all workers is cut as this one, for every source.
SHUFFLED = [
    ("tf.data", "short last", True),
    *((source, "fewer than workers", True) for source in WHOLE_EPOCHS),
]


def compiled():
    model = plain_model()
    # The rate falls at every step, so that a schedule which lags shows.
    rate = keras.optimizers.schedules.ExponentialDecay(0.3, 100, 0.7)
    model.compile(keras.optimizers.SGD(rate), LOSS, metrics=["accuracy", MeanLabel(name="label")])
    return model


def data_of(source, sizes, shuffle, is_alone):
    """Return arguments of fit."""
    make = _of_arrays if is_alone and source == "Ray Data" else SOURCES[source]
    return make(sizes, shuffle)


def fit_all(place, fits):
    """Fit one model to every source and size."""
    model = place(compiled())
    is_alone = not hasattr(model, "thinwire")
    for source, rows, shuffle in (*CELLS, *SHUFFLED):
        sizes = SIZES[rows]
        if rows == "varying" and source in ONE_SIZE:
            sizes = (12,) * 5 + (5,)  # the fits before had others
        data = data_of(source, sizes, shuffle, is_alone)
        fits.fit((source, rows, shuffle), model, **data, epochs=EPOCHS, callbacks=[Rates()])


@pytest.fixture(scope="module", autouse=True)
def _ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray.data", types.SimpleNamespace(Dataset=Rows))
        yield


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    return alone_and_shared(tmp_path_factory.mktemp("fits"), fit_all)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell[:2]))
def test_rounds_over_data_are_keras_alone(fits, cell):
    expected, workers = fits[cell]
    for made in workers:
        assert_weights(made.weights, expected.weights)
        assert made.rate == pytest.approx(expected.rate, abs=1e-6)
        rates = expected.history["rates"]
        for own, known in zip(made.history["rates"], rates, strict=True):
            assert len(own) == len(known) or (cell[:2] in LACKING and len(own) == len(known) - 1)
            np.testing.assert_allclose(own, known[: len(own)], rtol=0, atol=1e-6)
        for name, values in expected.history.items():
            if name == "rates":
                continue
            np.testing.assert_allclose(made.history[name], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cell", SHUFFLED, ids=lambda cell: "-".join(cell[:2]))
def test_shuffled_rows_are_all_rows_in_as_many_steps(fits, cell):
    expected, workers = fits[cell]
    for made in workers:
        assert made.rate == pytest.approx(expected.rate, abs=1e-6)
        labels = expected.history["label"]
        np.testing.assert_allclose(made.history["label"], labels, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("cell", "words"), REFUSED.items())
def test_data_that_cannot_be_as_alone_are_refused(cell, words, tmp_path):
    source, rows = cell

    def script(settings):
        data = data_of(source, SIZES[rows], False, False)
        distribute(compiled(), settings).fit(**data, epochs=EPOCHS, verbose=0)

    with scripts(tmp_path, "bsp", 2) as run, pytest.raises(ConfigurationError, match=words):
        run.each(script)


LOOPED = ("short last", "varying")


def _by_tape(model, optimizer):
    """Return what trains on one batch."""

    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return lambda x, y: step(tf.constant(x), tf.constant(y))


def _by_train_on_batch(model, _):
    return model.train_on_batch


def _batches(sizes):
    ends = np.cumsum(sizes)
    return [
        (X[end - size : end], Y[end - size : end]) for size, end in zip(sizes, ends, strict=True)
    ]


def _loop_over_all(train, model, optimizer):
    """Return weights and rate after two passes over the batches of all sizes, by their names."""
    made = {}
    for name in LOOPED:
        for x, y in _batches(SIZES[name]) * EPOCHS:
            train(x, y)
        made[name] = model.get_weights(), float(optimizer.learning_rate)
    return made


@pytest.mark.parametrize("loop", [_by_tape, _by_train_on_batch])
def test_loops_whose_workers_have_the_same_batches_are_keras_alone(loop, tmp_path):
    """A loop's batches are the script's own affair; its schedule counts its optimizer's steps."""
    model = compiled()
    expected = _loop_over_all(loop(model, model.optimizer), model, model.optimizer)

    def script(settings):
        model = compiled()
        optimizer = model.optimizer
        if loop is _by_tape:
            optimizer = distribute(optimizer, settings, model=model)
        else:
            model = distribute(model, settings)
        return _loop_over_all(loop(model, optimizer), model, optimizer)

    with scripts(tmp_path, "bsp", 2) as run:
        for made in run.each(script):
            for name, (weights, rate) in expected.items():
                assert_weights(made[name][0], weights)
                assert made[name][1] == pytest.approx(rate, abs=1e-6), name
        assert run.shards[0].core.version == EPOCHS * sum(len(SIZES[name]) for name in LOOPED)
