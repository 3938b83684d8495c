"""`model.fit` of a distributed model: Keras's features, the end of the run, errors."""

import contextlib
import os
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import thinwire
from tests.thinwire.script.keras.runs import scripts
from tests.thinwire.toy import LOSS, X, Y, build, serving, trained
from thinwire import GradientSGD, W_global, distribute
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import Unreachable
from thinwire.worker import trainer


def compiled(optimizer=None, **options):
    model = build()
    model.compile(
        optimizer or keras.optimizers.SGD(0.1), loss=LOSS, metrics=["accuracy"], **options
    )
    return model


def fit(model, **options):
    options = {"batch_size": 24, "epochs": 2, "shuffle": False, "verbose": 0} | options
    return model.fit(X, Y, **options).history


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_one_worker_trains_as_keras_alone(steps_per_execution, tmp_path):
    options = {
        "class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0},
        "validation_data": (X[:40], Y[:40]),
    }
    alone = compiled(steps_per_execution=steps_per_execution)
    expected = fit(alone, **options)
    with serving(mode="asgd") as (server, found):
        model = compiled(steps_per_execution=steps_per_execution)
        saved = keras.callbacks.ModelCheckpoint(tmp_path / "kept.keras")
        with contextlib.closing(distribute(model, found).thinwire) as worker:
            history = fit(model, callbacks=[saved], **options)
            assert worker.last.version == server.version == 14
            assert server.snapshot().samples == 2 * len(X)
        np.testing.assert_allclose(server.snapshot().statistics[:8], model.layers[1].moving_mean)
    assert set(history) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-3, err_msg=name)
    for mine, theirs in zip(model.variables, alone.variables, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5, err_msg=mine.path)
    again = keras.models.load_model(tmp_path / "kept.keras")
    for mine, theirs in zip(trained(again), trained(model), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert isinstance(again.optimizer, keras.optimizers.SGD)
    assert int(again.optimizer.iterations) == 14  # its state was saved too


def test_the_server_ends_fit_and_fit_joins_again():
    with serving(mode="asgd", iter_max=12) as (server, found):
        model = compiled()
        worker = distribute(model, found).thinwire
        history = fit(model, epochs=1)
        assert not worker.stopped
        assert not server.snapshot().version - 7
        assert len(fit(model, epochs=9)["loss"]) == 1
        assert worker.stopped
        assert worker.stop_reason == "iter_max"
        assert server.join() == "iter_max"
        assert len(history["loss"]) == 1


def test_a_server_that_is_gone_ends_fit_with_its_error():
    with serving(mode="asgd") as (_, found):
        model = compiled()
        distribute(model, found, reconnect_timeout_seconds=3)
        fit(model, epochs=1)
        worker = model.thinwire
    before = trained(model)
    with pytest.raises(Unreachable):
        fit(model, epochs=3)
    assert not worker.stopped
    for now, then in zip(trained(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_ctrl_c_ends_a_wait_for_other_workers(monkeypatch):
    monkeypatch.setattr(trainer, "_CUT_SECONDS", 0.1)
    with serving(mode="bsp", nb_workers=2) as (_, found):
        other, model, idle = build(), compiled(), []
        join = threading.Thread(
            target=lambda: idle.append(GradientSGD(other, args=found, id_worker=2))
        )
        join.start()  # no worker gets the model before both have joined
        worker = distribute(model, found).thinwire

        def interrupt_the_wait():
            while not worker.num_exchanges:
                threading.Event().wait(0.02)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt_the_wait, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            fit(model)
        worker.close("interrupted")
        join.join()
        idle[0].close()


def test_the_learning_rate_is_the_servers():
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    same = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)
    settings = {"mode": "asgd", "lr_schedule": "0.5:0.1", "iter_max": 28}
    with serving(**settings) as (_, found):
        model = distribute(compiled(), found)
        assert fit(model, callbacks=[same])["learning_rate"] == pytest.approx([0.1, 0.01])
    with serving(**settings) as (_, found):
        model = distribute(compiled(), found)
        rates = fit(model, callbacks=[halve])["learning_rate"]
        assert rates == pytest.approx([0.05, 0.0025])  # the server's drop counts as well


def test_callbacks_may_change_a_workers_learning_rate():
    def options():
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: (0.2, 0.05, 0.0)[epoch])
        return {"epochs": 3, "callbacks": [scheduler]}

    alone = compiled()
    expected = fit(alone, **options())
    with serving(shared=("norm", "logits"), mode="asgd") as (server, found):
        model = compiled()
        W_global.extend(v for layer in model.layers[1:] for v in layer.trainable_variables)
        with contextlib.closing(distribute(model, found).thinwire):
            history = fit(model, **options())
        assert server.snapshot().learning_rate == pytest.approx(0.1)
    assert history["learning_rate"] == pytest.approx([0.2, 0.05, 0.0])
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-3)
    for mine, theirs in zip(model.variables, alone.variables, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5, err_msg=mine.path)


