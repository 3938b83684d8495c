"""Rounds of whole epochs in a script: between rounds each worker's `fit` is Keras's."""

import keras
import numpy as np
import pytest

from tests.thinwire.script.keras.runs import BATCH, LOSS, X, Y, assert_same, plain_model, scripts
from thinwire import distribute
from thinwire.flags import script
from thinwire.ops.types import ConfigurationError

EPOCHS = 3
#: Unequal, with a last mini-batch that is not full.
PARTS = np.split(np.arange(len(X)), [58])
FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def compiled():
    model = plain_model()
    model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), loss=LOSS)
    return model


def federated(rounds):
    """Return FedAvg's result on the parts by Keras alone, in rounds of this many epochs."""
    models, base = [compiled() for _ in PARTS], compiled().get_weights()
    for epochs in rounds:
        for model, part in zip(models, PARTS, strict=True):
            model.set_weights(base)
            model.fit(X[part], Y[part], epochs=epochs, **FIT)
        shares = [len(part) / len(X) for part in PARTS]
        ended = zip(*(model.get_weights() for model in models), strict=True)
        base = [sum(n * w for n, w in zip(shares, each, strict=True)) for each in ended]
    models[0].set_weights(base)
    return models[0]


@pytest.mark.parametrize(
    ("local_epochs", "rounds"),
    [(2, [2, 1]), (1, [1] * 3)],
)
def test_two_workers_of_unequal_parts_are_fedavg(local_epochs, rounds, tmp_path):
    """The last round is as long as there are epochs."""

    def work(settings):
        model = distribute(compiled(), settings)
        part = PARTS[settings["id_worker"] - 1]
        model.fit(X[part], Y[part], epochs=EPOCHS, **FIT)
        return model

    chosen = {"local_epochs": local_epochs, "shard": "off", "batch": "worker"}
    with scripts(tmp_path, "fedavg", 2, **chosen) as run:
        model, _ = run.each(work)
    assert model.thinwire.num_exchanges == len(rounds)
    assert_same(model, federated(rounds))


def test_a_loop_has_no_epochs(tmp_path):
    def work(settings):
        distribute(compiled(), settings).train_on_batch(X, Y)

    with (
        scripts(tmp_path, "fedavg", 1, local_epochs=1) as run,
        pytest.raises(ConfigurationError, match="--local_epochs=1 .* a loop of the script's own"),
    ):
        run.each(work)


def test_the_flag_is_a_script_s():
    script.refuse(["local_epochs"])
