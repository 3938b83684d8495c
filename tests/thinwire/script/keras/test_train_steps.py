"""A custom train_step with several optimizers equals Keras alone on the same data."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import BATCH, X, assert_same, scripts
from thinwire import W_global, distribute
from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.plan import PlannedStep, StepPlan

schedules = keras.optimizers.schedules
#: Noise is data, so that all see the same.
NOISE = np.random.default_rng(5).normal(size=(len(X), 3)).astype(np.float32)


def network(name, inputs, outputs, seed):
    initial = keras.initializers.GlorotUniform
    return keras.Sequential(
        [
            keras.Input((inputs,), name=f"{name}_in"),
            keras.layers.Dense(8, "tanh", name="hidden", kernel_initializer=initial(seed)),
            keras.layers.Dense(outputs, name="out", kernel_initializer=initial(seed + 1)),
        ],
        name=name,
    )


class GAN(keras.Model):
    """Two networks; the compiled optimizer is only a dummy."""

    critics = 1  # steps of the discriminator for one of the generator
    bound = None  # clip bound of the discriminator's weights

    def __init__(self):
        super().__init__(name="gan")
        self.generator = network("generator", 3, 6, 1)
        self.discriminator = network("discriminator", 6, 1, 3)

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        real, noise = data
        ones, zeros = tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])
        for _ in range(self.critics):
            with tf.GradientTape() as tape:
                d_loss = self.loss_of(ones, self.discriminator(real)) + self.loss_of(
                    zeros, self.discriminator(self.generator(noise))
                )
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
            for weight in weights if self.bound else ():
                weight.assign(tf.clip_by_value(weight, -self.bound, self.bound))
        with tf.GradientTape() as tape:
            g_loss = self.loss_of(ones, self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def gan(kind=GAN, has_schedules=False, **options):
    def make():
        W_global.clear()
        model = kind()
        falling, cosine = schedules.ExponentialDecay(0.01, 7, 0.5), schedules.CosineDecay(0.05, 25)
        d_optimizer = keras.optimizers.Adam(falling if has_schedules else 0.01)
        g_optimizer = keras.optimizers.SGD(cosine if has_schedules else 0.05, momentum=0.9)
        model.compile(d_optimizer, g_optimizer, **options)
        return model

    return make


def fitted(make, settings=None, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 2} | options
    model = make()
    if settings is not None:
        model = distribute(model, settings)
    return model, model.fit(X, NOISE, **options).history


def rates_of(model):
    return [round(float(each.learning_rate), 6) for each in (model.d_optimizer, model.g_optimizer)]


def assert_same_optimizers(model, other):
    for name in ("d_optimizer", "g_optimizer"):
        pairs = zip(getattr(model, name).variables, getattr(other, name).variables, strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5, err_msg=mine.path)


class ManyCritics(GAN):
    """A GAN with several critic steps per step, as WGAN has."""

    critics = 2


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        (ManyCritics, {"has_schedules": True}, {"nb_ps": 2}),
        (GAN, {}, {}),
        pytest.param(GAN, {"run_eagerly": True}, {}, marks=pytest.mark.product),
        pytest.param(GAN, {"steps_per_execution": 2}, {}, marks=pytest.mark.product),
    ],
    ids=["critics", "graph", "eager", "several"],
)
def test_both_optimizers_of_a_gan_step_on_the_ps_as_alone(kind, options, settings, tmp_path):
    make = gan(kind, **options)
    expected, history = fitted(make)
    with scripts(tmp_path, "bsp", 2, **settings) as run:
        found = run.each(lambda settings: fitted(make, settings))
        for model, logs in found:
            assert_same(model, expected)
            assert_same_optimizers(model, expected)
            assert rates_of(model) == rates_of(expected), "each counts its own steps"
            assert logs.keys() == history.keys()
        core = run.shards[0].core
        steps = 2 * len(X) // BATCH
        assert (core.version, core.samples) == (steps * (kind.critics + 1), 2 * len(X))


class Falls(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a script's own, which no PS can build."""

    def __init__(self, initial):
        self.initial = initial

    def __call__(self, step):
        return self.initial / (1 + 0.3 * keras.ops.cast(step, "float32"))