@pytest.mark.parametrize(
    ("settings", "optimizer", "words"),
    [
        ({"server_optimizer": "adam"}, keras.optimizers.Adam(0.1), "--server_optimizer=adam"),
        ({"weighting": "dc_asgd"}, None, "--weighting=dc_asgd"),
        ({}, None, "learning_rate=-0.05: expected"),
    ],
)
def test_rates_that_no_gradient_can_be_scaled_to_are_refused(settings, optimizer, words):
    factor = 0.5 if settings else -0.5
    change = keras.callbacks.LearningRateScheduler(lambda epoch, rate: factor * rate)
    model = compiled(optimizer)
    with (
        serving(mode="asgd", **settings) as (_, found),
        contextlib.closing(distribute(model, found).thinwire),
        pytest.raises(ConfigurationError, match=words),
    ):
        fit(model, callbacks=[change])


def test_variables_outside_w_global_are_trained_here():
    with serving(shared=("hidden", "norm"), mode="asgd") as (server, found):
        model = compiled()
        W_global.extend(v for layer in model.layers[:2] for v in layer.trainable_variables)
        before = trained(model)
        with contextlib.closing(distribute(model, found).thinwire):
            fit(model)
        assert len(server.snapshot().weights) == 4
        moved = [abs(new - old).max() for new, old in zip(trained(model), before, strict=True)]
        assert min(moved) > 1e-3


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (keras.optimizers.Adam(), "SGD"),
        (keras.optimizers.SGD(0.1, momentum=0.9), "momentum=0.9"),
        (keras.optimizers.SGD(0.1, nesterov=True), "nesterov"),
        (keras.optimizers.SGD(0.1, global_clipnorm=1.0), "clip_norm"),
        (keras.optimizers.SGD(0.1, weight_decay=0.1), "weight_decay"),
        (
            keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.5)),
            "schedule",
        ),
        (keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "bfloat16"),
    ],
)
def test_optimizers_that_would_have_no_effect_are_refused(optimizer, words):
    with pytest.raises(ConfigurationError, match=words):
        distribute(compiled(optimizer), mode="asgd", port=1, reconnect_timeout_seconds=0.5)


def test_models_that_cannot_be_distributed_are_refused():
    with pytest.raises(ConfigurationError, match="Dense"):
        distribute(keras.layers.Dense(1), mode="asgd")
    model = compiled()
    model.layers[0].kernel.constraint = keras.constraints.MaxNorm(1.0)
    with pytest.raises(ConfigurationError, match="constraint"):
        fit(distribute(model, mode="asgd", port=1))


def test_a_strategy_is_refused_but_where_the_script_trains_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model, other = compiled(), compiled()
    assert fit(distribute(model)).keys() == {"accuracy", "loss"}
    with pytest.raises(ConfigurationError, match="OneDeviceStrategy.*`with strategy"):
        distribute(other, mode="asgd", port=1)
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ConfigurationError, match="OneDeviceStrategy"):
        distribute(optimizer, mode="asgd", port=1, model=other)


