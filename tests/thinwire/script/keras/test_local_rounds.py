"""Scripts with many local steps: optimizer state over rounds, fits and processes."""

import itertools
import types

import keras
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
from thinwire import distribute
from thinwire.script import kept_state
from thinwire.script.kept_state import KeptState
from thinwire.script.settings import read_settings

ROUNDS = {"pacer": "fixed", "local_steps": 3}
LONG = pytest.mark.product
FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def adamw(loss=LOSS, **options):
    """Return a model with AdamW, warm-up and cosine over 12 steps: three epochs."""
    rate = keras.optimizers.schedules.CosineDecay(0.0, 10, warmup_target=0.05, warmup_steps=2)
    model = plain_model()
    model.compile(keras.optimizers.AdamW(rate, weight_decay=0.1), loss=loss, **options)
    return model


class Count(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is the count that it is read at."""

    def __call__(self, step):
        return keras.ops.cast(step, "float32")


def clock(name, **settings):
    return settings | ({"schedule_clock": name} if name == "steps" else {})


@pytest.mark.parametrize("clock_of", ["batches", pytest.param("steps", marks=LONG)])
def test_the_state_of_local_steps_survives_the_process(clock_of, tmp_path):
    """Rounds of three steps continue over ends of epochs, which have four, and end with `fit`."""
    expected, _ = alone(adamw, epochs=3)
    settings = clock(clock_of, run_dir=tmp_path, **ROUNDS)
    for number, epochs in enumerate((1, 2)):
        with scripts(tmp_path, "bsp", 1, **settings) as run:
            [(model, _)] = run.fit(adamw, epochs=epochs)
            assert model.thinwire.num_exchanges == (2, 5)[number]
            run.interrupt()
    assert_same(model, expected)
    assert int(model.optimizer.iterations) == 12


@LONG
def test_a_state_that_is_gone_is_named(tmp_path, caplog):
    settings = {"run_dir": tmp_path, **ROUNDS}
    for _ in range(2):
        with scripts(tmp_path, "bsp", 1, **settings) as run:
            [(model, _)] = run.fit(adamw, epochs=1)
            run.interrupt()
        for path in (tmp_path / "checkpoints" / "worker-1").glob("log/*.json"):
            path.unlink()
    assert int(model.optimizer.iterations) == 4
    assert "the state of its optimizer is not on this disk" in caplog.text


class Killed(Exception):
    """In the place of kill -9."""


class Dies(keras.callbacks.Callback):
    """Ends the script after this many batches, like a dead process: nothing is written."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise Killed


@LONG
def test_a_worker_that_dies_in_a_round_goes_on_with_what_it_kept(tmp_path, monkeypatch):
    clock = types.SimpleNamespace(monotonic=itertools.count(0, 100).__next__)
    monkeypatch.setattr(kept_state, "time", clock)  # it is always time to save
    settings = {"run_dir": tmp_path, **ROUNDS}
    found = []

    def script(given, after):
        model = distribute(adamw(), given)
        try:
            model.fit(X, Y, epochs=2, callbacks=[Dies(after)] if after else [], **FIT)
        except Killed:
            found.append([variable.numpy() for variable in model.optimizer.variables])
        return model

    for after in (7, 0):  # two rounds, and a step; then to the end
        with scripts(tmp_path, "bsp", 1, **settings) as run:
            [model] = run.each(lambda given, after=after: script(given, after))
            run.interrupt()
    assert int(model.optimizer.iterations) == 8 + 6  # kept before the seventh batch began
    assert int(found[0][0]) == 7


@LONG
def test_two_workers_read_the_schedule_at_the_run_s_count(tmp_path):
    """A round's steps count for all workers: there is no jump at an exchange."""
    counts = []

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            counts.append(round(float(self.model.optimizer.learning_rate)))

    def counting():
        model = plain_model()
        model.compile(keras.optimizers.SGD(Count()), loss=LOSS)
        return model

    settings = {"batch": "worker", **ROUNDS}
    with scripts(tmp_path, "bsp", 2, **settings) as run:
        run.fit(counting, epochs=3, callbacks=lambda: [Counts()])
    assert sorted(counts) == sorted([2, 4, 6, 8, 10, 12] * 2)


def test_only_local_steps_of_scripts_with_a_folder_are_kept(tmp_path):
    def kept(**settings):
        words = {"model_from": "worker", "nb_workers": 1, "id_worker": 1, "port": 1, **settings}
        return KeptState.of(read_settings(None, words, type_node="Worker"))

    assert kept(method="bsp", run_dir=tmp_path, **ROUNDS) is not None
    assert kept(method="bsp", **ROUNDS) is None
    assert kept(method="dgs", run_dir=tmp_path) is None


@pytest.mark.parametrize("method", ["bsp", "dgs"])
def test_a_step_is_traced_once(method, tmp_path):
    """A step that makes variables is traced twice, which takes minutes for thousands of them."""
    seen = []

    def counted():
        loss = lambda y, y_pred: seen.append(1) or LOSS(y, y_pred)  # noqa: E731
        return adamw(loss, metrics=["accuracy"])

    with scripts(tmp_path, method) as run:
        run.fit(counted, epochs=1)
    assert seen == [1]
