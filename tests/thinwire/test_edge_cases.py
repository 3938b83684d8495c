"""Edge cases of sparse methods with real variables: dgs through a server and a custom loop.

All-zero gradients, tensors of one entry, frozen variables, embeddings, late and returning workers.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire import toy
from thinwire import GradientSGD, W_global, distribute, init_server
from thinwire.models.flat_model import SharedModel
from thinwire.worker.train_step import TrainStep

ROWS = np.array([[1, 2, 1], [5, 1, 2]])  # rows of the embedding; 1 occurs three times, 2 twice
LABELS = np.array([0, 1], np.int32)
METHODS = ("dgs", "dgc")


@keras.saving.register_keras_serializable()
class Scale(keras.layers.Layer):
    """A factor for all: one trainable number without dimensions."""

    def build(self, shape):
        del shape
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, inputs):
        return self.factor * inputs


def build():
    keras.utils.set_random_seed(2)
    W_global.clear()
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(8, 4, name="rows"),
            keras.layers.GlobalAveragePooling1D(name="mean"),
            Scale(name="scale"),
            keras.layers.Dense(5, name="frozen", trainable=False),
            keras.layers.Dense(2, name="logits"),
        ],
        name="edges",
    )
    model.compile(keras.optimizers.SGD(0.1), loss=toy.LOSS)
    return model


@contextlib.contextmanager
def serving(**settings):
    settings = {"nb_workers": 1, "kernels": "numpy", "learning_rate": 0.1} | settings
    settings |= {"warmup_epochs": 0} if settings["mode"] == "dgc" else {}
    with init_server(settings, build(), port=0) as server:
        port = int(server.address.rpartition(":")[2])
        yield server, settings | {"port": port, "reconnect_timeout_seconds": 30}


def pairs_of(model):
    with tf.GradientTape() as tape:
        loss = toy.LOSS(LABELS, model(ROWS, training=True))
    variables = model.trainable_variables
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    assert isinstance(gradients[0], tf.IndexedSlices)
    return list(zip(gradients, variables, strict=True))


def test_a_training_step_sums_rows_and_leaves_frozen_variables_out():
    model = build()
    shared = SharedModel.of(model)
    assert [tensor.path.rpartition("/")[0] for tensor in shared.spec.tensors] == [
        "edges/rows",
        "edges/scale",
        "edges/logits",
        "edges/logits",
    ]
    assert shared.spec.tensors[1].size == 1
    flat = np.empty(shared.spec.num_parameters, np.float32)
    TrainStep(shared).gradients(ROWS, LABELS, flat)
    dense = [tf.convert_to_tensor(gradient).numpy() for gradient, _ in pairs_of(model)]
    np.testing.assert_allclose(flat, np.concatenate([each.ravel() for each in dense]), atol=1e-6)
    touched = np.flatnonzero(np.abs(dense[0]).sum(1))
    np.testing.assert_array_equal(touched, np.unique(ROWS))


@pytest.mark.parametrize("mode", METHODS)
def test_only_rows_that_were_touched_move_and_nothing_frozen(mode):
    with serving(mode=mode, compression_rate=0.1) as (server, found):
        model = build()
        frozen = [value.numpy() for value in model.get_layer("frozen").weights]
        before = model.get_layer("rows").embeddings.numpy()
        with GradientSGD(model, args=found) as optimizer:
            infos = [optimizer.step(pairs_of(model)) for _ in range(6)]
        assert all(1 <= info.nnz_up <= 3 + 1 + 1 + 1 for info in infos)
        assert len(server.snapshot().weights) == 4
        moved = np.flatnonzero(np.abs(model.get_layer("rows").embeddings - before).sum(1))
        assert len(moved) > 0 and set(moved) <= set(np.unique(ROWS))
        assert float(model.get_layer("scale").factor) != 1.0
        for now, then in zip(model.get_layer("frozen").weights, frozen, strict=True):
            np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("mode", METHODS)
def test_a_gradient_of_zeros_counts_and_changes_nothing(mode):
    with serving(mode=mode, compression_rate=0.1) as (server, found):
        model = build()
        before = toy.trained(model)
        with GradientSGD(model, args=found) as optimizer:
            info = optimizer.step([(None, v) for v in model.trainable_variables], samples=7)
        assert (info.version, info.nnz_up, info.exchanged) == (1, 0, True)
        assert server.snapshot().samples == 7
        for now, then in zip(toy.trained(model), before, strict=True):
            np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("down_codec", ["sparse", "auto", "delta"])
def test_who_joins_late_has_the_servers_model_and_empty_buffers(down_codec):
    settings = {"mode": "dgs", "nb_workers": 2, "compression_rate": 0.1, "down_codec": down_codec}
    with serving(**settings) as (server, found):
        first, second = build(), build()
        with GradientSGD(first, args=found, id_worker=1) as one:
            for _ in range(5):
                one.step(pairs_of(first))
            with GradientSGD(second, args=found, id_worker=2) as two:
                for mine, all_of_it in zip(
                    toy.trained(second), server.snapshot().weights, strict=True
                ):
                    np.testing.assert_array_equal(mine, all_of_it)
                residual = two._stepper.part.core.save()["codec"]["inner"]["residual"]
                assert not any(each.any() for each in residual)
                assert two.step(pairs_of(second)).version == 6
            assert one.step(pairs_of(first)).version == 7


def test_who_fits_again_goes_on_with_its_residual():
    with toy.serving(mode="dgs", compression_rate=0.1) as (_, found):
        model = toy.build()
        model.compile(keras.optimizers.SGD(0.1), loss=toy.LOSS)
        worker = distribute(model, found).thinwire

        def residual():
            return np.concatenate(worker.joined.part.core.save()["codec"]["inner"]["residual"])

        model.fit(toy.X, toy.Y, batch_size=32, verbose=0)
        before = residual()
        assert before.any()
        model.fit(toy.X, toy.Y, initial_epoch=1, verbose=0)  # only fetches the model
        np.testing.assert_array_equal(residual(), before)
        worker.close()
