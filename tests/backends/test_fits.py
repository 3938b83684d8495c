"""`fit` as a worker on each backend: layers with state, data, losses, metrics, callbacks."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.backends.fits import (
    BATCH,
    LOSS,
    TOLERANCE,
    X,
    Y,
    alone,
    compiled,
    difference,
    scripts,
)
from tests.thinwire.script.keras.runs import Batches
from thinwire import distribute


def adam():
    return keras.optimizers.Adam(0.02)


def sgd():
    return keras.optimizers.SGD(0.1)


@pytest.mark.parametrize("method", ["bsp", "dgs"])
def test_one_worker_is_keras_alone(method, tmp_path):
    """One worker: the same arithmetic, but for the order of float32 sums."""
    make = compiled(
        sgd, layers.BatchNormalization, lambda: layers.Dropout(0.3, seed=5), metrics=("accuracy",)
    )
    expected, _ = alone(make, epochs=3)
    settings = {"compression_rate": 1} if method == "dgs" else {}
    with scripts(tmp_path, method, 1, **settings) as run:
        [(model, _)] = run.fit(make, epochs=3)
    assert difference(model, expected) <= 1e-6


def test_moving_statistics_are_averaged(tmp_path):
    """The batches' halves differ, so the workers' own statistics would."""
    make = compiled(sgd, layers.BatchNormalization)
    with scripts(tmp_path, "bsp", 2) as run:
        (first, _), (second, _) = run.fit(make, epochs=2)
    assert difference(first, second) == 0
    mean = first.layers[1].moving_mean.numpy()
    assert np.abs(mean).max() > 1e-3


@pytest.mark.parametrize("method", ["asgd", "dgs", "diloco"])
def test_methods_train(method, tmp_path):
    settings = {"local_steps": 3} if method == "diloco" else {}
    with scripts(tmp_path, method, 2, **settings) as run:
        for model, history in run.fit(compiled(adam), epochs=6):
            assert history["loss"][-1] < history["loss"][0]
            assert model.thinwire.last.version > 0


def test_batches_of_a_dataset_with_a_short_last_one(tmp_path):
    make = compiled(adam)
    expected, _ = alone(make, x=Batches(), y=None, epochs=2)

    def script(settings):
        model = distribute(make(), settings)
        model.fit(Batches(), epochs=2, shuffle=False, verbose=0)
        return model

    with scripts(tmp_path, "bsp", 2) as run:
        for model in run.each(script):
            assert difference(model, expected) <= TOLERANCE


def test_a_scaled_loss(tmp_path):
    """Mixed precision: the server keeps the loss scale."""

    def make():
        policy = keras.DTypePolicy("mixed_float16")
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="tanh", dtype=policy, name="a"),
                layers.Dense(4, dtype=policy, name="b"),
                layers.Activation("linear", dtype="float32"),
            ],
            name="mixed",
        )
        model.set_weights([np.full(w.shape, 0.1, w.dtype) + i for i, w in enumerate(model.weights)])
        scaled = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)
        model.compile(scaled, loss=LOSS)
        return model

    expected, _ = alone(make, epochs=3)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, _ in run.fit(make, epochs=3):
            assert difference(model, expected) <= 2e-3  # float16 rounds halves of a batch apart
    with scripts(tmp_path / "dgs", "dgs", 1, compression_rate=1) as run:
        [(model, _)] = run.fit(make, epochs=3)
    assert difference(model, expected) <= 2e-3


class Penalty(layers.Layer):
    """Adds the sum of squares of its inputs to the loss."""

    def call(self, inputs):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(inputs)))
        return inputs


def summed():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def own_sum(y_true, y_pred):
    """Return a sum over rows, which Keras' reduction does not show."""
    values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return keras.ops.sum(values)


