"""A script's own training loops equal Keras alone on the same batches."""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import (
    BATCH,
    LOSS,
    X,
    Y,
    assert_same,
    built,
    plain_model,
    scripts,
)
from tests.thinwire.script.keras.test_train_steps import NOISE, network
from thinwire import W_global, distribute
from thinwire.ops.types import ConfigurationError

BATCHES = [slice(start, start + BATCH) for _ in range(2) for start in range(0, len(X), BATCH)]


def parts_of(batch, settings):
    """Return a worker's part of a batch: an equal one of each worker."""
    number, count = settings["id_worker"], settings["nb_workers"]
    size = (batch.stop - batch.start) // count
    return slice(batch.start + (number - 1) * size, batch.start + number * size)


ALONE = {"id_worker": 1, "nb_workers": 1}


def classify(settings=ALONE, graph=False, pairs=True, optimizer=None, batches=BATCHES):
    """Train a classifier by a loop; distributed, unless `settings` mean a script alone."""
    model = plain_model()
    optimizer = optimizer() if optimizer else keras.optimizers.Adam(0.01)
    if settings is not ALONE:
        optimizer = distribute(optimizer, settings, model=model)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        if pairs:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        else:
            optimizer.apply(gradients, model.trainable_variables)
        return loss

    step = tf.function(step) if graph else step
    for batch in batches:
        own = parts_of(batch, settings)
        step(X[own], Y[own])
    return model, optimizer


@pytest.mark.parametrize(
    ("graph", "pairs"),
    [
        (True, False),
        pytest.param(False, True, marks=pytest.mark.product),
        pytest.param(False, False, marks=pytest.mark.product),
        pytest.param(True, True, marks=pytest.mark.product),
    ],
)
def test_a_loop_of_two_workers_is_keras_alone(graph, pairs, tmp_path):
    expected, _ = classify(graph=graph, pairs=pairs)
    with scripts(tmp_path, "bsp", 2) as run:
        found = run.each(lambda settings: classify(settings, graph, pairs))
        for model, optimizer in found:
            assert_same(model, expected)
            assert optimizer.thinwire.num_exchanges == len(BATCHES)
        assert run.shards[0].core.version == len(BATCHES)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("dgs", {"compression_rate": 1}, marks=pytest.mark.product),
        pytest.param("esync", {}, marks=pytest.mark.product),
        pytest.param("asgd", {}, marks=pytest.mark.product),
    ],
)
def test_a_loop_of_one_worker_is_keras_alone(method, settings, tmp_path):
    expected, wanted = classify(graph=True)

    def script(settings):
        model, optimizer = classify(settings, graph=True)
        model.get_weights()  # brings what an exchange has not taken along
        model.save(tmp_path / "saved.keras")
        return model, optimizer

    with scripts(tmp_path, method, 1, **settings) as run:
        ((model, optimizer),) = run.each(script)
    assert_same(model, expected)
    for mine, theirs in zip(optimizer.variables, wanted.variables, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5, err_msg=mine.path)


def adversaries(settings=ALONE, graph=False, models="own", critics=1):
    """Train a GAN by a loop."""
    W_global.clear()
    generator, discriminator = network("generator", 3, 6, 1), network("discriminator", 6, 1, 3)
    g_optimizer, d_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, 0.9)
    if settings is not ALONE:
        both = [generator, discriminator]
        g_model, d_model = (generator, discriminator) if models == "own" else (both, both)
        g_optimizer = distribute(g_optimizer, settings, model=g_model)
        d_optimizer = distribute(d_optimizer, settings, model=d_model)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_discriminator(real, noise):
        ones = tf.ones((len(real), 1))
        with tf.GradientTape() as tape:
            made = discriminator(generator(noise))
            loss = loss_of(ones, discriminator(real)) + loss_of(tf.zeros_like(ones), made)
        weights = discriminator.trainable_variables
        d_optimizer.apply(tape.gradient(loss, weights), weights)

    def train_generator(noise):
        with tf.GradientTape() as tape:
            loss = loss_of(tf.ones((len(noise), 1)), discriminator(generator(noise)))
        weights = generator.trainable_variables
        g_optimizer.apply(tape.gradient(loss, weights), weights)

    if graph:
        train_discriminator = tf.function(train_discriminator)
        train_generator = tf.function(train_generator)
    for batch in BATCHES:
        own = parts_of(batch, settings)
        for _ in range(critics):
            train_discriminator(X[own], NOISE[own])
        train_generator(NOISE[own])
    return generator, discriminator


