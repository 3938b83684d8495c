"""Freezing and unfreezing, rebuilt heads, and weights set by the script: as Keras alone."""

import threading
import time

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
from thinwire import ConfigurationError, distribute
from thinwire.script.keras.run_member import RunMember
from thinwire.script.member import Standing

FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def freeze_and_unfreeze(model):
    """Train the head alone, then everything, each with a separate optimizer."""
    model.get_layer("hidden").trainable = False
    model.compile(keras.optimizers.Adam(0.05), loss=LOSS)
    model.fit(X, Y, epochs=2, **FIT)
    model.between = np.concatenate([np.ravel(each) for each in model.get_weights()])
    model.get_layer("hidden").trainable = True
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
    model.fit(X, Y, epochs=2, **FIT)
    return model


def same_as_alone(story, folder, method="bsp", nb_workers=2, nb_ps=1, **settings):
    """Compare all workers' models of a run with the model of Keras alone."""
    expected = story(plain_model())
    with scripts(folder, method, nb_workers, nb_ps, **settings) as run:
        models = run.each(lambda given: story(distribute(plain_model(), given)))
        shards = list(run.shards.values())
    for model in models:
        assert_same(model, expected)
    return models, shards, expected


@pytest.mark.parametrize("nb_ps", [pytest.param(1, marks=pytest.mark.product), 2])
def test_freeze_and_unfreeze_is_keras_alone(nb_ps, tmp_path):
    models, shards, expected = same_as_alone(freeze_and_unfreeze, tmp_path, nb_ps=nb_ps)
    for model in models:
        np.testing.assert_allclose(model.between, expected.between, atol=1e-5)
        assert model.thinwire.num_exchanges == 16
    assert {(shard.served.phase, shard.core.version) for shard in shards} == {(4, 16)}


def frozen_with_the_same_optimizer(model):
    """Freeze a layer while the optimizer keeps its moments, then train weights that are set."""
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
    model.compile(optimizer, loss=LOSS)
    model.fit(X, Y, epochs=1, **FIT)
    model.get_layer("hidden").trainable = False
    model.compile(optimizer, loss=LOSS)
    model.fit(X, Y, epochs=1, **FIT)
    for variable in model.variables:
        variable.assign(variable * 0.5)
    model.fit(X, Y, epochs=1, **FIT)
    return model


@pytest.mark.product
def test_an_optimizer_that_stays_keeps_its_state_and_weights_that_are_set_count(tmp_path):
    models, shards, expected = same_as_alone(frozen_with_the_same_optimizer, tmp_path, nb_ps=2)
    for model in models:
        for mine, theirs in zip(
            model.optimizer.variables, expected.optimizer.variables, strict=True
        ):
            np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=mine.path)
    assert shards[0].served.phase == 6


class BadEnd(keras.callbacks.Callback):
    """Sets weights when training ends, as EarlyStopping with restore_best_weights does."""

    def on_train_end(self, logs=None):
        self.model.set_weights([values + 1 for values in self.model.get_weights()])


