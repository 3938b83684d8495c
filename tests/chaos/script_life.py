"""Scripts whose models pass through every standing of a member of a run: ``LIFE`` chooses one."""

import json
import os
import sys

import keras
import numpy as np

import thinwire
from tests.chaos import script_hook

script_hook.install()
keras.utils.set_random_seed(1)
X = np.random.default_rng(0).normal(size=(512, 6)).astype("float32")
Y = (X[:, 0] > X[:, 1]).astype("int64")
LOSS = "sparse_categorical_crossentropy"
FIT = {"batch_size": 32, "verbose": 0, "validation_data": (X[:64], Y[:64])}


class Halves(keras.callbacks.Callback):
    """Sets weights after the last step, as callbacks that restore the best weights do."""

    def on_train_end(self, logs=None):
        self.model.set_weights([0.5 * values for values in self.model.get_weights()])


def made(name):
    """Return a compiled model of a name."""
    layers = [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2, "softmax")]
    model = thinwire.distribute(keras.Sequential(layers, name=name))
    model.compile(keras.optimizers.Adam(0.02), LOSS, metrics=["accuracy"])
    return model


def models():
    """Train two models in turn, with other optimizers and with weights that a callback sets."""
    first, second = made("first"), made("second")
    first.fit(X, Y, epochs=2, callbacks=[Halves()], **FIT)
    first.compile(keras.optimizers.SGD(0.2), LOSS, metrics=["accuracy"])
    first.fit(X, Y, epochs=1, **FIT)
    second.fit(X, Y, epochs=2, **FIT)
    second.fit(X, Y, epochs=2, **FIT)
    return second


def loop():
    """Train a model by two fits, and then by a loop of the script's own."""
    model = made("first")
    model.fit(X, Y, epochs=2, **FIT)
    model.fit(X, Y, epochs=1, **FIT)
    mine = slice(max(0, thinwire.worker_id() - 1), None, thinwire.num_workers())
    for _ in range(3):
        for begin in range(0, len(X), 32):
            rows = slice(begin, begin + 32)
            model.train_on_batch(X[rows][mine], Y[rows][mine])
    return model


trained = {"models": models, "loop": loop}[os.environ["LIFE"]]()
accuracy = trained.evaluate(X, Y, verbose=0)[1]
sys.stdout.write(json.dumps({"metric": "accuracy", "value": round(float(accuracy), 4)}) + "\n")
sys.stdout.flush()
