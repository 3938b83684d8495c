"""Layers outside W_global are stepped by the script's optimizer; only other layers are sent."""

import keras
import numpy as np
import pytest

from tests.thinwire.script.keras.runs import LOSS, alone, assert_same, plain_model, scripts
from thinwire import W_global
from thinwire.ops.methods.method import METHODS

ROWS = [name for name, row in METHODS.items() if row["pacer"] == "fixed"]
#: Methods whose PS adds the mean change unscaled, so that one worker trains as Keras alone.
PLAIN = ("fedavg", "fedprox")


@pytest.fixture(autouse=True)
def nothing_listed():
    W_global.clear()
    yield
    W_global.clear()


def make():
    model = plain_model()
    W_global.extend(model.get_layer("hidden").trainable_variables)
    model.compile(keras.optimizers.Adam(0.01), loss=LOSS)
    return model


@pytest.mark.parametrize(
    "method",
    ["fedavg", *(pytest.param(n, marks=pytest.mark.product) for n in ROWS if n != "fedavg")],
)
def test_they_are_trained_over_rounds_and_never_travel(method, tmp_path):
    expected, _ = alone(make, epochs=3)
    settings = {"local_steps": 2} | ({"prox_mu": 0} if method == "fedprox" else {})
    with scripts(tmp_path, method, 1, **settings) as run:
        [(model, _)] = run.fit(make, epochs=3)
        assert [each.path for each in run.shards[0].served.spec.tensors] == [
            "toy/hidden/kernel",
            "toy/hidden/bias",
        ]
    start = make().get_layer("logits").get_weights()
    for mine, old in zip(model.get_layer("logits").get_weights(), start, strict=True):
        assert np.abs(mine - old).max() > 0.01
    if method in PLAIN:
        assert_same(model, expected)
