"""Losses that are sums over rows, with batches shared by workers, equal Keras alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.thinwire.script.keras.runs import (
    Batches,
    X,
    Y,
    alone,
    alone_and_shared,
    assert_same,
    assert_weights,
    scripts,
)
from thinwire import W_global, distribute
from thinwire.ops.types import ConfigurationError

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy
WEIGHTS = np.random.default_rng(8).uniform(0.5, 2, len(X)).astype(np.float32)
TARGETS = {"kind": Y, "size": X[:, :1] * 2}


def by_row(y, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)


def summed(y, y_pred):
    return tf.reduce_sum(by_row(y, y_pred))


def averaged(y, y_pred):
    return tf.reduce_mean(by_row(y, y_pred))


def both(y, y_pred):
    return summed(y, y_pred) + averaged(y, y_pred)


class Adds(keras.layers.Layer):
    """Adds a loss of its input."""

    def __init__(self, loss):
        super().__init__()
        self._loss = loss

    def call(self, inputs):
        self.add_loss(self._loss(inputs))
        return inputs


def dense(units, seed=1, **options):
    initial = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(units, kernel_initializer=initial, **options)


def sgd():
    return keras.optimizers.SGD(0.01)


def made(loss="mean", between=(), kind=keras.Model, hidden=None, optimizer=sgd, **compiled):
    """Return a function that makes a compiled model; the layers are new for each."""
    losses = {"mean": CROSSENTROPY(True), "sum": CROSSENTROPY(True, reduction="sum")}

    def make():
        W_global.clear()
        inputs = keras.Input((6,))
        value = dense(8, activation="tanh", name="hidden", **(hidden or {}))(inputs)
        for layer in between:
            value = layer()(value)
        model = kind(inputs, dense(4, 2)(value))
        chosen = losses[loss] if isinstance(loss, str) else loss
        model.compile(optimizer(), chosen, **compiled)
        return model

    return make


def added(loss):
    return lambda: Adds(loss)


class CallsComputeLoss(keras.Model):
    """Has Keras add its loss up, in a custom train_step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self._loss_tracker.result()}

    def loss_of(self, x, y, y_pred):
        return self.compute_loss(x, y, y_pred)


class OwnMean(CallsComputeLoss):
    def loss_of(self, x, y, y_pred):
        return averaged(y, y_pred) + tf.add_n(self.losses) if self.losses else averaged(y, y_pred)


class OwnSum(CallsComputeLoss):
    def loss_of(self, x, y, y_pred):
        return summed(y, y_pred)


class OwnTotal(CallsComputeLoss):
    def loss_of(self, x, y, y_pred):
        return both(y, y_pred)


class OwnComputeLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return summed(y, y_pred)


def dropout():
    return keras.layers.Dropout(0.5, seed=3)


def compare(make, tmp_path, nb_workers=2, method="bsp", **options):
    """Compare a run of fit with Keras alone: weights, and all of History."""
    expected, history = alone(make, epochs=2, **options)
    with scripts(tmp_path, method, nb_workers) as run:
        for model, logs in run.fit(make, epochs=2, **options):
            assert_same(model, expected)
            assert logs.keys() == history.keys()
            for name, values in history.items():
                np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)


SCALED = {
    "sum": made("sum", metrics=["accuracy"]),
    "function that sums": made(summed),
    "function of means": made(averaged),
    "rows": made(between=[added(lambda x: 0.1 * ops.mean(x**2, -1))]),
    "added sum": made(between=[added(lambda x: 0.1 * ops.sum(x**2))]),
    "added mean": made(between=[added(lambda x: 0.1 * ops.mean(x**2))]),
    "activity": made(hidden={"activity_regularizer": "l2"}),
    "kernel": made("sum", hidden={"kernel_regularizer": "l2"}),
    "all": made(
        "sum",
        [
            added(lambda x: ops.mean(x)),
            added(lambda x: ops.mean(x**2, -1)),
            added(lambda x: 0.1 * ops.sum(x**2)),
        ],
        hidden={"activity_regularizer": "l1", "kernel_regularizer": "l2"},
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 64),
        steps_per_execution=2,
        metrics=["accuracy"],
    ),
    "own train_step": made("sum", kind=CallsComputeLoss, hidden={"activity_regularizer": "l2"}),
    "own mean": made(kind=OwnMean, run_eagerly=True),
}


#: Cases that other cases cover as well.
LONG = ("sum", "rows", "function of means", "added sum", "added mean", "activity", "kernel")
#: Where the loss of the validation, which is not scaled, is compared as well: it has a compiled sum
#: and one that a layer adds.
VALIDATED = ("own train_step",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.product) if name in LONG else name for name in SCALED],
)
def test_a_sum_over_the_rows_is_that_of_the_whole_batch(name, tmp_path):
    """19 rows are no multiple of two workers, and the last batch has one row."""
    validation = {"validation_data": (X[:30], Y[:30])} if name in VALIDATED else {}
    compare(SCALED[name], tmp_path, batch_size=19, **validation)


@pytest.mark.parametrize("batch_size", [31, 47])
def test_three_workers_with_parts_of_any_size(batch_size, tmp_path):
    """The last batches have 3 and 2 rows; eager steps of threads do not block each other."""
    make = made("sum", hidden={"kernel_regularizer": "l2"}, run_eagerly=True)
    compare(make, tmp_path, 3, batch_size=batch_size)


