"""Train in mixed float16 precision, for which Keras wraps Adam in a LossScaleOptimizer."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)
keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(options.seed)
templates = rng.normal(size=(6, 256))
y = rng.integers(6, size=7000)
x = (templates[y] * rng.uniform(0.5, 1.5, (7000, 1)) + rng.normal(0, 5.0, (7000, 256))).astype(
    "float32"
)
x_train, y_train, x_test, y_test = x[:5000], y[:5000], x[5000:], y[5000:]

inputs = keras.Input((256,))
hidden = keras.layers.Dense(96, activation="relu")(inputs)
hidden = keras.layers.Dropout(0.4)(hidden)
hidden = keras.layers.Dense(48, activation="relu")(hidden)
outputs = keras.layers.Dense(6, activation="softmax", dtype="float32")(hidden)
model = keras.Model(inputs, outputs)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

model = thinwire.distribute(model)
model.fit(x_train, y_train, batch_size=32, epochs=12, validation_split=0.1, verbose=2)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
