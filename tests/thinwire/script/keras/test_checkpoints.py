"""TensorFlow's checkpoints in a script of several workers: one worker writes, all restore."""

import tempfile
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import BATCH, LOSS, X, Y, assert_same, plain_model, scripts
from thinwire import distribute
from thinwire.script.keras import checkpoints


@pytest.fixture
def written(monkeypatch):
    """The prefixes that were really written, each with the thread that did."""
    found, save = [], tf.train.Checkpoint._write
    alone = getattr(save, "__wrapped__", save)

    def note(checkpoint, prefix, options=None):
        found.append((str(prefix), threading.get_ident()))
        return alone(checkpoint, prefix, options)

    checkpoints._guard_classes.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(tf.train.Checkpoint, "_write", note)
        checkpoints._guard_classes()
        yield found
    checkpoints._guard_classes.cache_clear()


def restored(path):
    """Return a model, and its Adam, as a plain script restores them."""
    model, optimizer = plain_model(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(model=model, optimizer=optimizer).restore(path).expect_partial()
    return model, optimizer


class SavesByManager(keras.callbacks.Callback):
    def __init__(self, manager):
        super().__init__()
        self.manager, self.paths = manager, []

    def on_epoch_end(self, epoch, logs=None):
        self.paths.append(self.manager.save())


def test_a_manager_in_fit_writes_the_run_s_model_once(tmp_path, written):
    def script(settings):
        model = plain_model()
        model.compile(keras.optimizers.Adam(0.01), LOSS)
        model = distribute(model, settings)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        saver = SavesByManager(
            tf.train.CheckpointManager(checkpoint, tmp_path / "kept", max_to_keep=1)
        )
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[saver])
        last = checkpoint.save(tmp_path / "last")
        again, optimizer = restored(last)
        assert saver.manager.latest_checkpoint == saver.paths[-1]
        assert saver.manager.checkpoints == saver.paths[-1:]
        return model, again, optimizer, saver.paths

    with scripts(tmp_path / "run", "bsp", 2) as run:
        (model, again, optimizer, paths), (other, also, _, same) = run.each(script)
    assert paths == same == [str(tmp_path / "kept" / f"ckpt-{n}") for n in (1, 2)]
    assert [path for path, _ in written] == [*paths, str(tmp_path / "last-3")]
    assert len({thread for _, thread in written}) == 1
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names == {"checkpoint"} | {f"ckpt-2.{kind}" for kind in ("index", "data-00000-of-00001")}
    assert tf.train.latest_checkpoint(tmp_path / "kept") == paths[-1]
    for each in (again, also, restored(paths[-1])[0]):
        assert_same(each, model, atol=0)
    assert_same(other, model, atol=0)
    moments = [v for v in optimizer.variables if "moment" in v.path]
    assert int(optimizer.iterations) == 8 and all(np.any(each.numpy()) for each in moments)


@pytest.mark.product
def test_a_loop_writes_once_what_the_run_has(tmp_path, written):
    def script(settings):
        model, alone = plain_model(), keras.optimizers.Adam(0.01)
        optimizer = distribute(alone, settings, model=model)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        for start in (0, BATCH):
            rows = slice(start, start + BATCH)
            with tf.GradientTape() as tape:
                loss = LOSS(Y[rows], model(X[rows], training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)
        path = checkpoint.write(tmp_path / "loop")
        return model, restored(path)

    with scripts(tmp_path / "run", "bsp", 2) as run:
        (model, (again, optimizer)), (_, (also, _)) = run.each(script)
    assert [path for path, _ in written] == [str(tmp_path / "loop")]
    assert_same(again, model, atol=0)
    assert_same(also, model, atol=0)
    assert int(optimizer.iterations) == 2


def test_what_is_no_model_is_written_by_one_and_temporary_files_by_all(tmp_path, written):
    counter, folder = tf.train.Checkpoint(step=tf.Variable(7)), tmp_path / "kept"
    checkpoints.write_checkpoints_once(lambda: False)
    manager = tf.train.CheckpointManager(counter, folder, max_to_keep=1)
    assert [manager.save(), manager.save()] == [str(folder / "ckpt-1"), str(folder / "ckpt-2")]
    assert manager.latest_checkpoint == str(folder / "ckpt-2") == manager.checkpoints[0]
    assert not written and not folder.exists()
    with tempfile.TemporaryDirectory() as own:
        assert tf.train.latest_checkpoint(own) is None
        path = counter.save(own + "/own")
        assert tf.train.load_variable(path, "step/.ATTRIBUTES/VARIABLE_VALUE") == 7
    checkpoints.write_checkpoints_once(lambda: True)
    assert manager.save() == str(folder / "ckpt-4")
    assert tf.train.latest_checkpoint(folder) == str(folder / "ckpt-4")
    assert [each for each, _ in written] == [path, str(folder / "ckpt-4")]