@pytest.mark.product
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("nb_workers", [1, 2])
def test_each_optimizer_of_a_gan_may_have_a_schedule_of_its_own(nb_workers, eager, tmp_path):
    def make():
        W_global.clear()
        model = ManyCritics()
        discriminates = keras.optimizers.Adam(Falls(0.02))
        model.compile(discriminates, keras.optimizers.SGD(Falls(0.1)), run_eagerly=eager)
        return model

    expected, _ = fitted(make)
    with scripts(tmp_path, "bsp", nb_workers) as run:
        for model, _ in run.each(lambda settings: fitted(make, settings)):
            assert_same(model, expected)
            assert_same_optimizers(model, expected)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dgs", {"compression_rate": 1}),
        pytest.param("esync", {}, marks=pytest.mark.product),
    ],
    ids=["dgs", "esync"],
)
def test_both_optimizers_of_a_gan_step_on_the_worker_with_one_exchange(method, settings, tmp_path):
    expected, _ = fitted(gan())
    with scripts(tmp_path, method, 1, **settings) as run:
        ((model, _),) = run.each(lambda settings: fitted(gan(), settings))
        assert_same(model, expected)
        assert_same_optimizers(model, expected)
        assert run.shards[0].core.version <= 2 * len(X) // BATCH


@pytest.mark.product
def test_workers_with_uneven_parts_of_the_data_train_a_gan(tmp_path):
    def script(settings):
        model = distribute(gan()(), settings)
        return model.fit(X[:73], NOISE[:73], batch_size=12, epochs=2, verbose=0)

    with scripts(tmp_path, "bsp", 3) as run:
        run.each(script)
        assert run.shards[0].core.samples == 2 * 73


class Student(keras.Model):
    """Learns a frozen teacher's answers, and a separate temperature."""

    def __init__(self):
        super().__init__(name="distiller")
        self.teacher = network("teacher", 6, 4, 5)
        self.teacher.trainable = False
        self.student = network("student", 6, 4, 7)

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            difference = self.teacher(x, training=False) - self.student(x, training=True)
            loss = tf.reduce_mean(tf.square(difference))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.product
def test_a_frozen_teacher_is_not_shared(tmp_path):
    def make():
        W_global.clear()
        model = Student()
        model.compile(keras.optimizers.Adam(0.01))
        return model

    expected, _ = fitted(make)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, _ in run.each(lambda settings: fitted(make, settings)):
            assert_same(model, expected)
        paths = [tensor.path for tensor in run.shards[0].served.offer.spec.tensors]
        assert len(paths) == 4
        assert all("student" in path for path in paths)


class Nested(GAN):
    """The discriminator's step is a separate tf.function."""

    @tf.function
    def step_discriminator(self, real, noise):
        ones, zeros = tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])
        with tf.GradientTape() as tape:
            made = self.discriminator(self.generator(noise))
            loss = self.loss_of(ones, self.discriminator(real)) + self.loss_of(zeros, made)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    def train_step(self, data):
        real, noise = data
        d_loss = self.step_discriminator(real, noise)
        with tf.GradientTape() as tape:
            made = self.discriminator(self.generator(noise))
            g_loss = self.loss_of(tf.ones_like(real[:, :1]), made)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


class Outside(keras.Model):
    """Steps a variable that the model does not hold."""

    def __init__(self):
        super().__init__(name="outside")
        self.net = network("net", 6, 1, 1)
        temperature = keras.Variable(np.ones(1, np.float32), name="temperature")
        self.temperature = lambda: temperature
        self.compile(keras.optimizers.Adam(0.01))

    def train_step(self, data):
        variables = [*self.net.trainable_variables, self.temperature()]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(data[0]) * self.temperature() - 2.0))
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.product
@pytest.mark.parametrize("make", [gan(Nested), Outside], ids=["nested", "outside"])
def test_steps_in_functions_and_of_others_variables_are_exchanged(make, tmp_path):
    expected, _ = fitted(make)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, _ in run.each(lambda settings: fitted(make, settings)):
            assert_same(model, expected)


