"""Callbacks in real runs: files of one worker, rates, early stops, values in the logs."""

import pathlib
import tempfile

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
from tests.waiting import wait_until
from thinwire import callbacks, distribute

o = keras.optimizers


def product(*values):
    return pytest.param(*values, marks=pytest.mark.product)


def compiled(optimizer):
    def make():
        model = plain_model()
        model.compile(optimizer(), loss=LOSS)
        return model

    return make


OPTIMIZERS = {
    "adamw": lambda: o.AdamW(0.01),
    "loss scale and ema": lambda: o.LossScaleOptimizer(
        o.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8),
        initial_scale=2.0**8,
        dynamic_growth_steps=3,
    ),
    "cosine": lambda: o.Adam(o.schedules.CosineDecay(0.05, 16)),
}


def keeper(folder, **options):
    return keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras", **options)


@pytest.mark.parametrize("name", ["loss scale and ema", product("adamw"), product("cosine")])
def test_a_checkpoint_goes_on_alone_as_if_nothing_had_been(name, tmp_path):
    make = compiled(OPTIMIZERS[name])
    expected, _ = alone(make, epochs=4)
    with scripts(tmp_path / "run", "bsp", 2) as run:
        for _, history in run.fit(make, epochs=2, callbacks=lambda: [keeper(tmp_path)]):
            assert len(history["loss"]) == 2
    assert {path.name for path in tmp_path.glob("*.keras")} == {"1.keras", "2.keras"}
    for epoch in (1, 2):
        again = keras.models.load_model(tmp_path / f"{epoch}.keras")
        assert int(again.optimizer.iterations) == 4 * epoch
        if epoch == 2 and make().optimizer.get_config().get("use_ema"):
            continue  # the end of a fit has put the averages in
        again.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, epochs=4, initial_epoch=epoch)
        assert_same(again, expected)
        assert int(again.optimizer.iterations) == 16


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def writers(folder):
    return [
        keeper(folder, save_freq=2),
        keras.callbacks.CSVLogger(folder / "log.csv", append=True),
        keras.callbacks.TensorBoard(folder / "board"),
        keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keeper(folder / "ema", save_weights_only=False),
    ]


@pytest.mark.parametrize("method", ["bsp", product("dgs")])
def test_files_are_written_by_one_worker(method, tmp_path):
    make = compiled(lambda: o.SGD(0.1, use_ema=True))
    folder = tmp_path / "files"
    folder.mkdir()
    logs = []

    def written():
        logs.append(keras.callbacks.CSVLogger(folder / "log.csv"))
        return [callbacks.Version(), *writers(folder), logs[-1]]

    with scripts(tmp_path / "run", method, 2) as run:
        found = run.fit(make, epochs=2, validation_data=(X, Y), callbacks=written)
        assert all(each.filename == str(folder / "log.csv") for each in logs), "as it was given"
        for model, _ in found:
            model.save(folder / "final.keras")
    names = files(folder)
    boards = [name for name in names if name.startswith("board/train/")]
    assert len(boards) == 1, names
    assert {"1.keras", "2.keras", "ema/1.keras", "ema/2.keras", "final.keras"} <= set(names)
    assert "backup/latest.weights.h5" in names
    rows = (folder / "log.csv").read_text().splitlines()
    assert rows[0].startswith("epoch,") and "version" in rows[0]
    again = keras.models.load_model(folder / "final.keras")
    assert_same(again, found[0][0])


@pytest.mark.product
def test_every_worker_has_its_own_temporary_files(tmp_path):
    with scripts(tmp_path, "bsp", 2) as run:

        def script(settings):
            model = distribute(compiled(lambda: o.Adam(0.01))(), settings)
            with tempfile.TemporaryDirectory() as folder:
                kept, log = pathlib.Path(folder) / "1.keras", pathlib.Path(folder) / "log.csv"
                options = {"callbacks": [keeper(kept.parent), keras.callbacks.CSVLogger(log)]}
                model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, **options)
                again = keras.models.load_model(kept)
                assert log.read_text().startswith("epoch,loss")
                model.save(kept)
                assert_same(keras.models.load_model(kept), model)
            return again, model

        for again, model in run.each(script):
            assert_same(again, model)


def test_a_file_that_was_saved_can_be_loaded_by_all(tmp_path):
    with scripts(tmp_path / "run", "asgd", 2) as run:

        def script(settings):
            model = distribute(compiled(lambda: o.Adam(0.01))(), settings)
            model.fit(X, Y, batch_size=BATCH, verbose=0)
            model.save(tmp_path / "saved.keras")
            return model, keras.models.load_model(tmp_path / "saved.keras")

        for model, again in run.each(script):
            assert_same(again, model)
            states = zip(again.optimizer.variables, model.optimizer.variables, strict=True)
            for mine, theirs in states:
                np.testing.assert_array_equal(mine, theirs, err_msg=mine.path)


