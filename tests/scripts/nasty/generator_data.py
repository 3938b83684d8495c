"""A Python generator: nobody can share it among workers."""

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


def batches():
    """Yield random batches for ever."""
    rng = np.random.default_rng()
    while True:
        rows = rng.integers(len(x), size=16)
        yield x[rows], y[rows]


model.compile("adam", "mse")
model = thinwire.distribute(model)
model.fit(batches(), steps_per_epoch=50, epochs=2, verbose=0)
print("trained")