@pytest.mark.parametrize(
    ("graph", "models", "critics"),
    [
        (True, "own", 1),
        pytest.param(False, "both", 1, marks=pytest.mark.product),
        pytest.param(True, "both", 2, marks=pytest.mark.product),
    ],
)
def test_a_gan_s_loop_of_two_workers_is_keras_alone(graph, models, critics, tmp_path):
    expected = adversaries(graph=graph, critics=critics)
    with scripts(tmp_path, "bsp", 2) as run:
        for found in run.each(lambda settings: adversaries(settings, graph, models, critics)):
            for model, other in zip(found, expected, strict=True):
                assert_same(model, other)
        assert run.shards[0].core.version == len(BATCHES) * (1 + critics)


@pytest.mark.product
def test_a_gan_s_loop_exchanges_weights_once_a_turn(tmp_path):
    expected = adversaries(graph=True, critics=2)
    with scripts(tmp_path, "dgs", 1, compression_rate=1) as run:
        (found,) = run.each(lambda settings: adversaries(settings, True, "own", 2))
        for model, other in zip(found, expected, strict=True):
            assert_same(model, other)
        found[0].thinwire.close()  # the last exchange may be under way
        assert run.shards[0].core.version == len(BATCHES)


def over_a_dataset(settings=ALONE):
    """The whole loop is within a function of TensorFlow."""
    model, optimizer = plain_model(), keras.optimizers.Adam(0.01)
    if settings is not ALONE:
        optimizer = distribute(optimizer, settings, model=[model])
    own = [parts_of(batch, settings) for batch in BATCHES]
    rows = tuple(np.concatenate([each[part] for part in own]) for each in (X, Y))
    data = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH // settings["nb_workers"])

    @tf.function
    def train(data):
        for x, y in data:
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train(data)
    return model


def by_the_compiled(settings=ALONE, make=lambda: keras.optimizers.Adam(0.01)):
    """The optimizer belongs to a distributed model."""
    model = plain_model()
    model.compile(make(), loss=LOSS)
    if settings is not ALONE:
        model = distribute(model, settings)
    for batch in BATCHES:
        own = parts_of(batch, settings)
        with tf.GradientTape() as tape:
            loss = model.optimizer.scale_loss(LOSS(Y[own], model(X[own], training=True)))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        model.predict(X[:2], verbose=0)
    return model


def scaled(settings=ALONE):
    """The optimizer scales its loss."""
    inner = keras.optimizers.Adam
    optimizer = keras.optimizers.LossScaleOptimizer
    return by_the_compiled(settings, lambda: optimizer(inner(0.01), 2.0**8, 3))


def between_fits(settings=ALONE):
    """Some batches by train_on_batch, between two calls of fit."""
    model = plain_model()
    model.compile(keras.optimizers.Adam(0.01), loss=LOSS, metrics=["accuracy"])
    model = built(model) if settings is ALONE else distribute(model, settings)
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for batch in BATCHES[:4]:
        own = parts_of(batch, settings)
        logs = model.train_on_batch(X[own], Y[own], return_dict=True)
        assert set(logs) == {"loss", "accuracy"}
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


def traced_before(settings=ALONE):
    """A loop's function that was traced before the fit still works after the fit."""
    model = plain_model()
    model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    if settings is not ALONE:
        model = distribute(model, settings)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)

    for begin in (0, 2):
        for batch in BATCHES[begin : begin + 2]:
            own = parts_of(batch, settings)
            step(X[own], Y[own])
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


_OTHERS = [over_a_dataset, by_the_compiled, scaled, traced_before]


