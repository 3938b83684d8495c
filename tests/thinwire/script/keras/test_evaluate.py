"""Scripts with validation by the evaluator: in one process, over loopback."""

import contextlib
import gc
import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import BATCH, LOSS, Batches, X, Y, alone, plain_model, scripts
from tests.waiting import wait_until
from thinwire import distribute
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.script.evaluator_script import EvaluatorScript
from thinwire.script.keras import own_states
from thinwire.script.keras.evaluate import FitEvaluator
from thinwire.script.settings import ScriptSettings, read_settings


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Let workers act as if `thinwire run` had started them, in a separate process."""
    is_launched = property(lambda settings: True, lambda settings, value: None)
    monkeypatch.setattr(ScriptSettings, "is_launched", is_launched)
    monkeypatch.setattr(own_states, "of_process", list)  # other workers' models are here as well


class RunEnded(Exception):
    """Raised where the evaluator's process would end."""


class ThreadedScript(EvaluatorScript):
    """The evaluator's script in a thread, which ends instead of the process."""

    def end(self):
        raise RunEnded


class ThreadedEvaluator(threading.Thread):
    """The evaluator of a run, and all that it reports."""

    def __init__(self, settings, script):
        super().__init__(daemon=True)
        run = read_settings(settings, {"id_worker": 1}, type_node="Worker").run
        self.fits = ThreadedScript(run)
        self.requests = self.fits.requests
        self.reported, self.script, self.error = [], script, None
        report = self.requests.report
        self.requests.report = lambda each: (self.reported.append(each), report(each))
        self.start()

    def of(self, model):
        """Return the `fit` of a model."""
        evaluator = FitEvaluator(model, self.fits)
        return lambda *data, **options: evaluator.fit(
            dict(zip(("x", "y"), data, strict=True)) | options
        )

    def run(self):
        try:
            self.script(self.of)
        except BaseException as error:  # noqa: BLE001 - the test looks
            self.error = error

    def end(self):
        self.join(30)
        assert not self.is_alive(), "it goes on"
        return self.error


def patient(folder, *how, **options):
    """Serve a run with scripts that wait for an evaluator that is slow to connect."""
    return scripts(folder, *how, lease_seconds=30, **options)


@contextlib.contextmanager
def evaluated(run, script):
    """Let a thread be the evaluator of a run."""
    evaluator = ThreadedEvaluator(run._settings, script)
    try:
        yield evaluator
    finally:
        evaluator.requests.close()


def compiled():
    model = plain_model()
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    model.compile(keras.optimizers.Adam(0.2), loss=LOSS, metrics=metrics)
    return model


def watching():
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2)
    lower = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.3)
    return [stop, lower]


def test_callbacks_act_on_all_workers_in_the_epoch_in_which_they_act_alone(tmp_path):
    options = {"epochs": 40, "validation_split": 0.25, "validation_freq": 2, "batch_size": BATCH}
    _, history = alone(compiled, **options, callbacks=watching())
    assert len(history["loss"]) < 40, "EarlyStopping has acted"
    assert len(set(history["learning_rate"])) > 1, "ReduceLROnPlateau, too"
    with patient(tmp_path, "bsp", 2) as run:

        def script(settings):
            model, callbacks = distribute(compiled(), settings), watching()
            model.fit(X, Y, shuffle=False, verbose=0, **options, callbacks=callbacks)
            return model.history.history, callbacks[0].stopped_epoch

        with evaluated(run, lambda of: of(compiled())(X, Y, **options)) as evaluator:
            found = run.each(script)
    for mine, stopped_epoch in found:
        assert stopped_epoch == len(history["loss"]) - 1
        assert set(mine) == set(history)
        for name in ("val_loss", "val_accuracy", "val_top2", "learning_rate"):
            np.testing.assert_allclose(mine[name], history[name], rtol=1e-3, err_msg=name)
        assert mine["val_loss"] == found[0][0]["val_loss"], "bit for bit"
    asked = [each.epoch for each in evaluator.reported if each.answers]
    assert asked == list(range(1, len(history["loss"]), 2)), "each once"
    assert [metric.name for metric in evaluator.reported[0].metrics] == ["accuracy", "loss", "top2"]


class Averaging(keras.Model):
    """Predicts by an average of its weights that its train_step makes."""

    def __init__(self):
        super().__init__(name="averaging")
        self.network, self.average = plain_model(), plain_model("average")
        self.average.trainable = False

    def call(self, x, training=False):
        return self.network(x) if training else self.average(x)

    def train_step(self, data):
        logs = super().train_step(data)
        layers = zip(self.average.weights, self.trainable_weights, strict=True)
        for mean, weight in layers:
            mean.assign(0.8 * mean + 0.2 * weight)
        return logs