class BadEpoch(keras.callbacks.Callback):
    """Does so at the end of the last epoch, as own averages of weights do."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights([values + 1 for values in self.model.get_weights()])


@pytest.mark.parametrize("callback", [pytest.param(BadEnd, marks=pytest.mark.product), BadEpoch])
def test_weights_that_a_callback_sets_at_the_end_are_everybody_s(callback, tmp_path):
    def script(model):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
        model.fit(X, Y, epochs=1, callbacks=[callback()], **FIT)
        model.fit(X, Y, epochs=1, **FIT)
        return model

    _, shards, _ = same_as_alone(script, tmp_path)
    assert shards[0].served.phase == 3


def rebuilt(model):
    """Put another head on layers that have been trained."""
    model.compile(keras.optimizers.Adam(0.05), loss=LOSS)
    model.fit(X, Y, epochs=1, **FIT)
    initial = keras.initializers.GlorotUniform(seed=5)
    model.pop()
    model.add(keras.layers.Dense(3, name="other", kernel_initializer=initial))
    model.compile(keras.optimizers.Adam(0.05), loss=LOSS)
    model.fit(X, Y % 3, epochs=2, **FIT)
    return model


@pytest.mark.product
def test_a_rebuilt_head_is_trained_in_the_place_of_the_old_one(tmp_path):
    _, shards, _ = same_as_alone(rebuilt, tmp_path)
    assert "toy/other/kernel" in {each.path for each in shards[0].served.spec.tensors}


def with_adapters(model):
    """Train, then only adapters of Keras' own LoRA, with a schedule that starts again."""
    model.compile(keras.optimizers.SGD(0.1), loss=LOSS, run_eagerly=True)
    model.fit(X, Y, epochs=1, **FIT)
    keras.utils.set_random_seed(3)
    model.get_layer("hidden").enable_lora(2)
    kernel = model.get_layer("hidden").lora_kernel_a
    kernel.assign(np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2))
    model.get_layer("logits").trainable = False
    cosine = keras.optimizers.schedules.CosineDecay(0.05, 8)
    model.compile(keras.optimizers.Adam(cosine), loss=LOSS)
    model.fit(X, Y, epochs=2, **FIT)
    return model


@pytest.mark.product
@pytest.mark.parametrize("method", ["bsp", "dgs", "esync"])
def test_adapters_that_come_after_a_first_fit_are_shared_alone(method, tmp_path):
    settings = {"compression_rate": 1} if method == "dgs" else {}
    nb_workers = 2 if method == "bsp" else 1
    _, shards, _ = same_as_alone(with_adapters, tmp_path, method, nb_workers, **settings)
    assert shards[0].served.spec.num_parameters == 6 * 2 + 2 * 8 + 8


def in_two_runs(folder, story, *ends, **settings):
    """Run scripts that end at `ends[0]`, and the same command again; return the models."""
    for end in ends:
        with scripts(folder, "bsp", 2, **settings) as run:
            models = run.each(lambda given, end=end: story(distribute(plain_model(), given), end))
            shards = list(run.shards.values())
            run.interrupt()
    return models, shards


def head_then_all(model, fits=4):
    """Train the head alone, then everything, in this many fits."""
    model.get_layer("hidden").trainable = False
    model.compile(keras.optimizers.Adam(0.05), loss=LOSS)
    model.fit(X, Y, epochs=1, **FIT)
    model.get_layer("hidden").trainable = True
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
    for _ in range(1, fits):
        model.fit(X, Y, epochs=1, **FIT)
    return model


@pytest.mark.product
@pytest.mark.parametrize("nb_ps", [1, 2])
def test_the_same_command_passes_over_the_fits_of_phases_that_are_over(nb_ps, tmp_path):
    models, shards = in_two_runs(tmp_path, head_then_all, 2, 3, nb_ps=nb_ps)
    expected = head_then_all(plain_model())  # the second run continues from the first run's fit
    for model in models:
        assert_same(model, expected)
    assert {(shard.served.phase, shard.core.version) for shard in shards} == {(4, 16)}


def all_then_head(model, fits=2):
    model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    model.fit(X, Y, epochs=1, **FIT)
    model.get_layer("hidden").trainable = False
    model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    model.fit(X, Y, epochs=1, **FIT)
    return model


@pytest.mark.product
@pytest.mark.parametrize("nb_ps", [1, 2])
def test_the_same_command_has_what_is_not_shared_any_more(nb_ps, tmp_path):
    def story(model, fits=3):
        all_then_head(model)
        for _ in range(2, fits):
            model.fit(X, Y, epochs=1, **FIT)
        return model

    models, _ = in_two_runs(tmp_path, story, 2, 3, nb_ps=nb_ps)
    expected = story(plain_model(), 4)  # the second run trains both fits that it is in
    for model in models:
        assert_same(model, expected)


