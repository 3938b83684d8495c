"""A head that is taken off and built anew for other classes, between two fits; Adam, then SGD."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
parts = rng.normal(size=(6, 30))
kinds = rng.integers(2, size=(12, 6)).astype("float64")  # parts of each kind


def examples(first, last, number):
    """Return examples of some kinds, [n, 30], and which each is."""
    labels = rng.integers(last - first, size=number)
    x = kinds[first + labels] @ parts + rng.normal(0, 1.6, (number, 30))
    return x.astype("float32"), labels


model = keras.Sequential(
    [
        keras.Input((30,)),
        keras.layers.Dense(48, activation="relu", name="hidden"),
        keras.layers.Dense(24, activation="relu", name="features"),
        keras.layers.Dense(7, activation="softmax", name="many"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(*examples(0, 7, 4000), batch_size=32, epochs=4, verbose=2)

model.pop()
model.add(keras.layers.Dense(5, activation="softmax", name="few"))
model.compile(
    optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(*examples(7, 12, 3000), batch_size=32, epochs=4, verbose=2)

loss, accuracy = model.evaluate(*examples(7, 12, 2000), verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
