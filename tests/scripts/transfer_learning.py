"""Transfer learning: a frozen base with BatchNorm under a new head; Adam."""

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
patterns = rng.normal(size=(12, 10, 10))


def pictures(kinds, number):
    """Return noisy pictures of some of the patterns, [n, 10, 10, 1], and which each is."""
    labels = rng.integers(len(kinds), size=number)
    images = patterns[np.array(kinds)[labels]] + rng.normal(0, 2.4, (number, 10, 10))
    return images.astype("float32")[..., None], labels


# A base that knows eight of the patterns. Others load it with keras.applications.
base = keras.Sequential(
    [
        keras.Input((10, 10, 1)),
        keras.layers.Conv2D(16, 5, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
    ],
    name="base",
)
known = keras.Sequential([base, keras.layers.Dense(8, activation="softmax")])
known.compile("adam", "sparse_categorical_crossentropy")
known.fit(*pictures(range(8), 3000), epochs=3, verbose=0)

x_train, y_train = pictures(range(8, 12), 3000)
x_test, y_test = pictures(range(8, 12), 2000)

base.trainable = False
inputs = keras.Input((10, 10, 1))
x = base(inputs, training=False)
x = keras.layers.Dropout(0.2)(x)
outputs = keras.layers.Dense(4)(x)
model = keras.Model(inputs, outputs)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(), loss=loss, metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(x_train, y_train, epochs=10, validation_data=(x_test, y_test), verbose=2)

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