def student_after_teacher(train, fits=((1, 0), (2, 1))):
    """Train a teacher, then a student on the same layer and the teacher's answers, then both.

    Args:
        train: Returns a compiled model, ready for training.
        fits: For each fit, its number of epochs and the number of its model.
    """
    teacher = plain_model()
    teacher.compile(keras.optimizers.Adam(0.05), loss=LOSS)
    initial = keras.initializers.GlorotUniform(seed=5)
    head = keras.layers.Dense(4, name="other", kernel_initializer=initial)
    student = keras.Model(teacher.inputs, head(teacher.get_layer("hidden").output), name="student")
    student.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    models, targets = [train(teacher), train(student)], [Y, None]
    for epochs, number in fits:
        models[number].fit(X, targets[number], epochs=epochs, **FIT)
        if number == 0:
            targets[1] = np.asarray(teacher(X))
    return models


def several(story, folder, method="bsp", nb_workers=2, **settings):
    """Compare all models of a script that trains several with the models of Keras alone."""
    expected = story(lambda model: model)
    with scripts(folder, method, nb_workers, **settings) as run:
        found = run.each(lambda given: story(lambda model: distribute(model, given)))
        shards = list(run.shards.values())
    for models in found:
        assert len(models) == len(expected)
        for mine, theirs in zip(models, expected, strict=True):
            assert_same(mine, theirs)
            for own, other in zip(
                mine.optimizer.variables, theirs.optimizer.variables, strict=True
            ):
                np.testing.assert_allclose(own, other, atol=1e-5, err_msg=own.path)
    return shards


def test_a_second_model_goes_on_where_the_first_has_ended(tmp_path):
    (shard,) = several(student_after_teacher, tmp_path)
    assert (shard.served.phase, shard.core.version) == (4, 12)
    assert "other/kernel" in {each.path for each in shard.served.spec.tensors}


def there_and_back(train):
    return student_after_teacher(train, ((1, 0), (1, 1), (1, 0), (1, 1), (1, 0)))


@pytest.mark.product
@pytest.mark.parametrize("nb_ps", [1, 2])
def test_models_that_take_turns_keep_their_optimizers(nb_ps, tmp_path):
    shards = several(there_and_back, tmp_path, nb_ps=nb_ps)
    assert {(shard.served.phase, shard.core.version) for shard in shards} == {(10, 20)}


def folds(train, count=3, again=-1):
    """Train models of the same names, each on other rows, one of them twice as long."""
    models = []
    for fold in range(count):
        rows = np.arange(96) % 3 != fold
        model = plain_model(name="same" if fold else "other")
        model.compile(keras.optimizers.Adam(0.05), loss=LOSS)
        model = train(model)
        epochs = 4 if fold == again else 2
        model.fit(X[rows], Y[rows], epochs=epochs, batch_size=16, shuffle=False, verbose=0)
        models.append(model)
    return models


@pytest.mark.product
@pytest.mark.parametrize("method", ["bsp", "asgd", "dgs", "esync"])
def test_models_of_the_same_names_begin_anew(method, tmp_path):
    settings = {"compression_rate": 1} if method == "dgs" else {}
    several(folds, tmp_path, method, 2 if method == "bsp" else 1, **settings)


