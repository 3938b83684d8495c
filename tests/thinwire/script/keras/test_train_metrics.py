"""Training metrics cover all workers' rows, and all scripts stop after the same epoch."""

import inspect
import logging
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import (
    BATCH,
    LOSS,
    RNG,
    Fits,
    X,
    Y,
    alone,
    assert_weights,
    plain_model,
    runs_of,
    scripts,
)
from thinwire import distribute
from thinwire.script.keras.train_metrics import StepResults, TrainMetrics, _probe, _Tested, _watch

CLASSES = 4


class Hits(keras.metrics.Metric):
    """Adds to its state, and was written for one script."""

    def __init__(self, threshold, **keywords):
        super().__init__(**keywords)
        self.hits = self.add_weight(shape=(2,), initializer="zeros")
        self.threshold = threshold

    def update_state(self, y_true, y_pred, sample_weight=None):
        above = keras.ops.cast(y_pred > self.threshold, "float32")
        self.hits.assign_add(keras.ops.stack([keras.ops.sum(above), keras.ops.sum(1 - above)]))

    def result(self):
        return self.hits[0] / (self.hits[0] + self.hits[1])


class Balance(keras.metrics.Metric):
    """Has other metrics as parts, and is not their mean."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.above, self.below = Hits(0.5, name="above"), Hits(-0.5, name="below")

    def update_state(self, *values, **keywords):
        self.above.update_state(*values, **keywords)
        self.below.update_state(*values, **keywords)

    def result(self):
        return self.above.result() / (self.below.result() + 0.1)


class Largest(keras.metrics.Metric):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.value = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


class Newest(Largest):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.mean(y_pred))


class Hidden(keras.metrics.Metric):
    """Has its state where Keras does not see it."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.total = [tf.Variable(0.0)]

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total[0].assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def reset_state(self):
        self.total[0].assign(0.0)

    def result(self):
        return self.total[0].read_value()


class Listing(Hits):
    """Has a list in addition to its variables."""

    def __init__(self, **keywords):
        super().__init__(0.0, **keywords)
        self.batches = []

    def reset_state(self):
        super().reset_state()
        self.batches.clear()

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true, y_pred, sample_weight)
        self.batches.append(1)


class FromOne(Hits):
    """Begins each epoch with another state than zeros."""

    def reset_state(self):
        self.hits.assign(keras.ops.ones(2))


class OneHot(keras.metrics.Metric):
    """Gives a metric of Keras the labels that it expects."""

    def __init__(self, inner):
        super().__init__(name=inner.name)
        self.inner = inner

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = keras.ops.one_hot(keras.ops.cast(y_true, "int32"), CLASSES)
        shape = keras.ops.shape(y_pred)
        labels, chances = keras.ops.reshape(labels, shape), keras.ops.softmax(y_pred)
        self.inner.update_state(labels, chances, sample_weight)

    def result(self):
        return self.inner.result()


def every_metric():
    kinds = keras.metrics
    return [
        *few_metrics(),
        OneHot(kinds.AUC(name="auc")),
        OneHot(kinds.F1Score(name="f1")),
        Hits(0.0, name="hits"),
        FromOne(0.0, name="from_one"),
    ]


def few_metrics():
    """Return a metric of Keras and one of the script, which take little time to trace."""
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy"), Balance(name="balance")]


def compiled(*others, metrics=few_metrics, optimizer=None, **options):
    model = plain_model()
    every = [*metrics(), *others]
    model.compile(optimizer or keras.optimizers.SGD(0.3), LOSS, metrics=every, **options)
    return model


def assert_alike(history, expected, atol=1e-5, names=None):
    for name in names or expected:
        values = [np.asarray(each, float) for each in (history[name], expected[name])]
        np.testing.assert_allclose(*values, rtol=0, atol=atol, err_msg=name)