@pytest.mark.parametrize("case", ["summed", "own_sum", "added"])
def test_losses_that_are_sums_over_rows(case, tmp_path):
    loss = {"summed": summed(), "own_sum": own_sum, "added": LOSS}[case]
    middle = (Penalty,) if case == "added" else ()
    make = compiled(lambda: keras.optimizers.SGD(0.003), *middle, loss=loss)
    expected, _ = alone(make, epochs=2)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, _ in run.fit(make, epochs=2):
            assert difference(model, expected) <= TOLERANCE


class Positives(keras.metrics.Metric):
    """Counts predictions of class 0: a metric of the script's own that only adds."""

    def __init__(self, name="positives"):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        is_first = keras.ops.equal(keras.ops.argmax(y_pred, -1), 0)
        self.count.assign_add(keras.ops.sum(keras.ops.cast(is_first, "float32")))

    def result(self):
        return self.count.value


def test_metrics_are_merged(tmp_path):
    make = compiled(adam, metrics=("accuracy", Positives))
    _, history = alone(make, epochs=3)
    with scripts(tmp_path, "bsp", 2) as run:
        for _, shared in run.fit(make, epochs=3):
            assert shared["accuracy"] == pytest.approx(history["accuracy"], abs=1e-6)
            assert shared["positives"] == pytest.approx(history["positives"], abs=1e-6)


class Looks(keras.callbacks.Callback):
    """Reads and sets the model in the middle of an epoch, as a script's callback may."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.seen.append(float(np.abs(self.model.get_weights()[0]).sum()))
            self.seen.append(self.model.evaluate(X[:24], Y[:24], verbose=0)[0])

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.optimizer.learning_rate = 0.01


def test_callbacks_read_and_set_the_model(tmp_path):
    make = compiled(sgd)
    looks = Looks()
    expected, _ = alone(make, epochs=3, callbacks=[looks])
    seen = []

    def callbacks():
        seen.append(Looks())
        return [seen[-1]]

    with scripts(tmp_path, "bsp", 2) as run:
        for model, _ in run.fit(make, epochs=3, callbacks=callbacks):
            assert difference(model, expected) <= TOLERANCE
    for callback in seen:
        assert callback.seen == pytest.approx(looks.seen, abs=1e-4)


def test_two_fits_with_another_compile_and_files(tmp_path):
    """EarlyStopping, ModelCheckpoint in mid-epoch, BackupAndRestore; then another optimizer."""

    def train(model, folder):
        folder.mkdir(exist_ok=True)
        callbacks = [
            keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(
                str(folder / "mid.weights.h5"), save_freq=3, save_weights_only=True
            ),
            keras.callbacks.BackupAndRestore(str(folder / "backup")),
        ]
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(X, Y, epochs=2, callbacks=callbacks, **options)
        model.compile(adam(), loss=LOSS, metrics=["accuracy"])
        model.fit(X, Y, epochs=2, **options)
        return model

    make = compiled(sgd, layers.BatchNormalization)
    expected = train(make(), tmp_path / "alone")
    with scripts(tmp_path / "run", "bsp", 2, batch="worker") as run:
        models = run.each(lambda own: train(distribute(make(), own), tmp_path / "shared"))
    assert difference(*models) == 0
    assert (tmp_path / "shared" / "mid.weights.h5").exists()
    assert difference(models[0], expected) < 1.0


def test_a_refused_first_step_leaves_the_weights(tmp_path):
    """An error before the first exchange must not cost the script its model."""
    from thinwire import ConfigurationError

    class Own(keras.optimizers.SGD):
        """A class of the script, which a PS cannot build."""

    make = compiled(lambda: keras.optimizers.SGD(0.1))
    before = make().get_weights()

    def script(settings):
        model = distribute(make(), settings)
        model.optimizer = None
        model.compile(Own(0.1), loss=LOSS)
        with pytest.raises(ConfigurationError):
            model.fit(X, Y, batch_size=BATCH, verbose=0)
        return model

    with scripts(tmp_path, "bsp", 1) as run:
        [model] = run.each(script)
    for value, known in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, known)
