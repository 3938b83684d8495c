"""Weights that a script sets during training, against Keras alone."""

import keras
import numpy as np
import pytest

from tests.thinwire.script.keras.runs import LOSS, alone, assert_same, plain_model, scripts
from tests.thinwire.script.keras.test_train_steps import GAN, assert_same_optimizers, fitted, gan
from thinwire import ConfigurationError

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}


class Clip(keras.callbacks.Callback):
    """Clips all weights after every batch."""

    bound = 0.4

    @property
    def variables(self):
        return self.model.trainable_variables

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.variables:
            variable.assign(keras.ops.clip(variable, -self.bound, self.bound))


class ClipRaw(Clip):
    """Does so with TensorFlow's variables."""

    @property
    def variables(self):
        return [variable.value for variable in self.model.trainable_variables]


class SetAtEnd(keras.callbacks.Callback):
    """Sets other weights at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights([values / 2 + 0.01 for values in self.model.get_weights()])


class Lookahead(keras.callbacks.Callback):
    """Goes back halfway to where it was three batches before."""

    def on_train_begin(self, logs=None):
        self.slow, self.count = self.model.get_weights(), 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.count % 3 == 0:
            pairs = zip(self.slow, self.model.get_weights(), strict=True)
            self.slow = [slow + 0.5 * (fast - slow) for slow, fast in pairs]
            self.model.set_weights(self.slow)


class SwapAverages(keras.callbacks.Callback):
    """Has its averages in the model from the end of an epoch to the begin of the next."""

    def on_train_begin(self, logs=None):
        self.averages, self.kept = self.model.get_weights(), None

    def on_train_batch_end(self, batch, logs=None):
        pairs = zip(self.averages, self.model.get_weights(), strict=True)
        self.averages = [0.8 * mean + 0.2 * value for mean, value in pairs]

    def on_epoch_end(self, epoch, logs=None):
        self.kept = self.model.get_weights()
        self.model.set_weights(self.averages)

    def on_epoch_begin(self, epoch, logs=None):
        if self.kept is not None:
            self.model.set_weights(self.kept)


def compiled(make, **options):
    def made():
        model = plain_model()
        model.compile(make(), loss=LOSS, **options)
        return model

    return made


def product(*values):
    return pytest.param(*values, marks=pytest.mark.product)


@pytest.mark.parametrize(
    ("name", "callback", "nb_ps"),
    [
        ("adam", Clip, 2),
        *(
            product(name, callback, nb_ps)
            for name in OPTIMIZERS
            for callback in (Clip, SetAtEnd, Lookahead, SwapAverages)
            for nb_ps in (1, 2)
            if (name, callback, nb_ps) != ("adam", Clip, 2)
        ),
    ],
)
def test_weights_that_callbacks_set_count_as_alone(name, callback, nb_ps, tmp_path):
    make = compiled(OPTIMIZERS[name])
    expected, _ = alone(make, callbacks=[callback()], epochs=2)
    with scripts(tmp_path, "bsp", 2, nb_ps) as run:
        found = run.fit(make, callbacks=lambda: [callback()], epochs=2)
    for model, _ in found:
        assert_same(model, expected)
        pairs = zip(model.optimizer.variables, expected.optimizer.variables, strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5, err_msg=mine.path)


#: Method, workers and flags of runs that are as Keras alone.
RUNS = [("bsp", 2, {}), ("dgs", 1, {"compression_rate": 1})]


class WGAN(GAN):
    """Clips its critic's weights after each of two steps."""

    critics, bound = 2, 0.3


class ClipsCritic(Clip):
    """Does so after each batch."""

    @property
    def variables(self):
        return self.model.discriminator.trainable_variables


@pytest.mark.product
@pytest.mark.parametrize(
    ("kind", "callbacks", "nb_ps"),
    [(WGAN, (), 1), (WGAN, (), 2), (GAN, (ClipsCritic,), 2)],
    ids=["train_step", "shards", "callback"],
)
@pytest.mark.parametrize(("method", "nb_workers", "settings"), RUNS)
def test_a_critic_is_clipped_as_alone(
    kind, callbacks, nb_ps, method, nb_workers, settings, tmp_path
):
    make = gan(kind)
    expected, _ = fitted(make, callbacks=[each() for each in callbacks])
    with scripts(tmp_path, method, nb_workers, nb_ps, **settings) as run:
        for model, _ in run.each(
            lambda settings: fitted(make, settings, callbacks=[each() for each in callbacks])
        ):
            assert_same(model, expected)
            assert_same_optimizers(model, expected)
    largest = max(np.abs(v).max() for v in expected.discriminator.trainable_variables)
    assert largest <= max(WGAN.bound, Clip.bound)


def averaging():
    model = plain_model()
    model.compile(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8), loss=LOSS)
    return model