@pytest.mark.parametrize("method", ["bsp", product("asgd"), product("dgs")])
def test_one_worker_stops_fit_for_all(method, tmp_path):
    with scripts(tmp_path, method, 2) as run:

        def script(settings):
            model = distribute(compiled(lambda: o.Adam(0.01))(), settings)

            def stop(batch, logs):
                if settings["id_worker"] == 2 and batch == 1:
                    model.stop_training = True

            stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
            options = {"batch_size": BATCH, "verbose": 0, "validation_data": (X, Y)}
            history = model.fit(X, Y, epochs=5000, callbacks=[stops], **options).history
            model.fit(X, Y, epochs=2, **options)
            return model, len(history["loss"])

        (one, num_first), (two, num_second) = run.each(script)
    assert num_second == 1
    assert num_first < 5000
    assert_same(one, two, atol=0)


def test_a_stop_within_an_epoch_reaches_others_in_their_epoch(tmp_path):
    def script(settings):
        model = distribute(compiled(lambda: o.SGD(0.1))(), settings)
        seen = []

        def stop(batch, logs):
            if settings["id_worker"] == 2:
                model.stop_training = True
            else:
                wait_until(lambda: model.stop_training)
            seen.append(batch)

        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks)
        return seen

    with scripts(tmp_path, "asgd", 2) as run:
        assert run.each(script) == [[0], [0]]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("bsp", "AdamW"),
        product("bsp", "Adafactor"),
        product("asgd", "AdamW"),
        product("dgs", "Adafactor"),
        product("esync", "AdamW"),
    ],
)
def test_any_rate_may_be_set_at_any_time(method, name, tmp_path):
    make = compiled(lambda: getattr(o, name)(0.01))

    def rates():
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.9)
        return [plateau, schedule]

    expected, history = alone(make, epochs=3, callbacks=rates())
    with scripts(tmp_path, method, 2) as run:
        for model, found in run.fit(make, epochs=3, callbacks=rates):
            assert found["learning_rate"] == pytest.approx(history["learning_rate"])
            if method == "bsp":
                assert_same(model, expected)
        if method in ("bsp", "asgd"):
            assert run.shards[0].core.model.learning_rate == pytest.approx(
                2 * history["learning_rate"][-1]  # halved after the last step
            )


def test_the_logs_have_what_a_run_costs(tmp_path):
    def figures():
        return [callbacks.Traffic(), callbacks.Staleness(), callbacks.Version()]

    make = compiled(lambda: o.Adam(0.01))
    _, by_itself = alone(make, epochs=2, callbacks=figures())
    size = 4 * sum(int(np.prod(each.shape)) for each in make().trainable_variables)
    with scripts(tmp_path, "asgd", 2) as run:
        histories = [history for _, history in run.fit(make, epochs=2, callbacks=figures)]
    for history in histories:
        assert list(history) == list(by_itself)
        assert min(*history["bytes_up"], *history["bytes_down"]) > 2 * size
        assert max(history["staleness"]) <= max(history["staleness_max"])
    assert max(history["version"][-1] for history in histories) == 8
    assert by_itself["version"] == [4, 8]
    assert by_itself["bytes_up"] == by_itself["staleness"] == [0, 0]


@pytest.mark.parametrize("method", [product("bsp"), "asgd"])
def test_a_run_that_ends_first_leaves_weights_and_optimizer_to_all(method, tmp_path):
    make = compiled(lambda: o.Adam(0.01))
    with scripts(tmp_path, method, 2, linger_seconds=15, iter_max=9) as run:
        models = [model for model, _ in run.fit(make, epochs=50)]
        core = run.shards[0].core
        for model in models:
            assert model.thinwire.stop_reason == "iter_max"
            flat = np.concatenate([np.ravel(each) for each in model.trainable_variables])
            np.testing.assert_array_equal(flat, core.model.theta)
            assert int(model.optimizer.iterations) == 9
            assert max(np.abs(each).max() for each in model.optimizer.variables[2:]) > 0


class Finished(keras.callbacks.Callback):
    """Stops a fit as it begins, as one of a script that finds its work done."""

    def on_train_begin(self, logs=None):
        self.model.stop_training = True


def test_a_fit_may_be_stopped_as_it_begins(tmp_path):
    def story(settings):
        model = distribute(compiled(lambda: o.SGD(0.1))(), settings)
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[Finished()])
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        return model.thinwire.num_exchanges

    model = compiled(lambda: o.SGD(0.1))()
    for given in ([Finished()], []):
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=given)
    with scripts(tmp_path) as run:
        assert run.each(story) == [int(model.optimizer.iterations)] == [1 + 2 * len(X) // BATCH]