def beside(model, other):
    """Return a callback of one model that trains another."""

    class Other(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            other.fit(X, Y, **FIT)

    model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    other.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    return Other()


def test_models_that_are_trained_at_a_time_are_refused(tmp_path):
    with scripts(tmp_path) as run:

        def script(given):
            models = [distribute(plain_model(name), given) for name in ("toy", "other")]
            with pytest.raises(ConfigurationError, match="'other' is a second model.*both at a t"):
                models[0].fit(X, Y, callbacks=[beside(*models)], **FIT)
            with pytest.raises(ConfigurationError, match="a loop of the script's own"):
                models[1].train_on_batch(X, Y)

        run.each(script)


def resumed(folder, make, *ends):
    """Run a story of several models to `ends[0]`, and on by the same command; return the models."""
    for end in ends:
        with scripts(folder, "bsp", 2) as run:
            found = run.each(lambda given, end=end: make(lambda each: distribute(each, given), end))
            run.interrupt()
    return found


def taking_turns(train, fits):
    return student_after_teacher(train, ((1, 0), (1, 1)) + ((1, 1),) * (fits - 2))


@pytest.mark.product
def test_the_same_command_goes_on_at_a_second_model(tmp_path):
    expected = taking_turns(lambda model: model, 4)
    for models in resumed(tmp_path, taking_turns, 2, 3):
        for mine, theirs in zip(models, expected, strict=True):
            assert_same(mine, theirs)


@pytest.mark.product
def test_the_same_command_goes_on_at_a_later_fold(tmp_path):
    expected = folds(lambda model: model, again=1)
    for models in resumed(tmp_path, folds, 2, 3):
        for mine, theirs in zip(models, expected, strict=True):
            assert_same(mine, theirs)


@pytest.mark.product
def test_a_model_whose_optimizer_s_state_is_gone_is_not_trained_on(tmp_path):
    def story(train, fits):
        return student_after_teacher(train, ((1, 0), (1, 1), (1, 0))[:fits])

    with pytest.raises(ConfigurationError, match="Adam .*for toy/hidden/kernel"):
        resumed(tmp_path, story, 2, 3)


def test_nobody_steps_in_a_later_fit_before_all_have_joined(tmp_path, monkeypatch):
    join = RunMember.join

    def join_late(member):
        """Join as worker 2 when worker 1 has stepped alone, or waits."""
        shard = run.shards.get(0)
        has_left = member.state.standing in (Standing.LEFT, Standing.LEFT_BEHIND)
        begins = shard is not None and member.in_fit and not has_left
        if begins and member.own_settings.worker().id_worker == 2:
            version, scripts_of = shard.core.version, shard.server.scripts.barriers._scripts
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and shard.core.version == version:
                first = scripts_of.get(1)  # none yet: its connection is not in this fit
                if first is not None and (first.waits_at or "").endswith("joined"):
                    break
                threading.Event().wait(0.01)
        return join(member)

    def story(model):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
        for _ in range(2):
            model.fit(X, Y, epochs=1, **FIT)
        return model

    expected = story(plain_model())
    with scripts(tmp_path, "bsp", 2) as run:
        monkeypatch.setattr(RunMember, "join", join_late)
        for model in run.each(lambda given: story(distribute(plain_model(), given))):
            assert_same(model, expected)


def test_between_two_fits_no_worker_is_in_a_round(tmp_path):
    """Otherwise the rounds would wait for a restarted worker, and the worker for their end."""
    present = []

    class Arrives(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            present.append(run.shards[0].core.rounds.live())

    def story(settings):
        model = distribute(plain_model(), settings)
        model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
        model.fit(X, Y, epochs=1, callbacks=[Arrives()], **FIT)
        return model.evaluate(X, Y, verbose=0)

    with scripts(tmp_path, "bsp", 2) as run:
        first, second = run.each(story)
        deadline = time.monotonic() + 10
        while run.shards[0].core.rounds.live() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert run.shards[0].core.rounds.live() == ()
    assert first == second and (1, 2) in present


def test_a_model_without_weights_fits_on_each_worker_as_alone(tmp_path, caplog):
    def without_weights():
        layers = [keras.Input((6,)), keras.layers.ActivityRegularization(0.1)]
        model = keras.Sequential(layers, name="penalty")
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    options = {"batch_size": 48, "epochs": 1, "verbose": 0, "validation_data": (X, X)}
    expected = without_weights().fit(X, X, **options).history
    after, _ = alone(compiled_plain)

    def script(settings):
        found = distribute(without_weights(), settings).fit(X, X, **options).history
        model = distribute(compiled_plain(), settings)
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        return found, model

    with caplog.at_level("WARNING", "absl"), scripts(tmp_path, "bsp", 2) as run:
        for found, model in run.each(script):
            assert found.keys() == expected.keys()
            assert all(found[name] == pytest.approx(expected[name]) for name in expected)
            assert_same(model, after)
    assert "'penalty' has no trainable weights" in caplog.text


def compiled_plain():
    model = plain_model()
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    return model