def test_each_worker_gets_its_part_of_one_array(tmp_path):
    with scripts(tmp_path, "bsp", 2) as run:
        parts = run.each(lambda settings: distribute(compiled(), settings).thinwire.shard(X))
    assert [len(part) for part in parts] == [len(X) // 2] * 2
    np.testing.assert_array_equal(np.sort(np.concatenate(parts), 0), np.sort(X, 0))


def test_without_settings_a_model_trains_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    expected = fit(compiled())
    model = compiled()
    assert distribute(model) is model
    assert not model.thinwire.active
    np.testing.assert_array_equal(model.thinwire.shard(X), X)
    assert fit(model) == expected


def test_compile_after_distribute_counts_at_the_next_fit(caplog):
    model = compiled(jit_compile=True)
    with serving(mode="asgd") as (server, found):
        assert distribute(model, found) is model
        assert "jit_compile is switched off" in caplog.text
        assert distribute(model, found) is model
        with pytest.raises(ConfigurationError, match="a second time with another num_train"):
            distribute(model, found, num_train=8)
        assert not model.jit_compile
        fit(model)
        model.compile(keras.optimizers.SGD(0.1), loss=LOSS, jit_compile=False)
        fit(model)
        assert server.snapshot().samples == 4 * len(X)
        model.compile(keras.optimizers.Adam(), loss=LOSS)
        with pytest.raises(ConfigurationError, match="Adam"):
            fit(model)


def test_a_model_may_be_built_and_compiled_after_distribute():
    keras.utils.set_random_seed(5)
    W_global.clear()
    model = keras.Sequential([keras.layers.Dense(8, name="hidden"), keras.layers.Dense(4)])
    model.name = "toy"
    with serving(shared=("hidden",), mode="asgd", bn_sync=False) as (server, found):
        distribute(model, found)
        model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
        model.build((None, 6))
        W_global.clear()
        W_global.extend(model.layers[0].trainable_variables)
        fit(model, epochs=1)
        assert server.snapshot().version == 7


def test_run_eagerly_trains_as_a_graph_does():
    weights = []
    for eagerly in (False, True):
        with serving(mode="asgd") as (_, found):
            model = compiled(run_eagerly=eagerly)
            fit(distribute(model, found), epochs=1)
            weights.append(trained(model))
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


class Stranger(keras.Sequential):
    """A model with a train_step that does not use the compiled optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = LOSS(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.other is not None:
            self.other.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize(
    ("other", "words"), [(None, "does not step"), (keras.optimizers.Adam(), "Adam 'adam")]
)
def test_no_model_is_trained_alone_silently(other, words):
    with serving(mode="asgd") as (_, found):
        model = Stranger(build().layers, name="toy")
        model.other = other
        model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
        distribute(model, found)
        with pytest.raises(ConfigurationError, match=words):
            fit(model)
        with pytest.raises(ConfigurationError, match="train_on_batch"):
            model.train_on_batch(X[:8], Y[:8])


def test_a_model_that_has_not_joined_lets_others_train_whatever_they_list():
    waiting = distribute(compiled(), mode="asgd", nb_workers=3, id_worker=2)
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="alone")])
    other.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    W_global.clear()
    W_global.extend(other.trainable_variables)
    fit(other)
    with pytest.raises(ConfigurationError, match="on this worker alone"):
        keras.optimizers.SGD(0.1).apply(
            [keras.ops.ones_like(variable) for variable in waiting.trainable_variables],
            waiting.trainable_variables,
        )
    W_global.clear()


def test_a_script_knows_its_place(monkeypatch):
    for name in ("THINWIRE_SETTINGS", "TF_CONFIG", "SLURM_PROCID", "RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("thinwire.script.identity._given", [])
    assert (thinwire.worker_id(), thinwire.num_workers(), thinwire.is_chief()) == (1, 1, True)
    distribute(compiled(), mode="asgd", nb_workers=3, id_worker=2)
    assert (thinwire.worker_id(), thinwire.num_workers(), thinwire.is_chief()) == (2, 3, False)
