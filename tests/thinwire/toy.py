"""A small model with batch normalization, its data, and servers in this process."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from thinwire import W_global, init_server

RNG = np.random.default_rng(3)
X = RNG.normal(size=(160, 6)).astype(np.float32)
Y = (X @ RNG.normal(size=(6, 4))).argmax(1).astype(np.int32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build():
    """Return a fresh model, always with the same weights."""
    keras.utils.set_random_seed(5)
    W_global.clear()
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(4, name="logits"),
        ],
        name="toy",
    )


@contextlib.contextmanager
def serving(shared=(), **settings):
    """Serve a fresh model, or some layers of it; yields (server, settings of its workers)."""
    settings = {
        "nb_workers": 1,
        "kernels": "numpy",
        "learning_rate": 0.1,
        "iter_max": 1000,
    } | settings
    model = build()
    W_global.extend(v for name in shared for v in model.get_layer(name).trainable_variables)
    with init_server(settings, model, port=0) as server:
        port = int(server.address.rpartition(":")[2])
        yield server, settings | {"port": port, "reconnect_timeout_seconds": 30}


def gradients_of(model, batch):
    """Return (loss, gradients) of a mini-batch; does not touch moving statistics."""
    with tf.GradientTape() as tape:
        loss = LOSS(Y[batch], model(X[batch], training=False))
    return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])


def trained(model):
    """Return copies of the trainable values."""
    return [v.numpy() for v in model.trainable_variables]