def test_three_workers_whose_steps_run_eagerly_have_the_metrics_of_keras_alone(tmp_path):
    """Traced steps, and every kind of metric: see `fit_after_fit`."""
    make = lambda: compiled(run_eagerly=True)  # noqa: E731
    batches = {"batch_size": 48, "epochs": 2}
    expected = alone(make, **batches)[1]
    with scripts(tmp_path, "bsp", 3) as run:
        results = run.fit(make, **batches)
    for _, history in results:
        assert set(history) == set(expected)
        assert_alike(history, expected)


class Renames(keras.Model):
    """Returns results under its own names, one of them with a number that is no result."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.total = keras.metrics.Mean(name="total_loss")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")
        self.unused = keras.metrics.Mean(name="unused")

    @property
    def metrics(self):
        return [self.total, self.hits, self.unused]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(LOSS(y, logits))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.total.update_state(loss)
        self.hits.update_state(y, logits)
        results = {"loss": self.total.result(), "parts": {"accuracy": self.hits.result()}}
        return results | {"rows": tf.cast(tf.shape(x)[0], tf.float32)}


class Guided(keras.Model):
    """Is what Keras' guide on train_step shows: a dictionary of all results within another."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=logits)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (y, logits)))
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.parametrize(("kind", "named"), [(Renames, "rows"), (Guided, None)])
def test_results_that_a_train_step_returns_itself_are_those_of_all_rows(
    kind, named, tmp_path, caplog
):
    def make():
        base = plain_model()
        model = kind(base.inputs, base.outputs)
        options = {"metrics": ["accuracy"], "run_eagerly": kind is Guided}
        model.compile(keras.optimizers.SGD(0.3), LOSS, **options)
        return model

    expected = alone(make, epochs=2)[1]
    with scripts(tmp_path, "bsp", 2) as run:
        results = run.fit(make, epochs=2)
    for _, history in results:
        assert set(history) == set(expected) and len(expected) == 2 + bool(named)
        assert_alike(history, expected, names=set(expected) - {named})
        assert history.get("rows") == ([BATCH / 2] * 2 if named else None), "of this worker alone"
    warnings = [each for each in caplog.messages if "training metrics" in each]
    assert len(warnings) == bool(named)
    assert all(": rows. " in each for each in warnings)


def test_a_number_that_two_metrics_have_is_that_of_its_name():
    first, second = keras.metrics.Mean(name="first"), keras.metrics.Mean(name="second")
    other = keras.metrics.Mean(name="other")
    for metric in (first, second):
        metric.update_state(2.0)
    other.update_state(5.0)
    logs = {"second": 2.0, "third": 2.0, "fifth": 5.0, "none": None, "text": "2.0"}
    returned = StepResults(logs, [first, second, other])
    second.update_state(4.0)
    other.update_state(7.0)
    renewed, own = returned.renew(logs, separate=["other"])
    assert renewed | {"second": float(renewed["second"])} == logs | {"second": 3.0}
    assert own == ["third", "fifth", "none", "text"]
    assert StepResults(None, [first]).renew({}, ()) == ({}, [])


# -- one model, fit after fit --------------------------------------------------------------------


class StopsBefore(keras.callbacks.Callback):
    """Asks for the end of a fit before a batch; Keras trains that batch first."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


class Evaluates(keras.callbacks.Callback):
    """Evaluates within an epoch, in the middle of the training's metrics."""

    def __init__(self, when):
        super().__init__()
        setattr(self, when, self._evaluate)
        self.when = when

    def _evaluate(self, number, logs=None):
        if self.when == "on_epoch_begin" or number == 1:
            self.model.evaluate(X[:24], Y[:24], verbose=0)


MONITORS = ("loss", "balance")
#: Arguments of StopsAt -> the epochs that all workers have then.
ENDINGS = {(1, 2): 2, (1, 1, 1): 2, (2, 2, 3): 3}
EVERY = "another model, every metric"
#: Metrics with states that cannot be added up, by name.
SEPARATE = {"largest": Largest, "newest": Newest, "hidden": Hidden}


