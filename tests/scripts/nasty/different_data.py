"""A data set that differs between the workers: sharing it would lose rows and repeat others."""

import argparse

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

x = np.random.default_rng().normal(size=(2000, 10)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("adam", "mse")
model = thinwire.distribute(model)
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
print("trained")
