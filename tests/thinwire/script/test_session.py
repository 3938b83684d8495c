"""A session that sends weights after a script's own steps, against a real server."""

import keras
import numpy as np
import pytest

from tests.thinwire.toy import LOSS, X, Y, build, gradients_of, serving, trained
from thinwire.models.flat_model import SharedModel
from thinwire.ops.push_head import PushHead
from thinwire.ops.types import ConfigurationError
from thinwire.script.session import Session
from thinwire.script.settings import read_settings
from thinwire.worker.core.messages import ScriptFigures
from thinwire.worker.core.worker_round import MiniBatch

BATCHES = [np.arange(start, start + 16) for start in range(0, 144, 16)]
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
}
#: Settings by name; with each setting one worker's update is applied unchanged.
METHODS = {
    "dgs": {"mode": "dgs", "compression_rate": 1.0},
    "dgc": {"mode": "dgc", "compression_rate": 1.0, "warmup_epochs": 0},
    "esync": {"mode": "esync", "max_local_steps": 3},
    "local_steps": {"mode": "bsp", "pacer": "fixed", "local_steps": 3},
}


def local_step(model, optimizer, batch):
    """Do one step of the script; return its loss."""
    loss, gradients = gradients_of(model, batch)
    optimizer.apply(gradients, model.trainable_variables)
    return float(loss)


def session_of(model, found, **own):
    chosen = read_settings(None, found | {"bn_sync": False} | own, type_node="Worker")
    return Session(chosen, SharedModel.of(model))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dgs", "adamw"), ("dgc", "nesterov"), ("esync", "adam"), ("local_steps", "adam")],
)
def test_one_worker_is_keras_alone(name, kind):
    alone, optimizer = build(), OPTIMIZERS[kind]()
    for batch in BATCHES:
        local_step(alone, optimizer, batch)
    settings = METHODS[name] | {"local_optimizer": "script", "bn_sync": False}
    with serving(**settings) as (server, found):
        model, optimizer = build(), OPTIMIZERS[kind]()
        session = session_of(model, found)
        assert session.takes_weights
        session.open()
        session.assign()
        for batch in BATCHES:
            loss = local_step(model, optimizer, batch)
            session.part.step(MiniBatch(session.variables.read(), len(batch), loss))
            session.assign()
        session.close()
        held = server.snapshot().weights
    for mine, theirs in zip(trained(model), trained(alone), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    for mine, theirs in zip(trained(model), held, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert LOSS(Y, model(X, training=False)) < LOSS(Y, build()(X, training=False))


def test_a_step_that_is_not_finite_is_skipped_and_the_last_good_weights_come_back():
    with serving(mode="dgs", local_optimizer="script", bn_sync=False) as (server, found):
        model = build()
        session = session_of(model, found)
        session.open()
        before = session.weights.copy()
        info = session.part.step(MiniBatch(np.full_like(before, np.nan), 16, 1.0))
        assert (info.skipped, info.exchanged) == (True, False)
        np.testing.assert_array_equal(session.weights, before)
        figures = ScriptFigures(PushHead(learning_rate=0.5))
        info = session.part.step(MiniBatch(before + 0.25, 16, 1.0, figures=figures))
        assert (info.skipped, info.exchanged) == (False, True)
        assert server.version == 1
        session.close()


@pytest.mark.parametrize("flag", ["clip_norm", "worker_weight_decay"])
def test_what_changes_gradients_is_refused(flag):
    found = {"mode": "dgs", "local_optimizer": "script", "nb_workers": 1, flag: 0.5}
    with pytest.raises(ConfigurationError, match=f"--{flag}"):
        session_of(build(), found)
