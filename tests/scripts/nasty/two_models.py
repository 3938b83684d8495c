"""Two models, one of which is trained while the other one is."""

import argparse

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

x = np.random.default_rng(options.seed).normal(size=(2000, 10)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8), keras.layers.Dense(1)])
other = keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)])
for each in (model, other):
    each.compile("adam", "mse")
    each = thinwire.distribute(each)


class Critic(keras.callbacks.Callback):
    """Trains the other model on what this one makes."""

    def on_epoch_end(self, epoch, logs=None):
        """Train it."""
        other.fit(x, model.predict(x, verbose=0), batch_size=16, verbose=0)


model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[Critic()])
print("trained")