@pytest.mark.parametrize(
    "script", [between_fits, *(pytest.param(each, marks=pytest.mark.product) for each in _OTHERS)]
)
def test_other_loops_of_two_workers_are_keras_alone(script, tmp_path):
    expected = script()
    with scripts(tmp_path, "bsp", 2) as run:
        for model in run.each(script):
            assert_same(model, expected)


def test_a_worker_with_other_weights_begins_with_those_of_the_run(tmp_path):
    """The worker's first gradient is useless."""
    has_stepped = threading.Event()

    def script(settings):
        model, is_second = plain_model(), settings["id_worker"] == 2
        if is_second:
            assert has_stepped.wait(60)
            model.set_weights([np.zeros_like(each) for each in model.get_weights()])
        optimizer = distribute(keras.optimizers.SGD(0.1), settings, model=model)
        variables = model.trainable_variables
        for gradient in (1.0, 2.0) if is_second else (4.0,):
            optimizer.apply([tf.fill(v.shape, gradient) for v in variables], variables)
        has_stepped.set()
        return model.get_weights() if is_second else None

    with scripts(tmp_path, "asgd", 2) as run:
        _, found = run.each(script)
        assert run.shards[0].core.version == 3
    for mine, initial in zip(found, plain_model().get_weights(), strict=True):
        np.testing.assert_allclose(mine, initial - 0.4 - 0.2, atol=1e-6)


def interpolate(settings):
    """Set the weights to a part of the change of two steps, as Reptile does."""
    model = plain_model()
    optimizer = distribute(keras.optimizers.SGD(0.1), settings, model=model)
    variables = model.trainable_variables
    for gradient in (1.0, 2.0):
        before = model.get_weights()
        for _ in range(2):
            optimizer.apply([tf.fill(v.shape, gradient) for v in variables], variables)
        after = model.get_weights()
        model.set_weights([w + 0.5 * (v - w) for v, w in zip(after, before, strict=True)])
    return model.get_weights()


@pytest.mark.parametrize(
    ("method", "nb_workers", "settings"),
    [
        pytest.param("dgs", 1, {"compression_rate": 1}, marks=pytest.mark.product),
        ("bsp", 2, {}),
    ],
)
def test_weights_that_a_loop_sets_travel_with_its_next_step(method, nb_workers, settings, tmp_path):
    with scripts(tmp_path, method, nb_workers, **settings) as run:
        several = run.each(interpolate)
    for found in several:
        for mine, initial in zip(found, plain_model().get_weights(), strict=True):
            np.testing.assert_allclose(mine, initial - 0.5 * 0.2 - 0.5 * 0.4, atol=1e-6)


def step_of(model, optimizer, wrap):
    """Return a step of a loop; `wrap` is the script's wrapper around it."""

    def update(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return wrap(update)


def compiled_within(step):
    inner = tf.function(step, jit_compile=True)
    return tf.function(lambda x, y: inner(x, y))


def compiled_around(step):
    inner = tf.function(step)
    return tf.function(lambda x, y: inner(x, y), jit_compile=True)


def compiled_method(step):
    class Trainer:
        @tf.function(jit_compile=True)
        def step(self, x, y):
            return step(x, y)

    return Trainer().step


def traced_before(step):
    return tf.function(step, jit_compile=True).get_concrete_function(
        tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int32)
    )


def stepped(wrap, settings=ALONE, make=plain_model):
    """Train by a loop with a wrapped step; return the model, and whether the step used XLA."""
    keras.utils.set_random_seed(4)
    model, optimizer = make(), keras.optimizers.Adam(0.01)
    if settings is not ALONE:
        assert distribute(optimizer, settings, model=model) is optimizer
        assert distribute(optimizer, settings, model=model) is optimizer  # changes nothing
    step = step_of(model, optimizer, wrap)
    for batch in BATCHES:
        own = parts_of(batch, settings)
        step(tf.constant(X[own]), tf.constant(Y[own]))
    return model