def fit_after_fit(place, fits):
    model = place(compiled())
    first = model.get_weights()
    fits.fit("first", model, epochs=2)
    fits.fit("fewer rows", model, x=X[:48], y=Y[:48], batch_size=BATCH, shuffle=False, epochs=2)
    fits.fit("stop_training before a batch", model, epochs=4, callbacks=[StopsBefore()])
    for when in ("on_epoch_begin", "on_train_batch_end"):
        fits.fit(f"evaluate, {when}", model, epochs=2, callbacks=[Evaluates(when)])
    for monitor in MONITORS:
        model.set_weights(first)
        model.optimizer.learning_rate = 0.3
        fits.fit(monitor, model, epochs=30, callbacks=watching(monitor))
    for ending in ENDINGS if hasattr(model, "thinwire") else ():
        fits.fit(ending, model, epochs=9, callbacks=[StopsAt(*ending)])
    separate = [kind(name=name) for name, kind in SEPARATE.items()]
    other = compiled(*separate, metrics=every_metric, steps_per_execution=4)
    fits.fit(EVERY, place(other), epochs=2)


class Listening(logging.Handler):
    """Collects the messages that are logged."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module")
def said():
    """Return all messages that were logged since the first of these fits."""
    logging.getLogger().addHandler(handler := Listening())
    yield handler.messages
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module")
def fits_of_all(tmp_path_factory, said):
    """Return the Fitted of Keras alone, by the fit's name, and each worker's Fitted."""
    return runs_of(tmp_path_factory.mktemp("later_fits"), fit_after_fit)


@pytest.fixture(scope="module")
def later_fits(fits_of_all):
    """Return for each name the result of Keras alone, and a list of the workers' results."""
    expected, workers = fits_of_all
    return {name: (known, [made[name] for made in workers]) for name, known in expected.items()}


def test_what_cannot_be_added_up_stays_the_workers_and_is_named_once(later_fits, said):
    expected, workers = later_fits[EVERY]
    expected, histories = expected.history, [made.history for made in workers]
    largest = np.max([history["largest"] for history in histories], axis=0)
    np.testing.assert_allclose(largest, expected["largest"], atol=1e-5)
    hidden = np.sum([history["hidden"] for history in histories], axis=0)
    np.testing.assert_allclose(hidden, expected["hidden"])
    (warning,) = [each for each in said if "training metrics" in each]
    assert all(name in warning for name in SEPARATE)
    assert not any(metric.name in warning for metric in every_metric())


@pytest.mark.parametrize(
    ("fit", "num_epochs"),
    {
        "first": 2,
        "fewer rows": 2,
        "stop_training before a batch": 2,
        "evaluate, on_epoch_begin": 2,
        "evaluate, on_train_batch_end": 2,
        EVERY: 2,
    }.items(),
)
def test_each_fit_has_metrics_of_its_own(later_fits, fit, num_epochs):
    expected, workers = later_fits[fit]
    assert len(expected.history["loss"]) == num_epochs
    for made in workers:
        assert set(made.history) == set(expected.history)
        assert_alike(made.history, expected.history, names=set(expected.history) - set(SEPARATE))
        assert_weights(made.weights, expected.weights)


def watching(monitor):
    kinds, mode = keras.callbacks, "min" if monitor == "loss" else "max"
    options = {"monitor": monitor, "mode": mode, "patience": 0}
    return [
        kinds.EarlyStopping(min_delta=0.05, restore_best_weights=True, **options),
        kinds.ReduceLROnPlateau(factor=0.5, min_delta=0.1, **options),
    ]


@pytest.mark.parametrize("monitor", MONITORS)
def test_callbacks_that_watch_the_training_act_as_alone(later_fits, monitor):
    expected, workers = later_fits[monitor]
    rates = expected.history["learning_rate"]
    assert 2 < len(rates) < 30 and rates[-1] < rates[0]
    for made in workers:
        assert_alike(made.history, expected.history, atol=1e-4)
        assert_weights(made.weights, expected.weights, atol=1e-4)