def test_states_that_only_training_makes_are_validated_by_the_workers(tmp_path, caplog):
    caplog.set_level("INFO", "absl")

    def make():
        model = Averaging()
        model.compile(keras.optimizers.Adam(0.1), loss=LOSS)
        return model

    options = {"epochs": 3, "validation_data": (X, Y)}
    _, history = alone(make, **options)
    with patient(tmp_path, "bsp", 2) as run, evaluated(run, lambda of: of(make())(X, Y, **options)):
        for _, found in run.fit(make, **options):
            assert found.keys() == history.keys()
            np.testing.assert_allclose(found["val_loss"], history["val_loss"], rtol=1e-4)
    assert "training changes average/hidden/kernel and 3 more" in caplog.text


class Annealed:
    """A loss with a weight that no model knows, and the callback that raises it."""

    def __init__(self, how):
        self.how = how
        self.weight = {
            "keras": lambda: keras.Variable(0.0, trainable=False),
            "tensorflow": lambda: tf.Variable(0.0, trainable=False),
            "python": lambda: 0.0,
        }[how]()

    def set(self, value):
        if self.how == "python":
            self.weight = value
        else:
            self.weight.assign(value)

    def make(self, **options):
        def loss(y_true, y_pred):
            return LOSS(y_true, y_pred) + self.weight * keras.ops.mean(y_pred**2)

        model = plain_model()
        model.compile(
            keras.optimizers.SGD(0.2), loss=loss, run_eagerly=self.how == "python", **options
        )
        return model

    def callback(self):
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.set(0.4 * epoch)
        )


class Averages(keras.callbacks.Callback):
    """Puts an average of the weights in for each validation."""

    def on_train_begin(self, logs=None):
        self.average = self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        pairs = zip(self.average, self.model.get_weights(), strict=True)
        self.average = [0.9 * mean + 0.1 * weight for mean, weight in pairs]

    def on_test_begin(self, logs=None):
        self.kept, self.num_batches = self.model.get_weights(), 0
        self.model.set_weights(self.average)

    def on_test_batch_end(self, batch, logs=None):
        self.num_batches += 1

    def on_test_end(self, logs=None):
        self.model.set_weights(self.kept)


def _validated(run, make, options):
    """Return the results of the workers' fits, and the evaluator's reports."""

    def evaluate(of):
        model, given = make()
        of(model)(X, Y, **options, callbacks=given)

    with evaluated(run, evaluate) as evaluator:

        def script(settings):
            model, given = make()
            model = distribute(model, settings)
            return model.fit(X, Y, shuffle=False, verbose=0, **options, callbacks=given).history

        histories = run.each(script)
        run.shards[0].server.queue.put(events.Stop("iter_max"))
        assert isinstance(evaluator.end(), RunEnded)
    return histories, evaluator.reported


def _assert_as(histories, expected, names=("val_loss",)):
    for history in histories:
        assert set(history) == set(expected)
        for name in names:
            np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("how", ["keras", "tensorflow", "python"])
def test_a_loss_that_a_callback_changes_is_evaluated_by_the_chief(how, tmp_path):
    options = {"epochs": 4, "batch_size": BATCH, "validation_data": (X[:40], Y[:40])}

    def make():
        annealed = Annealed(how)
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1)
        return annealed.make(), [annealed.callback(), stop]

    model, callbacks = make()
    fit = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
    expected = model.fit(X, Y, **options, **fit).history
    with patient(tmp_path, "bsp", 2) as run:
        histories, reported = _validated(run, make, options)
        made = run.shards[0].server.scripts._evaluations._made
    _assert_as(histories, expected, ("loss", "val_loss"))
    assert not reported, "what the evaluator has is of another loss"
    assert [each.by_script for each in made] == [True] * len(expected["val_loss"])


@pytest.mark.parametrize("method", ["bsp", "asgd"])
def test_weights_that_a_callback_puts_in_for_the_validation_are_validated(method, tmp_path):
    nb_workers = 2 if method == "bsp" else 1
    options = {"epochs": 3, "batch_size": BATCH, "validation_data": (X[:40], Y[:40])}
    make = lambda: (compiled(), [Averages()])  # noqa: E731
    model, callbacks = make()
    fit = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
    expected = model.fit(X, Y, **options, **fit).history
    with patient(tmp_path, method, nb_workers) as run:
        histories, reported = _validated(run, make, options)
    _assert_as(histories, expected, ("val_loss", "val_accuracy"))
    assert not reported


