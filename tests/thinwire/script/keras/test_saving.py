"""Files that several workers may write are always complete."""

import contextlib
import pathlib

import keras
import numpy as np
import pytest

from thinwire.script.keras.files import save_once


class Alone:
    """A worker that writes everything."""

    def saving(self, is_own):
        del is_own
        return contextlib.nullcontext(True)


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    save_once(made, Alone().saving)
    return made


@pytest.mark.parametrize("name", ["model.keras", pathlib.Path("inner") / "model.keras"])
def test_a_model_is_saved_where_it_should_be(model, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    for _ in range(2):
        model.save(name)
    assert [file.name for file in (tmp_path / name).parent.glob("*.*")] == ["model.keras"]
    loaded = keras.models.load_model(name)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_nothing_is_replaced_by_half_a_file(model, tmp_path, monkeypatch):
    path = tmp_path / "best.weights.h5"
    model.save_weights(path)
    before = path.read_bytes()

    def fail(store):
        raise OSError("the disk is full")

    monkeypatch.setattr(model.layers[0], "save_own_variables", fail)
    with pytest.raises(OSError, match="disk is full"):
        model.save_weights(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_weights_in_shards_and_callbacks(model, tmp_path):
    model.compile("sgd", "mse")
    model.save_weights(tmp_path / "w.weights.json", max_shard_size=1)
    model.load_weights(tmp_path / "w.weights.json")
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), epochs=2, verbose=0, callbacks=[saver])
    assert {"1.keras", "2.keras"} <= {file.name for file in tmp_path.iterdir()}


def test_what_keras_objects_to_is_left_to_keras(model, tmp_path):
    with pytest.raises(ValueError, match="keras"):
        model.save(tmp_path / "model.txt")
    with pytest.raises((OSError, ValueError)):
        model.save_weights(tmp_path / "nowhere" / "inner.txt")
    model.save(tmp_path / "folder", zipped=False)
    assert (tmp_path / "folder" / "config.json").is_file()


def test_a_worker_that_does_not_write_exports_nothing(tmp_path):
    class Other:
        def saving(self, is_own):
            return contextlib.nullcontext(is_own)

    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    save_once(made, Other().saving)
    assert made.export(tmp_path / "served", verbose=False) is None
    assert not (tmp_path / "served").exists()