@functools.cache
def stepped_alone():
    return stepped(tf.function)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda step: tf.function(step, jit_compile=True),
        compiled_within,
        compiled_around,
        pytest.param(compiled_method, marks=pytest.mark.product),
        pytest.param(traced_before, marks=pytest.mark.product),
    ],
    ids=["function", "within", "around", "method", "concrete"],
)
def test_jit_compile_is_switched_off_around_a_step_that_exchanges(wrap, tmp_path, caplog):
    expected = stepped_alone()
    with scripts(tmp_path, "bsp", 2) as run:
        for model in run.each(lambda settings: stepped(wrap, settings)):
            assert_same(model, expected)
        assert run.shards[0].core.version == len(BATCHES)
    assert "is switched off: XLA cannot compile an exchange" in caplog.text


def test_functions_without_an_exchange_stay_compiled(tmp_path):
    """Functions of a distributed script stay compiled, too."""
    double = tf.function(lambda x: x * 2, jit_compile=True)
    with scripts(tmp_path) as run:
        run.each(lambda settings: distribute(keras.optimizers.SGD(), settings, model=plain_model()))
    assert double(tf.constant(2.0)) == 4
    assert "HloModule" in double.experimental_get_compiler_ir(tf.constant(2.0))()


def unbuilt():
    W_global.clear()
    return keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)], name="unbuilt")


@pytest.mark.parametrize("wrap", [tf.function, lambda step: step], ids=["graph", "eager"])
def test_a_loop_s_first_step_may_build_the_model(wrap, tmp_path):
    expected = stepped(wrap, make=unbuilt)
    with scripts(tmp_path, "bsp", 1) as run:
        (model,) = run.each(lambda settings: stepped(wrap, settings, unbuilt))
        assert run.shards[0].core.version == len(BATCHES)
    assert_same(model, expected)


def loops_in_turn(settings=ALONE):
    """Train a model by a loop, and then a second one by another."""
    W_global.clear()
    models = [network("first", 6, 4, 1), network("second", 6, 4, 3)]
    optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)]
    if settings is not ALONE:
        for model, optimizer in zip(models, optimizers, strict=True):
            distribute(optimizer, settings, model=model)
    for model, optimizer in zip(models, optimizers, strict=True):
        step = step_of(model, optimizer, tf.function)
        for batch in BATCHES:
            own = parts_of(batch, settings)
            step(X[own], Y[own])
    return models


def test_loops_that_are_distributed_before_the_first_step_train_one_after_the_other(tmp_path):
    expected = loops_in_turn()
    with scripts(tmp_path, "bsp", 2) as run:
        for models in run.each(loops_in_turn):
            for model, other in zip(models, expected, strict=True):
                assert_same(model, other)


@pytest.mark.parametrize("method", ["dgs", pytest.param("esync", marks=pytest.mark.product)])
def test_an_optimizer_of_a_script_s_own_may_step_on_the_workers(method, tmp_path):
    with scripts(tmp_path, method, 1) as run:
        run.each(lambda settings: classify(settings, optimizer=OwnSGD, batches=BATCHES[:1]))


# -- what cannot be right ------------------------------------------------------------------------


def other_optimizer(settings):
    model = plain_model()
    distribute(keras.optimizers.Adam(), settings, model=model)
    variables = model.trainable_variables
    keras.optimizers.SGD().apply([tf.ones(v.shape) for v in variables], variables)


def too_late(settings):
    model, _ = classify(settings, batches=BATCHES[:1])
    distribute(keras.optimizers.Adam(), settings, model=model)


def of_nothing(settings):
    distribute(keras.optimizers.Adam(), settings)


def three_of_one_model(settings):
    model = plain_model()
    optimizers = [distribute(keras.optimizers.SGD(), settings, model=model) for _ in range(3)]
    variables = model.trainable_variables[:1]
    optimizers[0].apply([tf.ones(v.shape) for v in variables], variables)


def by_turns(settings):
    model = plain_model()
    optimizer = distribute(keras.optimizers.SGD(), settings, model=model)
    variables = model.trainable_variables
    optimizer.build(variables)
    for some in (variables, variables[:2]):
        optimizer.apply([tf.ones(v.shape) for v in some], some)


