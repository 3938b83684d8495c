"""An error in the second worker, in the middle of training."""

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
model.compile("adam", "mse")
model = thinwire.distribute(model)


class Trap(keras.callbacks.Callback):
    """Raises in worker 2 after 20 batches."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and thinwire.worker_id() == 2:
            raise RuntimeError("the second worker's disk is full")


model.fit(x, y, batch_size=16, epochs=200, callbacks=[Trap()], verbose=0)
print("trained")