def test_a_loss_that_is_0_at_first_is_a_sum_too(tmp_path):
    zeros = {"kernel_initializer": "zeros", "activity_regularizer": lambda y: ops.sum(y)}

    def make():
        W_global.clear()
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, **zeros)])
        model.compile(keras.optimizers.SGD(0.01), CROSSENTROPY(True))
        return model

    compare(make, tmp_path)


def two_outputs():
    W_global.clear()
    inputs = keras.Input((6,))
    hidden = dense(8, activation="tanh")(inputs)
    return inputs, {
        "kind": dense(4, 2, name="kind")(hidden),
        "size": dense(1, 3, name="size")(hidden),
    }


@pytest.mark.parametrize("form", [dict, list])
def test_one_of_several_outputs_is_a_sum(form, tmp_path):
    losses = {"kind": CROSSENTROPY(True), "size": keras.losses.MeanSquaredError(reduction="sum")}
    weights = {"kind": 2.0, "size": 0.3}
    take = list if form is list else dict

    def ordered(values):
        return take(values) if form is dict else list(values.values())

    def make():
        inputs, outputs = two_outputs()
        model = keras.Model(inputs, ordered(outputs))
        model.compile(keras.optimizers.SGD(0.01), ordered(losses), loss_weights=ordered(weights))
        return model

    def train(model):
        # Keras treats the losses of single outputs as means over batches, for any kind of rows.
        options = {"batch_size": 24, "shuffle": False, "verbose": 0, "epochs": 2}
        sample_weight = ordered({"kind": WEIGHTS, "size": WEIGHTS[::-1].copy()})
        return model.fit(X, ordered(TARGETS), sample_weight=sample_weight, **options).history

    expected = make()
    history = train(expected)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, logs in run.each(lambda settings: fitted(make, settings, train)):
            assert_same(model, expected)
            assert logs.keys() == history.keys()
            for name, values in history.items():
                np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)


def fitted(make, settings, train):
    model = distribute(make(), settings)
    return model, train(model)


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


DATA = {
    "PyDataset": Batches,
    "short": lambda: slices().batch(19).prefetch(2),
    "drop": lambda: slices().batch(19, drop_remainder=True).map(lambda x, y: (x, y)),
    "repeat": lambda: slices().repeat(2).batch(16),
}


def fit_other_data(place, fits):
    model = place(made("sum")())
    for name, data in DATA.items():
        fits.fit(name, model, x=data(), epochs=2, shuffle=False)


def test_the_rows_of_a_round_are_known_of_other_data(tmp_path):
    for name, (expected, workers) in alone_and_shared(tmp_path, fit_other_data).items():
        for own in workers:
            assert_weights(own.weights, expected.weights)
            losses = own.history["loss"], expected.history["loss"]
            np.testing.assert_allclose(*losses, rtol=1e-5, err_msg=name)


def test_a_batch_size_of_each_worker_is_left_as_it_is(tmp_path):
    """With --batch=worker a step is one of the script, of that size, on each worker."""
    make = made("sum")
    expected = make()
    for number in range(0, 96, 48):  # the gradients of two batches of 24, and their mean
        parts = [slice(number + worker, number + 48, 2) for worker in range(2)]
        with tf.GradientTape(persistent=True) as tape:
            losses = [expected.compute_loss(X[p], Y[p], expected(X[p])) for p in parts]
        pairs = [tape.gradient(loss, expected.trainable_variables) for loss in losses]
        mean = [(a + b) / 2 for a, b in zip(*pairs, strict=True)]
        expected.optimizer.apply(mean, expected.trainable_variables)
    with scripts(tmp_path, "bsp", 2, batch="worker") as run:
        for model, _ in run.fit(make, batch_size=24):
            assert_same(model, expected)


REFUSED = {
    "the loss 'both' of": made(both),
    "gives a value for each row": made(CROSSENTROPY(True, reduction=None)),
    "train_step of 'own_total.*adds a sum": made(kind=OwnTotal),
    "the compute_loss of 'own_compute_loss": made(kind=OwnComputeLoss),
    "own_sum.* sums its loss": made(kind=OwnSum, between=[dropout]),
    "layer 'adds.*adds a sum": made(
        between=[dropout, added(lambda x: ops.sum(x**2) + ops.mean(x**2))]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_scaled_is_refused_before_anything_is_trained(message, tmp_path):
    with scripts(tmp_path, "bsp", 2) as run:
        with pytest.raises(ConfigurationError, match=f"(?s){message}"):
            run.fit(REFUSED[message])
        assert run.shards[0].core.version == 0


def test_data_of_unknown_length_are_refused_for_a_sum(tmp_path):
    """Their last batch may be short, and no worker knows how many rows the others have.

    A mean over these data is trained in test_uneven_ends.py ("a row too many").
    """
    data = slices().filter(lambda x, y: y >= 0).batch(16)

    def script(settings):
        distribute(made("sum")(), settings).fit(data, verbose=0)

    with scripts(tmp_path, "bsp", 2) as run:
        with pytest.raises(ConfigurationError, match="the number of rows .* is not known"):
            run.each(script)
        assert run.shards[0].core.version == 0


def test_a_batch_that_the_script_does_not_share_is_summed_as_it_is(tmp_path):
    expected = made("sum")().train_on_batch(X[:24], Y[:24])

    def script(settings):
        return distribute(made("sum")(), settings).train_on_batch(X[:24], Y[:24])

    with scripts(tmp_path, "bsp", 2) as run:
        assert run.each(script) == pytest.approx([expected] * 2, rel=1e-5)