def test_another_worker_evaluates_where_the_chief_is_lost(tmp_path):
    class Leaves(keras.callbacks.Callback):
        """Worker 1 leaves in the middle of the second evaluation."""

        def on_test_batch_begin(self, batch, logs=None):
            if self.model.thinwire.place[1] == 1 and next(evaluations) == 1:
                self.model.thinwire.fits._member.barriers._control.close()
                raise _Killed

    class _Killed(Exception):
        pass

    evaluations = itertools.count()
    options = {"epochs": 3, "batch_size": BATCH, "validation_data": (X, Y)}
    options["validation_batch_size"] = len(X)
    with scripts(tmp_path, "bsp", 2, lease_seconds=2) as run:

        def script(settings):
            model = distribute(compiled(), settings)
            with contextlib.suppress(_Killed):
                return model.fit(X, Y, verbose=0, **options, callbacks=[Leaves()]).history
            return None

        killed, history = run.each(script)
    assert killed is None
    assert len(history["val_loss"]) == 3
    assert np.isfinite(history["val_loss"]).all()


# -- which variables are no run's -----------------------------------------------------------------


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_variables_anywhere_in_a_script_are_compared(make, monkeypatch):
    monkeypatch.undo()
    model = compiled()
    model.run_eagerly = True  # for two steps a trace would take longer
    model.fit(X[:8], Y[:8], verbose=0)
    there = {"somewhere": [make(np.zeros(3, np.float32), trainable=False, name="share")]}
    states = own_states.OwnStates()
    states.begin(model, model.trainable_variables)
    model.fit(X[:8], Y[:8], verbose=0)
    assert states.changed(()) == [], "weights, slots, metrics and random states are no such"
    there["somewhere"][0].assign(np.array([0, 0, 1], np.float32))
    (name,) = states.changed(())
    assert "share" in name
    states.begin(model, model.trainable_variables)
    assert states.changed(()) == [name], "an evaluator has the first value, also in a later fit"
    assert states.changed(there["somewhere"]) == []
    there.clear()
    gc.collect()
    assert states.changed(()) == [], "no variable is kept alive"


def test_of_a_large_variable_a_part_is_compared(monkeypatch):
    monkeypatch.setattr(own_states, "_MOST_COMPARED", 10)
    monkeypatch.setattr(own_states, "of_process", lambda: [variable])
    variable = keras.Variable(np.zeros(95, np.float32), trainable=False)
    states = own_states.OwnStates()
    states.begin(compiled(), ())
    variable.assign(variable + 1)
    assert len(states.changed(())) == 1


def _reading(kind):
    optimizer = keras.optimizers.SGD(0.1)

    class Rate(keras.metrics.Metric):
        def update_state(self, *values, **keywords):
            pass

        def result(self):
            return optimizer.learning_rate

    def rate(y_true, y_pred):
        return optimizer.learning_rate

    def loss(y_true, y_pred):
        return LOSS(y_true, y_pred) * keras.ops.cast(optimizer.iterations, "float32")

    given = {"metric": {"metrics": [Rate()]}, "function": {"metrics": ["accuracy", rate]}}
    model = plain_model()
    model.compile(optimizer, **({"loss": LOSS} | given.get(kind, {"loss": loss})))
    return model


@pytest.mark.parametrize("kind", ["metric", "function", "loss"])
def test_a_loss_or_a_metric_that_reads_the_optimizer_is_found(kind):
    assert own_states.reads_optimizer(_reading(kind))
    assert not own_states.reads_optimizer(compiled())
    assert not own_states.reads_optimizer(plain_model())


def test_an_evaluator_goes_through_the_fits_of_a_script_and_its_unbuilt_model(tmp_path):
    """A metric that is an array; a fit without validation; the final values of the run."""
    classes = keras.utils.to_categorical(Y, 4)

    def make():
        dense = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
        model = keras.Sequential(dense)
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss=loss, metrics=[keras.metrics.F1Score()])
        return model

    def train(model, fit):
        options = {"batch_size": BATCH, "verbose": 0}
        validation = (X[:40], classes[:40])
        first = fit(X, classes, epochs=2, validation_data=validation, **options)
        second = fit(X, classes, epochs=1, **options)
        return first.history, second.history

    def evaluate(of):
        def keeping(*data, **options):
            histories.append(fit(*data, **options).history)
            return keras.callbacks.History()

        fit = of(model := make())
        train(model, keeping)

    histories = []
    with patient(tmp_path, "asgd", 2) as run:

        def script(settings):
            model = distribute(make(), settings)
            found = train(model, model.fit)
            return found, model.evaluate(X[:40], classes[:40], verbose=0, return_dict=True)

        with evaluated(run, evaluate) as evaluator:
            (found, last), _ = run.each(script)
            run.shards[0].server.queue.put(events.Stop("iter_max"))
            assert isinstance(evaluator.end(), RunEnded)
    first, second = found
    assert np.shape(first["val_f1_score"]) == (2, 4)
    assert set(second) == {"f1_score", "loss"}
    np.testing.assert_allclose(histories[0]["val_loss"], first["val_loss"], rtol=1e-6)
    final = evaluator.reported[-1]
    assert (final.final, final.fit) == (True, 1)
    (loss,) = [each.values[0] for each in final.metrics if each.name == "loss"]
    assert loss == pytest.approx(last["loss"], rel=1e-4)


