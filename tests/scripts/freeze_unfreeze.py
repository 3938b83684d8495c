"""Fine-tune a head on a frozen base, then the whole model after a second compile; use Adam."""

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
patterns = rng.normal(size=(14, 10, 10))


def pictures(kinds, number):
    """Return noisy pictures of some of the patterns, [n, 10, 10, 1], and which each is."""
    labels = rng.integers(len(kinds), size=number)
    images = patterns[np.array(kinds)[labels]] + rng.normal(0, 2.4, (number, 10, 10))
    return images.astype("float32")[..., None], labels


base = keras.Sequential(
    [
        keras.Input((10, 10, 1)),
        keras.layers.Conv2D(12, 5, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(24, activation="relu"),
    ],
    name="base",
)
known = keras.Sequential([base, keras.layers.Dense(8, activation="softmax")])
known.compile("adam", "sparse_categorical_crossentropy")
known.fit(*pictures(range(8), 2500), epochs=2, verbose=0)

x_train, y_train = pictures(range(8, 14), 3000)
x_test, y_test = pictures(range(8, 14), 2000)

base.trainable = False
inputs = keras.Input((10, 10, 1))
hidden = base(inputs, training=False)
hidden = keras.layers.Dropout(0.2)(hidden)
outputs = keras.layers.Dense(6)(hidden)
model = keras.Model(inputs, outputs)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(), loss=loss, metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(x_train, y_train, epochs=4, validation_data=(x_test, y_test), verbose=2)
_, frozen = model.evaluate(x_test, y_test, verbose=0)

base.trainable = True
model.compile(optimizer=keras.optimizers.Adam(3e-4), loss=loss, metrics=["accuracy"])
assert int(model.optimizer.iterations) == 0
model.fit(x_train, y_train, epochs=6, validation_data=(x_test, y_test), verbose=2)

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
assert accuracy > frozen, "the base has not learned anything"
print(json.dumps({"metric": "accuracy", "value": accuracy}))
