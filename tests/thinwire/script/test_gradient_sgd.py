"""`GradientSGD` and `init_server` in one process: equalities, ends, errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.toy import build, gradients_of, serving, trained
from thinwire import GradientSGD, RunOver, StepInfo, init_server
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import Unreachable
from thinwire.proto.grpc.session import RequestRejected

BATCHES = [np.arange(16) + 16 * number for number in range(8)]


def train(optimizer, model, batches=BATCHES):
    infos = []
    for batch in batches:
        loss, gradients = gradients_of(model, batch)
        pairs = list(zip(gradients, model.trainable_variables, strict=True))
        infos.append(optimizer.step(pairs[::-1], loss=loss, samples=len(batch)))
    return infos


def by_hand(momentum=0.0, weight_decay=0.0, rate=0.1):
    model = build()
    velocity = [0.0] * len(model.trainable_variables)
    for batch in BATCHES:
        _, gradients = gradients_of(model, batch)
        for number, (g, v) in enumerate(zip(gradients, model.trainable_variables, strict=True)):
            velocity[number] = momentum * velocity[number] + g + weight_decay * v.value
            v.assign_sub(rate * velocity[number])
    return trained(model)


def close(model, expected):
    for mine, theirs in zip(trained(model), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_msgd_is_momentum_sgd_without_a_server():
    model = build()
    optimizer = GradientSGD(model, lr=0.1, momentum=0.9, weight_decay=0.01, mode="MSGD")
    assert train(optimizer, model)[-1] == StepInfo(len(BATCHES), 0.1, 0, 0, 0, 0, 0, {})
    close(model, by_hand(0.9, 0.01))


def test_asgd_with_one_worker_is_sgd():
    with serving(mode="asgd") as (server, found):
        model = build()
        with GradientSGD(model, weight_decay=0.01, args=found) as optimizer:
            infos = train(optimizer, model)
        close(model, by_hand(weight_decay=0.01))
        assert [info.version for info in infos] == list(range(1, 9))
        assert all(info.exchanged and info.staleness == 0 for info in infos)
        sizes = sum(value.size for value in trained(model))
        assert infos[0].nnz_up == infos[0].nnz_down == sizes
        assert infos[0].bytes_up >= 4 * sizes
        assert infos[0].lr == pytest.approx(0.1)
        assert set(infos[0].seconds) == {"compute", "encode", "wait"}
        snapshot = server.snapshot()
        assert snapshot.version == server.version == 8
        assert snapshot.samples == 128
        for mine, theirs in zip(trained(model), snapshot.weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_dgs_that_sends_everything_is_momentum_sgd():
    with serving(mode="dgs", compression_rate=1.0, dgs_momentum=0.6) as (_, found):
        model = build()
        with GradientSGD(model, momentum=0.6, mode="gradient_sgd", args=found) as optimizer:
            train(optimizer, model)
        close(model, by_hand(0.6))


def test_the_run_ends_for_server_and_worker():
    with serving(mode="asgd", iter_max=3) as (server, found):
        model = build()
        optimizer = GradientSGD(model, lr=0.5, args=found)
        infos = train(optimizer, model, BATCHES[:3])
        assert [info.stopped for info in infos] == [False, False, True]
        assert optimizer.stopped
        assert optimizer.stop_reason == "iter_max"
        with pytest.raises(RunOver):
            train(optimizer, model, BATCHES[:1])
        optimizer.close()
        assert server.join() == "iter_max"


def test_two_workers_and_one_that_comes_late_and_again():
    with serving(mode="asgd", nb_workers=2, lease_seconds=5) as (server, found):
        first, second = build(), build()
        one = GradientSGD(first, args=found, id_worker=1)
        train(one, first, BATCHES[:2])
        two = GradientSGD(second, args=found, id_worker=2)
        for mine, theirs in zip(trained(second), trained(first), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert train(two, second, BATCHES[2:3])[0].staleness == 0
        assert train(one, first, BATCHES[3:4])[0].staleness == 1
        one.close()
        again = GradientSGD(build(), args=found, id_worker=1)
        assert server.version == 4
        for each in (two, again):
            each.close()
        server.stop()
        assert server.join() == "interrupted"


def test_all_workers_gone_ends_the_wait():
    with serving(mode="asgd") as (server, found):
        GradientSGD(build(), args=found).close()
        assert server.join(idle_seconds=0.3, timeout_seconds=30) == "interrupted"


def test_gradients_of_every_shape():
    with serving(mode="asgd") as (_, found):
        model = build()
        before = trained(model)
        with GradientSGD(model, args=found) as optimizer:
            kernel = model.trainable_variables[0]
            rows = tf.IndexedSlices(tf.ones((2, 8)), tf.constant([1, 1]), kernel.shape)
            assert optimizer.step([(rows, kernel), (None, model.trainable_variables[1])]).exchanged
            assert not optimizer.step([(np.full((6, 8), np.nan), kernel)]).exchanged
            with pytest.raises(ConfigurationError, match="shape"):
                optimizer.step([(np.zeros((8, 6)), kernel)])
            with pytest.raises(ConfigurationError, match="not shared"):
                optimizer.step([(np.zeros(8), keras.Variable(np.zeros(8)))])
        change = before[0] - trained(model)[0]
        np.testing.assert_allclose(change[1], 0.2, rtol=1e-5)
        assert not change[[0, 2, 3, 4, 5]].any()


def test_another_model_or_nobody_is_refused():
    with serving(mode="asgd") as (_, found):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="logits")])
        with pytest.raises(RequestRejected):
            GradientSGD(model, args=found)
        with pytest.raises(RequestRejected, match="codec"):
            GradientSGD(build(), args=found, mode="adacomp")
    found["reconnect_timeout_seconds"] = 0.5
    with pytest.raises(Unreachable):
        GradientSGD(build(), args=found)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "msgd"}, "msgd"),
        ({"nb_ps": 2}, "nb_ps=2"),
        ({"epochs": 2}, "num_train"),
        ({"ip_PS": "0.0.0.0"}, "insecure"),
    ],
)
def test_what_a_server_refuses(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        init_server(settings, build())
    with pytest.raises(ConfigurationError, match="no model"):
        init_server({})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "asgd", "momentum": 0.5}, "momentum=0.5: mode asgd"),
        ({"mode": "msgd", "momentum": 1.5}, "momentum=1.5"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"mode": "dgc"}, "num_train"),
    ],
)
def test_what_a_worker_refuses(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        GradientSGD(build(), **settings)


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.Adam(), keras.optimizers.SGD(0.1, momentum=0.9)]
)
def test_a_compiled_optimizer_is_not_dropped_silently(optimizer):
    model = build()
    model.compile(optimizer, loss="mse")
    with pytest.raises(ConfigurationError, match="GradientSGD ignores"):
        GradientSGD(model, mode="asgd")
    GradientSGD(model, lr=0.1, mode="msgd")