def test_without_a_supervisor_there_are_no_metrics_of_validation(tmp_path, caplog):
    with scripts(tmp_path, "bsp", 2) as run:
        found = run.fit(compiled, epochs=2, validation_data=(X, Y))
    for _, history in found:
        assert set(history) == {"accuracy", "loss", "top2"}
    said = [each for each in caplog.messages if "was not evaluated (there is no Super" in each]
    assert len(said) == 2, "once by each worker"


@pytest.mark.product
def test_what_the_evaluator_is_given_no_validation_data_for(tmp_path, caplog):
    with (
        patient(tmp_path, "bsp", 1) as run,
        evaluated(run, lambda of: of(compiled())(X, Y, epochs=1)) as evaluator,
    ):
        ((_, history),) = run.fit(compiled, epochs=1, validation_data=(X, Y))
    assert "val_loss" not in history
    assert evaluator.reported == [
        pb.Evaluated(fit=1, answers=True, nobody=evaluator.reported[0].nobody)
    ]
    assert "gives fit no validation data in the evaluator" in caplog.text


def test_moving_averages_of_the_ps_are_what_is_evaluated(tmp_path):
    options = {"epochs": 2, "validation_data": (X[:40], Y[:40])}

    def make():
        model = plain_model()
        model.compile(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.8), loss=LOSS)
        return model

    _, expected = alone(make, **options, callbacks=[keras.callbacks.SwapEMAWeights()])
    with (
        patient(tmp_path, "bsp", 2, nb_ps=2) as run,
        evaluated(
            run, lambda of: of(make())(X, Y, **options, callbacks=keras.callbacks.SwapEMAWeights())
        ),
    ):
        for _, found in run.fit(
            make, **options, callbacks=lambda: [keras.callbacks.SwapEMAWeights()]
        ):
            np.testing.assert_allclose(found["val_loss"], expected["val_loss"], rtol=1e-5)


@pytest.mark.product
@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_later_fit_freezes_is_known_to_an_evaluator_that_comes_then(is_late, tmp_path):
    def train(model, fit):
        options = {"batch_size": BATCH, "epochs": 1, "verbose": 0}
        fit(X, Y, **options)
        model.layers[0].trainable = False
        model.compile("sgd", loss=LOSS)
        return fit(X, Y, validation_data=(X, Y), **options).history

    with patient(tmp_path, "bsp", 2) as run, contextlib.ExitStack() as stack:

        def evaluate(of):
            model = compiled()
            train(model, of(model))

        def script(settings):
            model = distribute(compiled(), settings)

            def fit(*data, **options):
                if "validation_data" in options and settings["id_worker"] == 2:
                    options["callbacks"] = [
                        keras.callbacks.LambdaCallback(on_train_batch_end=begin)
                    ]
                return model.fit(*data, **options)

            return train(model, fit), model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]

        def begin(batch, logs):
            if is_late and not batch:
                stack.enter_context(evaluated(run, evaluate))

        if not is_late:
            stack.enter_context(evaluated(run, evaluate))
        for history, loss in run.each(script):
            assert history["val_loss"] == pytest.approx([loss])


def test_a_model_that_has_moved_is_evaluated_between_epochs(tmp_path):
    """The fit waits in its first epoch for that."""

    class Waiting(Batches):
        def __getitem__(self, index):
            if index == len(self) - 1 and evaluators:
                wait_until(lambda: evaluators[0].reported)
            return super().__getitem__(index)

    evaluators, options = [], {"validation_data": (X[:40], Y[:40]), "epochs": 1, "verbose": 0}

    def script(settings):
        return distribute(compiled(), settings).fit(Waiting(), **options).history

    with (
        patient(tmp_path, "asgd", 1) as run,
        evaluated(run, lambda of: of(compiled())(X, Y, **options)) as evaluator,
    ):
        evaluators.append(evaluator)
        (history,) = run.each(script)
    between, last = evaluator.reported[0], evaluator.reported[-1]
    assert not between.answers and between.metrics, "nobody has requested it"
    assert last.answers and len(history["val_loss"]) == 1
