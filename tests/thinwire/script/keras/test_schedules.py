"""Learning rate schedules are read at the batch count that the script alone would have."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import (
    LOSS,
    X,
    Y,
    assert_same,
    assert_weights,
    built,
    plain_model,
    scripts,
)
from thinwire import distribute

ROWS = 50
FEW_X, FEW_Y = X[:ROWS], Y[:ROWS]
LONG = pytest.mark.product


class Count(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is the count that it is read at; of a class of the script's own."""

    def __call__(self, step):
        return keras.ops.cast(step, "float32")

    def get_config(self):
        return {}


def cosine(steps=25):
    return keras.optimizers.schedules.CosineDecay(0.2, steps)


def counting():
    """Return a schedule that a PS can build; its rate is 0.001 times its count."""
    return keras.optimizers.schedules.PolynomialDecay(0.0, 1000, 1.0)


def compiled(optimizer):
    model = plain_model()
    model.compile(optimizer, loss=LOSS)
    return model


class Rates(keras.callbacks.Callback):
    """Reads the rate as Keras' own callbacks do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(round(float(self.model.optimizer.learning_rate), 6))


class Batches(keras.utils.PyDataset):
    """Batches of several sizes, the last of them with fewer rows than the others."""

    SIZES = (12, 20, 4, 11, 3)

    def __len__(self):
        return len(self.SIZES)

    def __getitem__(self, index):
        first = sum(self.SIZES[:index])
        rows = slice(first, first + self.SIZES[index])
        return FEW_X[rows], FEW_Y[rows]


def rows_of(number):
    return tf.data.Dataset.from_tensor_slices((X[:number], Y[:number]))


def repeated(number):
    return {"x": rows_of(number).repeat().batch(32), "steps_per_epoch": 7}


#: Arguments of the calls of `fit`; test_properties.py has other sources of data.
FORMS = {
    "repeat an odd number": lambda: [repeated(33)],
    "another size later": lambda: [
        {"x": FEW_X, "y": FEW_Y, "batch_size": 20},
        {"x": FEW_X, "y": FEW_Y, "batch_size": 8},
    ],
    "steps": lambda: [{"x": FEW_X, "y": FEW_Y, "steps_per_epoch": 4}],
}


def fit_all(model, forms):
    """Fit a model to all forms of data, one after the other.

    Returns:
        For each form the rates that a callback sees, the optimizer's count and the weights.
    """
    made = {}
    for name, calls in forms.items():
        rates = Rates()
        for call in calls():
            model.fit(**call, epochs=2, shuffle=False, verbose=0, callbacks=[rates])
        seen = [*rates.seen, round(float(model.optimizer.learning_rate), 6)]
        made[name] = seen, int(model.optimizer.iterations), model.get_weights()
    return made


def check_forms(made, expected):
    for name, (rates, count, weights) in expected.items():
        assert made[name][:2] == (rates, count), name
        assert_weights(made[name][2], weights)


def fit_at_a_count_that_is_set(model):
    """Return what `fit_all` does, and first the rate that the script reads at its count."""
    model.optimizer.iterations.assign(20)
    rate = round(float(model.optimizer.learning_rate), 6)
    return {"rate": rate} | fit_all(model, {"count that is set": FORMS["steps"]})


def test_bsp_has_the_rates_and_the_weights_of_keras_alone(tmp_path):
    """With all forms of data, and then with a count that the script sets, as the next one."""

    def train(place):
        model = place(compiled(keras.optimizers.Adam(cosine(100))))
        return fit_all(model, FORMS), fit_at_a_count_that_is_set(model)

    expected, expected_at_count = train(built)
    before = expected["steps"][0][-1]
    with scripts(tmp_path, "bsp", 2) as run:
        for made, at_count in run.each(lambda own: train(lambda model: distribute(model, own))):
            check_forms(made, expected)
            assert at_count.pop("rate") == expected_at_count["rate"] != before
            check_forms(at_count, {name: expected_at_count[name] for name in at_count})


class ReadsRates(keras.Sequential):
    """Reads its rate within each step, in the ways that scripts do."""

    def train_step(self, data):
        optimizer = self.optimizer
        schedule = optimizer._learning_rate
        rates = {"by name": optimizer.learning_rate, "by call": schedule(optimizer.iterations)}
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss, **rates}


def reading():
    model = ReadsRates(plain_model().layers)
    model.compile(keras.optimizers.Adam(counting()), loss=LOSS)
    return model


def seen_by_callbacks(model, rows, epochs=3):
    """Return the rates that the script, Keras' callbacks and logs show."""
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=100)
    rates = Rates()
    options = {"batch_size": 12, "epochs": epochs, "shuffle": False, "verbose": 0}
    callbacks = [rates, plateau]
    history = model.fit(X[:rows], Y[:rows], callbacks=callbacks, **options).history
    logged = [
        [round(float(rate), 6) for rate in history[name]] for name in history if name != "loss"
    ]
    return rates.seen, logged, round(float(model.optimizer.learning_rate), 6)