# -- fits that one worker ends -------------------------------------------------------------------


class StopsAt(keras.callbacks.Callback):
    """Ends the fit of one worker."""

    def __init__(self, epoch, worker=1, batch=None):
        super().__init__()
        self.epoch, self.worker, self.batch = epoch, worker, batch
        self.now = 0

    def _is_here(self, epoch):
        worker = self.model.thinwire.place[1]
        return worker == self.worker and epoch >= self.epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self._is_here(self.now):
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if self.batch is None and self._is_here(epoch):
            self.model.stop_training = True


def common_length(one, two):
    """Return the epochs of one fit of both workers, which have the same weights after it."""
    assert_weights(one.weights, two.weights, atol=0)
    lengths = {len(each.history["loss"]) for each in (one, two)}
    assert len(lengths) == 1
    return lengths.pop()


@pytest.mark.parametrize("ending", ENDINGS, ids=["epoch end", "within", "within a later one"])
def test_rounds_end_after_the_epoch_that_one_worker_ends(fits_of_all, ending):
    _, workers = fits_of_all
    assert common_length(*(made[ending] for made in workers)) == ENDINGS[ending]


@pytest.mark.parametrize(("method", "worker"), [("ssp", 1), ("dgs", 2), ("diloco", 1)])
def test_a_fit_that_one_worker_ends_has_as_many_epochs_everywhere(method, worker, tmp_path):
    def script(own):
        fits, model = Fits(), distribute(compiled(), own)
        fits.fit("ended", model, epochs=9, callbacks=[StopsAt(1, worker)])
        return fits.made["ended"]

    with scripts(tmp_path, method, 2) as run:
        assert 2 <= common_length(*run.each(script)) <= 9


def test_without_rounds_workers_have_as_many_epochs_and_the_newest_reports_of_all(tmp_path):
    is_ahead = threading.Event()

    class Uneven(StopsAt):
        """Worker 2 stops after its second epoch, when worker 1 has had five."""

        def on_epoch_end(self, epoch, logs=None):
            if self.model.thinwire.place[1] == 1 and epoch == 4:
                is_ahead.set()
            elif self.model.thinwire.place[1] == 2:
                assert is_ahead.wait(60)
            super().on_epoch_end(epoch)

    def script(own):
        fits, model = Fits(), distribute(compiled(), own)
        fits.fit("reports", model, epochs=4)
        fits.fit("uneven", model, epochs=4000, callbacks=[Uneven(1, 2)])
        return {name: each.history["loss"] for name, each in fits.made.items()}

    with scripts(tmp_path, "asgd", 2) as run:
        losses = run.each(script)
    one, two = (each["reports"] for each in losses)
    assert one[-1] < one[0] and two[-1] < two[0]
    assert abs(one[-1] - two[-1]) < 0.3 * one[0]
    lengths = {name: [len(each[name]) for each in losses] for name in losses[0]}
    assert 6 <= lengths["uneven"][0] == lengths["uneven"][1] < 4000


# -- which states add up ------------------------------------------------------------------------

_BASES = {"Metric", "MeanMetricWrapper", "Accuracy"}


def _of_keras():
    """Return a metric of each class of keras.metrics, and a batch of each kind for it."""
    arguments = {
        "SensitivityAtSpecificity": (0.5,),
        "SpecificityAtSensitivity": (0.5,),
        "PrecisionAtRecall": (0.5,),
        "RecallAtPrecision": (0.5,),
        "IoU": (CLASSES, [0, 1]),
        "BinaryIoU": ([0, 1],),
        "MeanIoU": (CLASSES,),
        "OneHotIoU": (CLASSES, [0, 1]),
        "OneHotMeanIoU": (CLASSES,),
        "MeanMetricWrapper": (lambda y_true, y_pred: y_pred[:, 0],),
    }
    for name, kind in sorted(vars(keras.metrics).items()):
        if inspect.isclass(kind) and issubclass(kind, keras.Metric) and kind is not keras.Metric:
            yield pytest.param(kind, arguments.get(name, ()), id=name)


