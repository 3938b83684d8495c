"""Gradients of `GradientSGD` stay on the device with --kernels of Keras' own backend."""

import keras
import numpy as np
import pytest

from tests.frameworks import kernels_of, record_copies
from thinwire import GradientSGD, W_global, init_server

BACKEND = keras.backend.backend()
STEPS, RATE = 5, 0.05


def build():
    keras.utils.set_random_seed(3)
    W_global.clear()
    dense = [keras.layers.Dense(units, name=f"dense_{units}") for units in (50, 4)]
    model = keras.Sequential([keras.Input((40,)), *dense], name="two")
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    return model


def trained(kernels, monkeypatch, mode, **chosen):
    """Return the weights after some steps with made-up gradients, copies to the host, and entries.

    The last variable has no gradient.
    """
    settings = {"nb_workers": 1, "kernels": kernels, "learning_rate": 0.1, "mode": mode} | chosen
    rng = np.random.default_rng(1)
    # init_server looks for GPUs by TensorFlow, which this environment lacks
    monkeypatch.setattr("thinwire.models.flat_model.has_gpu", lambda run: False)
    with init_server(settings, build(), port=0) as server:
        port = int(server.address.rpartition(":")[2])
        model = build()
        found = settings | {"port": port, "reconnect_timeout_seconds": 30}
        variables, sent = model.trainable_variables, 0
        with GradientSGD(model, lr=0.1, args=found) as optimizer, monkeypatch.context() as m:
            copies = record_copies(m, kernels_of(BACKEND))
            for _ in range(STEPS):
                drawn = [rng.standard_normal(v.shape).astype(np.float32) for v in variables]
                gradients = [keras.ops.convert_to_tensor(each) for each in drawn]
                pairs = zip([*gradients[:-1], None], variables, strict=True)
                sent += optimizer.step(pairs, samples=4).nnz_up
        return [np.array(keras.ops.convert_to_numpy(v)) for v in variables], copies, sent


@pytest.mark.parametrize("mode", ["dgs", "dgc"])
@pytest.mark.parametrize("decays", [False, True])
def test_the_weights_are_numpy_s_and_only_sent_entries_are_copied(monkeypatch, mode, decays):
    chosen = {"compression_rate": RATE}
    chosen |= {"warmup_epochs": 0} if mode == "dgc" else {}
    chosen |= {"worker_weight_decay": 0.01, "clip_norm": 100.0} if decays else {}
    expected, none, entries = trained("numpy", monkeypatch, mode, **chosen)
    found, copies, sent = trained(BACKEND, monkeypatch, mode, **chosen)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not none and sent == entries > 0
    assert 8 * sent <= sum(copies) <= 16 * sent + 200 * STEPS
    assert max(copies) < 40 * 50
