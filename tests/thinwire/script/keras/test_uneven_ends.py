"""Workers with different numbers of steps in an epoch, or of rows in a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import (
    BATCH,
    LOSS,
    X,
    Y,
    alone,
    alone_and_shared,
    assert_same,
    assert_weights,
    plain_model,
    scripts,
)
from thinwire import distribute
from thinwire.data.partition import PartitionRule
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import WorkerPlace
from thinwire.script.keras.data_errors import explain_batch


def make():
    model = plain_model()
    model.compile(keras.optimizers.Adam(0.01), loss=LOSS, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("nb_workers", "batch_size"), [(2, 19), pytest.param(3, 20, marks=pytest.mark.product)]
)
def test_uneven_batches_of_bsp_are_keras_alone(nb_workers, batch_size, tmp_path):
    options = {"batch_size": batch_size, "epochs": 2}
    expected, history = alone(make, **options)
    with scripts(tmp_path, "bsp", nb_workers) as run:
        for model, found in run.fit(make, **options):
            assert_same(model, expected)
            np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-4)
            assert model.thinwire.num_exchanges == 2 * -(-96 // batch_size)


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def minus_the_mean(x, y):
    return x - tf.reduce_mean(x, 0), y


#: Cases that test_properties.py does not have.
FORMS = {
    "tf.data": lambda: {"x": slices().map(lambda x, y: (x * 1, y)).batch(20)},
    "batches of tf.data": lambda: {
        "x": slices()
        .shuffle(96, seed=1)
        .batch(20, drop_remainder=True)
        .map(lambda x, y: (x * 1, y))
    },
    "full batches": lambda: {"x": slices().batch(20).filter(lambda x, y: tf.shape(x)[0] == 20)},
    "batches less their mean": lambda: {"x": slices().batch(20).map(minus_the_mean)},
    "a row too many": lambda: {
        "x": slices().filter(lambda x, y: x[0] > X[:, 0].min() + 1e-9).batch(47)
    },
}


def fit_all(place, fits):
    """Fit one model to all forms of data."""
    model = plain_model()  # Keras counts a step of Adam's more where a pass ends unannounced
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS, metrics=["accuracy"])
    model = place(model)
    for name, form in FORMS.items():
        fits.fit(name, model, **form(), epochs=2, shuffle=False)


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    # A fit changes the seed of its process, in which the other worker's thread makes its data.
    tf.random.set_seed(None)
    return alone_and_shared(tmp_path_factory.mktemp("fits"), fit_all)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_scripts_batches(fits, form):
    expected, workers = fits[form]
    for made in workers:
        assert_weights(made.weights, expected.weights)


def test_a_short_batch_that_is_read_in_the_middle_is_refused_in_words(tmp_path):
    def script(settings):
        model = distribute(make(), settings)
        data = slices().filter(lambda x, y: x[0] > X[:, 0].min() + 1e-9).batch(47).repeat(2)
        model.fit(data, epochs=1, verbose=0)

    refusal = pytest.raises(ConfigurationError, match=r"batch 3 .* has 1 rows.* 2 workers")
    with scripts(tmp_path, "bsp", 2) as run, refusal:
        run.each(script)


@pytest.mark.parametrize("method", ["asgd", pytest.param("bsp", marks=pytest.mark.product)])
def test_a_worker_with_fewer_steps_holds_nobody_up(method, tmp_path):
    def script(settings):
        model = distribute(make(), settings, shard="off")
        rows = 96 if settings["id_worker"] == 1 else 24
        model.fit(X[:rows], Y[:rows], batch_size=12, epochs=2, verbose=0)
        return model

    with scripts(tmp_path, method, 2) as run:
        first, second = run.each(script)
    assert_same(first, second, atol=0)
    assert (first.thinwire.num_exchanges, second.thinwire.num_exchanges) == (16, 4)
    assert np.isfinite(first.get_weights()[0]).all()


def of_fixed_rows():
    fixed = keras.layers.Lambda(lambda x: keras.ops.reshape(x, (BATCH, 6)))
    model = keras.Sequential([keras.Input((6,)), fixed, keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    return model


def stateful():
    model = keras.Sequential(
        [keras.Input(batch_shape=(BATCH, 6, 1)), keras.layers.LSTM(4, stateful=True)]
    )
    model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    return model


def test_a_model_that_fixes_the_rows_of_a_batch_is_helped(tmp_path):
    with scripts(tmp_path, "bsp", 2) as run:
        # Traced or, while the thread of the other worker tries its step, called.
        errors = (ValueError, tf.errors.InvalidArgumentError)
        with pytest.raises(errors, match="72 (elements|values)") as raised:
            run.fit(of_fixed_rows)
        assert "--batch=worker" in raised.value.__notes__[0]
        with pytest.raises(ConfigurationError, match="lstm.* is stateful.*--shard=off"):
            run.fit(stateful)


@pytest.mark.parametrize("error", [RuntimeError("a size"), ValueError("no such column")])
def test_other_errors_of_a_first_step_stay_as_they_are(error):
    place = WorkerPlace(1, 2, True, PartitionRule("iid", 2, 0))
    explain_batch(error, place, BATCH)
    assert not hasattr(error, "__notes__")
    explain_batch(known := ValueError("Cannot reshape a tensor"), place, BATCH)
    assert len(known.__notes__) == 1