class OwnSGD(keras.optimizers.SGD):
    """Steps as no PS knows."""


def own_optimizer(settings):
    distribute(OwnSGD(), settings, model=plain_model())


def own_optimizer_of_fit(settings):
    model = plain_model()
    model.compile(OwnSGD(), LOSS)
    distribute(model, settings)


def other_model(settings):
    optimizer = keras.optimizers.SGD()
    distribute(optimizer, settings, model=plain_model())
    distribute(optimizer, settings, model=plain_model())


def model_of_a_loop(settings):
    model = plain_model()
    distribute(keras.optimizers.SGD(), settings, model=model)
    distribute(model, settings)


def other_settings(settings):
    model = plain_model()
    distribute(model, settings)
    distribute(model, settings, num_train=7)


def loop_behind_loop(settings):
    for _ in range(2):
        model = plain_model()
        model.compile("sgd", LOSS)
        distribute(model, settings).train_on_batch(X, Y)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (other_optimizer, "write `optimizer = thinwire.distribute"),
        (of_nothing, "without a model"),
        (three_of_one_model, "Give each optimizer a different model"),
        (own_optimizer, "OwnSGD, which a PS cannot build"),
        (own_optimizer_of_fit, "OwnSGD, which a PS cannot build"),
        (other_model, "a second time with another model"),
        (model_of_a_loop, "either the model or the optimizer"),
        (other_settings, "another num_train: 7 now, but first None"),
        (loop_behind_loop, "distributed before the first step of any"),
        *(
            pytest.param(script, words, marks=pytest.mark.product)
            for script, words in (
                (too_late, "Distribute all optimizers before the first loop begins"),
                (by_turns, "does not step toy/logits/kernel"),
            )
        ),
    ],
)
def test_a_loop_that_cannot_be_right_is_refused(script, words, tmp_path):
    with scripts(tmp_path, "bsp", 1) as run, pytest.raises(ConfigurationError, match=words):
        run.each(script)


def test_an_optimizer_that_the_loop_steps_beside_is_named(tmp_path, caplog):
    def story(settings):
        other = keras.Variable([1.0, 2.0], name="other")
        beside = keras.optimizers.SGD(0.5)
        model = plain_model()
        optimizer = distribute(keras.optimizers.SGD(0.1), settings, model=model)
        for _ in range(3):
            beside.apply([np.ones(2, np.float32)], [other])
            with tf.GradientTape() as tape:
                loss = LOSS(Y, model(X, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        return keras.ops.convert_to_numpy(other)

    with scripts(tmp_path) as run:
        (other,) = run.each(story)
    np.testing.assert_array_equal(other, [-0.5, 0.5])
    alone = [line for line in caplog.messages if "on this worker alone" in line]
    assert len({*alone}) == 1 and "other and 0 more" in alone[0]  # sessions of other tests live on


class OwnStep(keras.Sequential):
    """A model whose step never shows its loss to the optimizer, as is common."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = LOSS(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def fitted(settings, kind=keras.Sequential):
    """Fit a classifier with a model of this class."""
    model = kind(plain_model().layers, name="toy")
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss=LOSS)
    distribute(model, settings).fit(X, Y, batch_size=BATCH, verbose=0)


def looped(settings):
    classify(settings, graph=True, batches=BATCHES[:4])


@pytest.mark.parametrize(
    ("script", "knows_loss"),
    [
        (fitted, True),
        (lambda settings: fitted(settings, OwnStep), False),
        (looped, False),
    ],
    ids=["fit", "own step", "loop"],
)
def test_a_loss_that_no_step_shows_is_unknown_and_no_zero(script, knows_loss, tmp_path):
    with scripts(tmp_path, "bsp", 1) as run:
        run.each(script)
        counted = run.shards[0].core.counters.workers[1]
    assert (counted.pushes, counted.loss is not None) == (4, knows_loss)
    assert counted.loss != 0.0
