"""A second fit in which layers train that were frozen before: not in one run."""

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
base = keras.layers.Dense(8, activation="relu")
model = keras.Sequential([keras.Input((10,)), base, keras.layers.Dense(1)])
base.trainable = False
model.compile("adam", "mse")
model = thinwire.distribute(model)
model.fit(x, y, batch_size=16, epochs=1, verbose=0)
base.trainable = True
model.compile(keras.optimizers.Adam(1e-4), "mse")
model.fit(x, y, batch_size=16, epochs=1, verbose=0)
print("trained")