@functools.cache
def seen_alone():
    return seen_by_callbacks(built(reading()), ROWS)


@pytest.mark.parametrize(
    ("method", "nb_workers"),
    [("bsp", 2), ("dgs", 1), *(pytest.param(m, 1, marks=LONG) for m in ("asgd", "esync"))],
)
def test_scripts_and_callbacks_read_the_rate_of_keras_alone(method, nb_workers, tmp_path):
    expected = seen_alone()
    assert expected[2] == 0.015

    def script(settings):
        return seen_by_callbacks(distribute(reading(), settings), ROWS)

    with scripts(tmp_path, method, nb_workers) as run:
        for found in run.each(script):
            assert found == expected


#: Rows and batch size -> batches of an epoch of the script alone, which are no multiple of workers.
EPOCHS = {(50, 12): 5, (41, 40): 2}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("asgd", {}),
        ("dgs", {}),
        pytest.param("esync", {}, marks=LONG),
        pytest.param("bsp", {"pacer": "fixed", "local_steps": 3}, marks=LONG),
        pytest.param("bsp", {"batch": "worker"}, marks=LONG),
        pytest.param("asgd", {"batch": "global"}, marks=LONG),
    ],
)
def test_a_run_ends_with_as_many_batches_as_keras_alone(method, settings, tmp_path):
    epochs = 2

    def script(given):
        model, counts = distribute(compiled(keras.optimizers.SGD(Count())), given), []
        for number, size in EPOCHS:
            # The rates themselves are of no use: they are whole numbers.
            options = {"batch_size": size, "verbose": 0, "sample_weight": np.zeros(number)}
            model.fit(X[:number], Y[:number], epochs=epochs, **options)
            counts.append(float(model.optimizer.learning_rate))
        return counts

    with scripts(tmp_path, method, 2, **settings) as run:
        alone = [epochs * count for count in itertools.accumulate(EPOCHS.values())]
        assert run.each(script) == [alone] * 2


class Anchored(keras.Model):
    """Takes a dictionary; its first array, by name, has no rows of the batch."""

    def __init__(self):
        super().__init__()
        self.logits = keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(1))

    def call(self, inputs):
        return self.logits(inputs["image"]) * inputs["anchor_sizes"][0]


class AnchoredBatches(Batches):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"anchor_sizes": np.array([1.0, 2.0, 3.0], np.float32), "image": x}, y


def anchored(drop):
    data = rows_of(ROWS).batch(15, drop_remainder=drop)
    return data.map(lambda x, y: ({"anchor_sizes": tf.constant([1.0, 2.0, 3.0]), "image": x}, y))


ANCHORED = {
    "tf.data": lambda: [{"x": anchored(drop=False)}],
    "cut batches": lambda: [{"x": anchored(drop=True)}],
    "PyDataset": lambda: [{"x": AnchoredBatches()}],
}


def test_a_first_array_that_is_no_row_changes_no_weight(tmp_path):
    def make():
        model = Anchored()
        model({"image": X[:1], "anchor_sizes": np.ones(3, np.float32)})
        model.compile(keras.optimizers.SGD(cosine()), loss=LOSS)
        return model

    expected = fit_all(make(), ANCHORED)
    with scripts(tmp_path, "bsp", 2) as run:
        for made in run.each(lambda settings: fit_all(distribute(make(), settings), ANCHORED)):
            check_forms(made, expected)