def _batch(kind, rng):
    """Return arguments of update_state that a class takes."""
    chances = rng.random((6, CLASSES)).astype(np.float32)
    labels = rng.integers(0, CLASSES, 6)
    hot = np.eye(CLASSES, dtype=np.float32)[labels]
    name = kind.__name__
    if kind in (keras.metrics.Mean, keras.metrics.Sum):
        return (chances,)
    if name.startswith("Sparse"):
        return labels, chances
    if name in ("IoU", "MeanIoU"):
        return labels, rng.integers(0, CLASSES, 6)
    return hot, chances / chances.sum(1, keepdims=True)


@pytest.mark.parametrize(("kind", "arguments"), list(_of_keras()))
def test_states_of_every_metric_of_keras_add_up(kind, arguments):
    rng = np.random.default_rng(5)
    batches = [_batch(kind, rng) for _ in range(4)]

    def after(rows):
        metric = kind(*arguments)
        for batch in rows:
            metric.update_state(*batch)
        return metric

    parts, whole = (after(batches[:1]), after(batches[1:])), after(batches)
    for one, two, both in zip(*(each.variables for each in (*parts, whole)), strict=True):
        total = np.asarray(one.value, float) + np.asarray(two.value, float)
        np.testing.assert_allclose(total, both, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "is_additive"),
    [
        (lambda: Hits(0.0), True),
        (lambda: Balance(), True),
        (lambda: OneHot(keras.metrics.AUC(name="auc")), True),
        (lambda: FromOne(0.0), True),
        (lambda: Listing(), False),
        (lambda: Largest(), False),
        (lambda: Newest(), False),
        (lambda: Hidden(), False),
    ],
)
def test_the_probe_of_a_metric_changes_nothing_and_knows_what_adds_up(make, is_additive):
    metric = make()
    values = RNG.normal(size=(8, CLASSES)).astype(np.float32)
    metric.update_state(Y[:8], values)
    before = [np.array(each.value) for each in metric.variables]
    batches = list(getattr(metric, "batches", []))
    assert _probe(metric, (Y[:8], values), {}) is is_additive
    for variable, known in zip(metric.variables, before, strict=True):
        np.testing.assert_array_equal(variable, known)
    assert list(getattr(metric, "batches", [])) == batches


def test_a_metric_is_probed_once_and_outside_of_the_graph_of_a_step():
    is_eager = []

    class Noting(Hits):
        def update_state(self, *batch):
            is_eager.append(tf.executing_eagerly())
            super().update_state(*batch)

    metric = Noting(0.0)
    tested = _Tested(metric)
    _watch(tested)
    step = tf.function(lambda values: metric.update_state(None, values))
    for _ in range(3):
        step(tf.constant([[1.0, -1.0]]))
    assert is_eager == [False, True, True]
    assert tested.is_additive is True
    np.testing.assert_array_equal(metric.hits, [3, 3])


def test_the_probe_waits_for_an_update_that_changes_something():
    metric = Largest()
    assert _probe(metric, (Y[:4], -np.ones((4, CLASSES), np.float32)), {}) is None


def test_a_state_that_no_message_carries_stays_the_workers():
    class Member:
        model = plain_model()

    Member.model.compile("sgd", LOSS)
    merging = TrainMetrics(Member)
    large = keras.metrics.MeanIoU(400, name="large")
    Member.model._metrics.append(large)
    merging.begin_epoch()
    names = [each.name.partition("/")[2] for each in merging.describe()]
    assert "loss" in names and "large" not in names
