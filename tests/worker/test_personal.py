"""Layers outside W_global: each worker of main.py trains its own, over rounds and restarts."""

import threading

import keras
import numpy as np
import pytest

from tests.thinwire.toy import X, Y, build, serving
from thinwire import W_global
from thinwire.data.loading import TrainingShard
from thinwire.data.pipeline.cursor import Cursor
from thinwire.models.flat_model import SharedModel
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.methods.method import METHODS
from thinwire.ops.optimizers.local import LocalUpdate
from thinwire.script.settings import read_settings
from thinwire.worker.personal import PersonalLayers
from thinwire.worker.role import Worker
from thinwire.worker.standalone import LocalTrainer
from thinwire.worker.train_step import TrainStep

SHARED = ("hidden", "norm")
BATCH = 20


@pytest.fixture(autouse=True)
def nothing_listed():
    yield
    W_global.clear()


def shared_model():
    """A model with a last layer that stays on its worker."""
    model = build()
    W_global.clear()
    W_global.extend(v for name in SHARED for v in model.get_layer(name).trainable_variables)
    return SharedModel.of(model)


def shard_of(number, nb_workers):
    images, labels = X[number - 1 :: nb_workers], Y[number - 1 :: nb_workers]
    cursor = Cursor(np.arange(len(labels)), BATCH, number)
    return TrainingShard(images, labels, cursor, {}, lambda chosen, place: images[chosen], len(X))


def worker_of(settings, number, folder):
    settings = settings | {"id_worker": number, "run_dir": str(folder)}
    chosen = read_settings(settings, {}, type_node="Worker")
    shard = shard_of(number, chosen.run.nb_workers)
    return Worker(chosen.run, chosen.worker(), shared_model(), shard)


def personal(worker):
    return [v.numpy() for v in worker.step.personal]


def trained(workers):
    codes = {}
    threads = [
        threading.Thread(target=lambda w=worker: codes.update({w.own.id_worker: w.train()}))
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(codes.values()) == {0}


ROWS = [name for name, row in METHODS.items() if row["pacer"] == "fixed"]


@pytest.mark.parametrize(
    "method",
    ["bsp", *(pytest.param(name, marks=pytest.mark.product) for name in ["esync", *ROWS])],
)
def test_each_worker_trains_its_own_layers(method, tmp_path):
    rounds = {"local_steps": 3} if method in ROWS else {}
    settings = {"method": method, "nb_workers": 2, "iter_max": 8, "batch_size": BATCH, **rounds}
    with serving(SHARED, **settings) as (server, found):
        workers = [worker_of(found, number, tmp_path) for number in (1, 2)]
        before = personal(workers[0])
        trained(workers)
        assert len(server.snapshot().weights) == 4
        one, two = (worker.step.model for worker in workers)
    for first, second, start in zip(*map(personal, workers), before, strict=True):
        assert np.abs(first - start).max() > 1e-3
        assert np.abs(second - start).max() > 1e-3
        assert np.abs(first - second).max() > 1e-5  # no worker sends them
    for name in SHARED:
        for mine, theirs in zip(
            one.get_layer(name).trainable_variables,
            two.get_layer(name).trainable_variables,
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.product), "adam"])
def test_a_restarted_worker_has_its_own_layers_and_their_slots(optimizer, tmp_path):
    """Two workers of one PS; one of them is another object in the second half."""
    settings = {
        **{"method": "bsp", "pacer": "fixed", "local_steps": 2, "iter_max": 6},
        **{"local_optimizer": optimizer, "batch_size": BATCH},
    }
    with serving(SHARED, **settings) as (_, found):
        first = worker_of(found, 1, tmp_path)
        trained([first])
        values, slots = personal(first), first.personal.save()
        again = worker_of(found, 1, tmp_path)
        again.session.run_id = again.checkpoints.load_latest()[1]["run_id"]
        again.resume(first.session.core.step)
    for was, now in zip(values, personal(again), strict=True):
        np.testing.assert_array_equal(was, now)
    assert str(slots) == str(again.personal.save())
    assert bool(slots) == (optimizer == "adam")


def test_alone_with_everything_shared_nothing_is_personal():
    model = build()
    step = TrainStep(SharedModel.of(model))
    layers = PersonalLayers(step.personal, None)
    layers.begin_round()
    layers.check()
    layers.step(0.1)
    assert (len(layers.gradient), layers.save()) == (0, {})


def test_gradients_are_those_of_keras():
    shared = shared_model()
    step, model = TrainStep(shared), shared.model
    flat = np.zeros(shared.spec.num_parameters, np.float32)
    own = np.zeros(8 * 4 + 4, np.float32)
    step.gradients(X[:BATCH], Y[:BATCH], flat, own)
    device, _ = step.gradients_on_device(X[:BATCH], Y[:BATCH], second := np.zeros_like(own))
    np.testing.assert_allclose(second, own, atol=1e-6)
    np.testing.assert_allclose(np.asarray(device), flat, atol=1e-6)
    before = [v.numpy() for v in model.trainable_variables]
    model.compile(keras.optimizers.SGD(1.0), loss=step.loss)
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    moved = [old - v.numpy() for old, v in zip(before, model.trainable_variables, strict=True)]
    found = np.concatenate([flat, own])
    np.testing.assert_allclose(found, np.concatenate([m.ravel() for m in moved]), atol=1e-5)


def test_a_gradient_of_nan_is_refused():
    shared = shared_model()
    layers = PersonalLayers(TrainStep(shared).personal, LocalUpdate())
    layers.gradient[3] = np.nan
    with pytest.raises(NonFiniteUpdate, match="outside W_global"):
        layers.check()


def test_one_device_trains_all_layers():
    settings = read_settings({"method": "bsp", "nb_workers": 1}, {}, type_node="Worker")
    shared = shared_model()
    trainer = LocalTrainer(shared, settings.run.method, 0.0)
    before = [v.numpy() for v in shared.model.trainable_variables]
    trainer.train(X[:BATCH], Y[:BATCH], 0.1)
    for old, variable in zip(before, shared.model.trainable_variables, strict=True):
        assert np.abs(variable.numpy() - old).max() > 0
