"""FedProx in a script: its optimizer steps as if the loss had mu / 2 |w - b|^2."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.keras.runs import BATCH, LOSS, X, Y, assert_same, plain_model, scripts
from thinwire.flags import script
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.types import ConfigurationError

MU, STEPS, EPOCHS = 0.5, 3, 3
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.2),
    "adamw that clips": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, clipnorm=0.3),
}
LONG = pytest.mark.product


def compiled(optimizer):
    model = plain_model()
    model.compile(OPTIMIZERS[optimizer](), loss=LOSS)
    return model


def alone(optimizer):
    """Return a model that a plain loop has trained in rounds."""
    model = compiled(optimizer)
    batches = np.array_split(np.arange(len(X)), len(X) // BATCH) * EPOCHS
    for number, batch in enumerate(batches):
        if number % STEPS == 0:
            base = model.get_weights()
        with tf.GradientTape() as tape:
            loss = LOSS(Y[batch], model(X[batch], training=True))
            for variable, begun in zip(model.trainable_variables, base, strict=True):
                loss += MU / 2 * tf.reduce_sum((variable.value - begun) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [each.value for each in variables])
        model.optimizer.apply(gradients, variables)
    return model


@pytest.mark.parametrize("optimizer", ["adamw that clips", pytest.param("sgd", marks=LONG)])
def test_a_worker_is_a_plain_loop(optimizer, tmp_path):
    expected = alone(optimizer)
    with scripts(tmp_path, "fedprox", 1, prox_mu=MU, local_steps=STEPS) as run:
        [(model, _)] = run.fit(lambda: compiled(optimizer), epochs=EPOCHS)
    assert_same(model, expected)
    assert np.abs(model.get_weights()[0] - compiled(optimizer).get_weights()[0]).max() > 0.1


def test_it_pulls_by_what_is_given_and_the_method_has_its_own():
    assert compose(Choices.of("fedprox", 2, local_optimizer="script")).local.prox_mu == 0.01
    script.refuse(["prox_mu"])
    with pytest.raises(ConfigurationError, match="--prox_mu=0.5 .* every step is a round"):
        compose(Choices.of("dgs", 2, local_optimizer="script", prox_mu=0.5))
    with pytest.raises(ConfigurationError, match="--prox_mu=-1"):
        compose(Choices.of("fedavg", 2, local_optimizer="script", prox_mu=-1.0))
