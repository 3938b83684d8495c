"""Scripts with the run's optimizer train as Keras alone does, over real connections."""

import functools

import keras
import numpy as np
import pytest

from tests.thinwire.script.keras.runs import (
    BATCH,
    LOSS,
    X,
    Y,
    alone,
    assert_same,
    plain_model,
    scripts,
)
from thinwire import W_global


def compiled(optimizer, **options):
    def make():
        model = plain_model()
        model.compile(optimizer(), loss=LOSS, metrics=["accuracy"], **options)
        return model

    return make


def cosine():
    return keras.optimizers.schedules.CosineDecay(0.05, 7)


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a script's own, which no PS can build."""

    def __call__(self, step):
        return 0.01 * keras.ops.minimum(step * 0.25, 4 / (step + 1))


OPTIMIZERS = {
    "own schedule": lambda: keras.optimizers.Adam(WarmUp()),
    "adamw": lambda: keras.optimizers.AdamW(cosine(), weight_decay=0.1, global_clipnorm=0.5),
    "averaged": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5
    ),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01, clipnorm=1.0),
}


LONG = pytest.mark.product


@pytest.mark.parametrize(
    "name",
    ["adamw", *(pytest.param(n, marks=LONG) for n in ("own schedule", "averaged", "sgd", "lamb"))],
)
def test_two_workers_of_bsp_are_keras_alone(name, tmp_path):
    make = compiled(OPTIMIZERS[name])
    expected, _ = alone(make, epochs=3)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, _ in run.fit(make, epochs=3):
            assert_same(model, expected)
            assert model.thinwire.num_exchanges == 12


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("esync", {}, marks=LONG),
        pytest.param("bsp", {"pacer": "fixed", "local_steps": 3}, marks=LONG),
        pytest.param("dgs", {"compression_rate": 1}, marks=LONG),
        ("dgs", {"compression_rate": 0.05}),
        pytest.param("dgs", {"compression_rate": 0.05, "overlap": False}, marks=LONG),
        pytest.param("gd", {"compression_rate": 0.05}, marks=LONG),
        pytest.param("dgc", {"compression_rate": 1, "warmup_epochs": 0}, marks=LONG),
    ],
)
def test_one_worker_that_steps_itself_is_keras_alone(method, settings, tmp_path):
    make = compiled(OPTIMIZERS["adamw" if settings else "own schedule"], steps_per_execution=2)
    expected, history = alone(make, epochs=3)
    with scripts(tmp_path, method, 1, **settings) as run:
        [(model, found)] = run.fit(make, epochs=3)
    assert_same(model, expected)
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4)


def normalised():
    W_global.clear()
    initial = keras.initializers.GlorotUniform
    model = keras.Sequential(
        [
            keras.Input((6,), name="in"),
            keras.layers.Dense(8, name="hidden", kernel_initializer=initial(seed=1)),
            keras.layers.BatchNormalization(name="norm", momentum=0.9),
            keras.layers.Dense(4, name="logits", kernel_initializer=initial(seed=2)),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), loss=LOSS)
    return model


@functools.cache
def normalised_alone():
    return alone(normalised, epochs=3)[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_moving_statistics_of_one_worker_are_keras_alone(overlap, tmp_path):
    expected = normalised_alone()
    with scripts(tmp_path, "dgs", 1, compression_rate=1, overlap=overlap) as run:
        [(model, _)] = run.fit(normalised, epochs=3)
    assert_same(model, expected)
    for mine, theirs in zip(
        model.non_trainable_variables, expected.non_trainable_variables, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=mine.path)


class Unbuilt(keras.Model):
    """A subclassed model with layers that have no variables before the first batch."""

    def __init__(self):
        super().__init__(name="unbuilt")
        initial = keras.initializers.GlorotUniform
        self.hidden = keras.layers.Dense(
            8, "tanh", name="hidden", kernel_initializer=initial(seed=1)
        )
        self.logits = keras.layers.Dense(4, name="logits", kernel_initializer=initial(seed=2))

    def call(self, x):
        return self.logits(self.hidden(x))


@pytest.mark.parametrize("method", ["bsp", pytest.param("esync", marks=LONG)])
def test_a_model_that_its_first_batch_builds_is_keras_alone(method, tmp_path):
    def make():
        model = Unbuilt()
        model.compile(keras.optimizers.Adam(0.01), loss=LOSS, metrics=["accuracy"])
        return model

    expected, history = alone(make, epochs=2)
    with scripts(tmp_path, method, 1) as run:
        [(model, found)] = run.fit(make, epochs=2)
    assert_same(model, expected)
    assert found["loss"] == pytest.approx(history["loss"], rel=1e-4)


class HalfBuilt(Unbuilt):
    """A model with one built trainable part before the first batch, such as a trained teacher."""

    def __init__(self):
        super().__init__()
        self.hidden.build((None, 6))


@pytest.mark.parametrize("method", ["bsp", pytest.param("dgs", marks=LONG)])
def test_an_optimizer_has_state_for_what_the_first_batch_builds(method, tmp_path):
    def make():
        model = HalfBuilt()
        model.compile(keras.optimizers.Adam(0.01), loss=LOSS)
        return model

    settings = {"compression_rate": 1} if method == "dgs" else {}
    expected, _ = alone(make, epochs=2)
    with scripts(tmp_path, method, 1, **settings) as run:
        [(model, _)] = run.fit(make, epochs=2)
    assert_same(model, expected)
    for mine, theirs in zip(model.optimizer.variables, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5, err_msg=mine.path)


def test_a_model_that_has_trained_goes_on_with_its_optimizer_s_state(tmp_path):
    """Like a loaded optimizer: moments and count reach two shards, and come back after fit."""

    def make():
        model = plain_model()
        model.compile(keras.optimizers.Nadam(0.05, use_ema=True), loss=LOSS)
        return model

    former, _ = alone(make, epochs=2)
    weights = [variable.numpy() for variable in former.trainable_variables]
    slots = [variable.numpy() for variable in former.optimizer.variables]

    def loaded():
        model = make()
        model.optimizer.build(model.trainable_variables)
        for variable, values in zip(model.trainable_variables, weights, strict=True):
            variable.assign(values)
        for variable, values in zip(model.optimizer.variables, slots, strict=True):
            variable.assign(values)
        return model

    former.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
    with scripts(tmp_path, "bsp", 2, nb_ps=2) as run:
        for model, _ in run.fit(loaded, epochs=2):
            assert_same(model, former)
            for mine, other in zip(
                model.optimizer.variables, former.optimizer.variables, strict=True
            ):
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=other.path)


@pytest.mark.parametrize("method", [pytest.param("bsp", marks=LONG), "dgs"])
def test_steps_that_run_eagerly_are_keras_alone(method, tmp_path):
    make = compiled(OPTIMIZERS["adamw"], run_eagerly=True)
    expected, _ = alone(make, epochs=1)
    settings = {"compression_rate": 1} if method == "dgs" else {}
    with scripts(tmp_path, method, 1, **settings) as run:
        [(model, _)] = run.fit(make, epochs=1)
    assert_same(model, expected)