def train_by_loop(model, optimizer, take):
    """Train by a loop of the script's own on parts of batches of 12; return the rates."""
    rates = []
    for _ in range(2):
        for first in range(0, ROWS, 12):
            rows = take(np.arange(first, min(ROWS, first + 12)))
            with tf.GradientTape() as tape:
                loss = LOSS(Y[rows], model(X[rows], training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            rates.append(round(float(optimizer.learning_rate), 6))
    return rates


@pytest.mark.parametrize("schedule", [cosine, pytest.param(Count, marks=LONG)])
def test_a_loop_reads_its_schedule_as_alone(schedule, tmp_path):
    expected, alone = plain_model(), keras.optimizers.Adam(schedule())
    alone.build(expected.trainable_variables)
    rates = train_by_loop(expected, alone, lambda rows: rows)

    def script(settings):
        model = plain_model()
        optimizer = distribute(keras.optimizers.Adam(schedule()), settings, model=model)
        own = slice(settings["id_worker"] - 1, None, 2)
        return model, train_by_loop(model, optimizer, lambda rows: rows[own])

    with scripts(tmp_path, "bsp", 2) as run:
        for model, found in run.each(script):
            assert found == rates
            if schedule is cosine:
                assert_same(model, expected)


@pytest.mark.parametrize("method", ["asgd", *(pytest.param(m, marks=LONG) for m in ("dgs", "bsp"))])
def test_the_count_goes_on_after_a_restart_of_all_processes(method, tmp_path):
    """A script that is started again has an optimizer without steps; the run has its count."""

    def script(settings):
        model = distribute(compiled(keras.optimizers.SGD(counting())), settings)
        rates = Rates()
        model.fit(FEW_X, FEW_Y, batch_size=12, epochs=1, verbose=0, callbacks=[rates])
        return rates.seen[0], round(float(model.optimizer.learning_rate), 6)

    found = []
    for _ in range(2):
        with scripts(tmp_path, method, 2) as run:
            found.append(run.each(script))
            run.interrupt()
    assert [last for results in found for _, last in results] == [0.005, 0.005, 0.01, 0.01]
    assert all(first > 0.005 for first, _ in found[1])


def test_the_count_goes_on_in_a_phase_that_begins_with_other_weights(tmp_path):
    """Without rounds there are more steps of the optimizer than batches of the script."""

    def script(settings):
        model, seen = distribute(compiled(keras.optimizers.SGD(counting())), settings), []
        for _ in range(2):
            model.fit(FEW_X, FEW_Y, batch_size=12, epochs=1, verbose=0)
            seen.append(round(float(model.optimizer.learning_rate), 6))
            model.set_weights([np.zeros_like(each) for each in model.get_weights()])
        steps = int(model.optimizer.iterations)
        model.compile(keras.optimizers.SGD(counting()), loss=LOSS)
        model.fit(FEW_X, FEW_Y, batch_size=12, epochs=1, verbose=0)
        return steps, [*seen, round(float(model.optimizer.learning_rate), 6)]

    with scripts(tmp_path, "asgd", 2) as run:
        assert run.each(script) == [(12, [0.005, 0.01, 0.005])] * 2


@pytest.mark.parametrize("method", ["dgs", pytest.param("asgd", marks=LONG)])
def test_a_batch_that_overflows_is_counted_as_alone(method, tmp_path):
    def train(settings=None):
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(counting()), initial_scale=2.0**127
        )
        model, rates = compiled(scaled), Rates()
        model = model if settings is None else distribute(model, settings)
        options = {"batch_size": 10, "shuffle": False, "verbose": 0, "callbacks": [rates]}
        weights = np.repeat(np.float32([1, 1000, 1]), [10, 10, 30])
        model.fit(FEW_X, FEW_Y, sample_weight=weights, **options)
        return rates.seen

    expected = train()
    assert expected == [0.001, 0.001, 0.002, 0.003, 0.004]
    with scripts(tmp_path, method, 1) as run:
        assert run.each(train) == [expected]


def test_a_batch_that_is_left_out_is_counted_with_the_next(tmp_path):
    holed = FEW_X.copy()
    holed[14] = np.nan  # of the second batch of five

    def script(settings):
        model = distribute(compiled(keras.optimizers.SGD(counting())), settings)
        rates = Rates()
        options = {"batch_size": 10, "shuffle": False, "verbose": 0, "callbacks": [rates]}
        model.fit(holed, FEW_Y, **options)
        return rates.seen

    with scripts(tmp_path, "asgd", 1) as run:
        assert run.each(script) == [[0.001, 0.002, 0.003, 0.004, 0.005]]
        assert run.shards[0].core.version == 4
