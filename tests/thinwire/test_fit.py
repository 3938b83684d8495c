"""`model.fit` of a distributed model: Keras' features, the end of the run, refusals."""

import os
import signal
import threading

import keras
import numpy as np
import pytest

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
        with distribute(model, found) as worker:
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
        worker = distribute(model, found)
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
        worker = distribute(model, found, reconnect_timeout_seconds=3)
        fit(model, epochs=1)
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
        join.start()  # nobody gets the model before both are there
        worker = distribute(model, found)

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
    with serving(**settings) as (_, found), distribute(model := compiled(), found):
        assert fit(model, callbacks=[same])["learning_rate"] == pytest.approx([0.1, 0.01])
    with serving(**settings) as (_, found), distribute(model := compiled(), found):
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
        with distribute(model, found):
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
        distribute(model, found),
        pytest.raises(ConfigurationError, match=words),
    ):
        fit(model, callbacks=[change])


def test_variables_outside_w_global_are_trained_here():
    with serving(shared=("hidden", "norm"), mode="asgd") as (server, found):
        model = compiled()
        W_global.extend(v for layer in model.layers[:2] for v in layer.trainable_variables)
        before = trained(model)
        with distribute(model, found):
            fit(model)
        assert len(server.snapshot().weights) == 4
        moved = [abs(new - old).max() for new, old in zip(trained(model), before, strict=True)]
        assert min(moved) > 1e-3


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (keras.optimizers.Adam(), "SGD"),
        (keras.optimizers.SGD(0.1, momentum=0.9), "none on the worker"),
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
    with pytest.raises(ConfigurationError, match="not compiled"):
        distribute(build(), mode="asgd")
    model = compiled()
    model.layers[0].kernel.constraint = keras.constraints.MaxNorm(1.0)
    with pytest.raises(ConfigurationError, match="constraint"):
        distribute(model, mode="asgd")


def test_compile_after_distribute_is_refused(caplog):
    model = compiled(jit_compile=True)
    with serving(mode="asgd") as (_, found), distribute(model, found):
        assert "jit_compile is switched off" in caplog.text
        with pytest.raises(ConfigurationError, match="twice"):
            distribute(model, found)
        assert not model.jit_compile
        model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
        with pytest.raises(ConfigurationError, match="compiled again"):
            fit(model)