@pytest.mark.product
def test_other_optimizers_begin_another_phase(tmp_path):
    def script(settings=None):
        model = gan()()
        model = model if settings is None else distribute(model, settings)
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(X, NOISE, **options)
        model.compile(keras.optimizers.SGD(0.02), keras.optimizers.Adam(0.005))
        model.fit(X, NOISE, **options)
        model.fit(X, NOISE, **options)
        return model

    expected = script()
    with scripts(tmp_path, "bsp", 2) as run:
        for model in run.each(script):
            assert_same(model, expected)


# -- what cannot be right ------------------------------------------------------------------------


class OneVariableTwice(GAN):
    """Both optimizers step the discriminator."""

    def train_step(self, data):
        real, _ = data
        weights = self.discriminator.trainable_weights
        for optimizer in (self.d_optimizer, self.g_optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.discriminator(real))
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class ByHand(GAN):
    """Steps with no optimizer of Keras."""

    def train_step(self, data):
        real, _ = data
        weights = self.discriminator.trainable_weights
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.discriminator(real))
        for gradient, variable in zip(tape.gradient(loss, weights), weights, strict=True):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


class LaterOptimizer(GAN):
    """Begins to step with the second optimizer in mid-fit."""

    calls = 0

    def train_step(self, data):
        real, noise = data
        self.calls += 1
        networks = [(self.discriminator, self.d_optimizer, real)]
        if self.calls > 2:
            networks.append((self.generator, self.g_optimizer, noise))
        for own, optimizer, x in networks:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(own(x))
            optimizer.apply(tape.gradient(loss, own.trainable_weights), own.trainable_weights)
        return {"loss": loss}


class Unknown(keras.optimizers.SGD):
    """An optimizer that a PS cannot build."""


def unknown():
    model = GAN()
    model.compile(keras.optimizers.Adam(), Unknown())
    return model


def scaled():
    model = GAN()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(keras.optimizers.Adam(), optimizer)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (gan(OneVariableTwice), "with both Adam.*and SGD.*--method=dgs"),
        (gan(ByHand), "does not step with any optimizer"),
        pytest.param(
            gan(LaterOptimizer, run_eagerly=True),
            "on this worker alone",
            marks=pytest.mark.product,
        ),
        pytest.param(
            unknown, "Unknown, which a PS cannot build.*--method=dgs", marks=pytest.mark.product
        ),
        (scaled, "one loss scale"),
    ],
    ids=["twice", "by_hand", "later", "unknown", "scaled"],
)
def test_no_optimizer_trains_alone_silently(make, words, tmp_path):
    with scripts(tmp_path, "bsp", 1) as run, pytest.raises(ConfigurationError, match=words):
        run.each(lambda settings: fitted(make, settings))


@pytest.mark.product
def test_on_the_workers_any_optimizers_may_share_variables(tmp_path):
    expected, _ = fitted(gan(OneVariableTwice))
    with scripts(tmp_path, "dgs", 1, compression_rate=1) as run:
        ((model, _),) = run.each(lambda settings: fitted(gan(OneVariableTwice), settings))
        assert_same(model, expected)


def test_weights_that_are_made_of_sums_are_warned_of_where_workers_step(caplog):
    for optimizer, times in ((keras.optimizers.Ftrl(), 1), (keras.optimizers.Adagrad(), 0)):
        caplog.clear()
        plan = StepPlan((PlannedStep(optimizer, ()),))
        with caplog.at_level("WARNING", "absl"):
            plan.check(SimpleNamespace(steps_on_workers=True), "model")
            plan.check(SimpleNamespace(steps_on_workers=False), "model")
        assert caplog.text.count("--method=bsp") == times