def constrained():
    model = plain_model()
    for layer in model.layers:
        layer.kernel.constraint = keras.constraints.MaxNorm(0.8)
    model.compile(keras.optimizers.Adam(0.05), loss=LOSS)
    return model


def normalized():
    """Return a model with one layer that divides its weights whenever it is called."""
    model = plain_model()
    inner = keras.layers.Dense(
        8, name="inner", kernel_initializer=keras.initializers.GlorotUniform(seed=3)
    )
    layers = [keras.layers.SpectralNormalization(inner, name="normalized"), *model.layers[1:]]
    model = keras.Sequential([keras.Input((6,)), *layers], name="toy")
    layers[0].vector_u.assign(keras.ops.ones_like(layers[0].vector_u))
    model.compile(keras.optimizers.Adam(0.05), loss=LOSS)
    return model


@pytest.mark.product
@pytest.mark.parametrize(("method", "nb_workers", "settings"), RUNS)
@pytest.mark.parametrize(
    ("make", "callbacks", "options"),
    [
        (averaging, (keras.callbacks.SwapEMAWeights,), {}),
        (constrained, (Clip,), {}),
        (normalized, (), {}),
        (compiled(OPTIMIZERS["adam"], steps_per_execution=2), (SetAtEnd,), {}),
        (compiled(OPTIMIZERS["adam"], run_eagerly=True), (Clip,), {}),
        (compiled(OPTIMIZERS["adam"]), (Clip,), {"batch_size": 20}),
        (compiled(OPTIMIZERS["adam"]), (ClipRaw,), {}),
        (compiled(OPTIMIZERS["momentum"]), (Lookahead,), {}),
    ],
    ids=["swap", "constraint", "spectral", "several", "eager", "uneven", "raw", "lookahead"],
)
def test_other_scripts_that_set_weights(
    make, callbacks, options, method, nb_workers, settings, tmp_path
):
    def given():
        return [each() for each in callbacks]

    expected, _ = alone(make, callbacks=given(), epochs=3, **options)
    with scripts(tmp_path, method, nb_workers, **settings) as run:
        found = run.fit(make, callbacks=given, epochs=3, **options)
    for model, _ in found:
        assert_same(model, expected)


class AddsOnce(keras.callbacks.Callback):
    """Adds to all weights after the third batch."""

    def on_train_begin(self, logs=None):
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.count == 3:
            self.model.set_weights([values + 1 for values in self.model.get_weights()])


METHODS = {
    "asgd": {},
    "ssp": {"staleness_bound": 3},
    "gsp": {"groups": "1|2"},
    "adacomp": {"compression_rate": 0.1},
    "bsp": {"overlap": True},
    "dgt": {},
    "dgs": {"compression_rate": 0.1},
    "gd": {"overlap": False},
    "dgc": {"dgc_momentum": 0.5},
}


@pytest.mark.parametrize("method", [name if name == "asgd" else product(name) for name in METHODS])
def test_what_all_workers_change_counts_once(method, tmp_path):
    make = compiled(lambda: keras.optimizers.SGD(0.0))
    with scripts(tmp_path, method, 2, **METHODS[method]) as run:
        found = run.fit(make, callbacks=lambda: [AddsOnce()], epochs=3)
        theta = central(run)
    np.testing.assert_allclose(theta, flat_of(make()) + 1, rtol=0, atol=1e-5)
    for model, _ in found:
        np.testing.assert_allclose(flat_of(model), theta, rtol=0, atol=1e-5)


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
def test_what_workers_do_again_and_again_goes_too_far_by_half_at_most(method, tmp_path):
    """In a round by nothing; else where one has done it twice before another's first arrives."""
    make = compiled(lambda: keras.optimizers.SGD(0.0))
    initial = flat_of(make())
    with scripts(tmp_path, method, 2, **METHODS[method]) as run:
        run.fit(make, callbacks=lambda: [Clip()], epochs=3)
        theta = central(run)
    size, clipped = np.abs(initial), np.clip(initial, -Clip.bound, Clip.bound)
    assert np.abs(theta).max() <= Clip.bound + 1e-2
    too_far = 0 if method in ("bsp", "dgt") else (size - np.abs(clipped)) / 2
    assert (np.abs(theta - clipped) <= too_far + 1e-2).all()


def central(run):
    (shard,) = run.shards.values()
    return shard.core.model.theta.copy()


def flat_of(model):
    return np.concatenate([np.ravel(variable) for variable in model.trainable_variables])


@pytest.mark.product
def test_a_run_that_takes_only_updates_refuses_by_name(tmp_path):
    make = compiled(OPTIMIZERS["adam"])
    with (
        scripts(tmp_path, "bsp", 1, max_update_norm=100) as run,
        pytest.raises(ConfigurationError, match="set weights of 'toy' itself.*--max_update_norm"),
    ):
        run.fit(make, callbacks=lambda: [Clip()], epochs=2)
