"""Train a residual network in mixed bfloat16 precision with Nesterov momentum SGD."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)
keras.config.set_dtype_policy("mixed_bfloat16")

rng = np.random.default_rng(options.seed)
y = rng.integers(5, size=6000)
time = np.linspace(0, 1, 64)
x = np.sin(2 * np.pi * (3 + 2 * y[:, None]) * time + rng.uniform(0, 6.28, (6000, 1)))
x = (x + rng.normal(0, 1.4, x.shape)).astype("float32")[..., None]


def residual(x, filters):
    """Return a block of two convolutions and a shortcut."""
    shortcut = keras.layers.Conv1D(filters, 1, strides=2)(x)
    x = keras.layers.Conv1D(filters, 5, strides=2, padding="same", activation="relu")(x)
    x = keras.layers.Conv1D(filters, 5, padding="same")(x)
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))


inputs = keras.Input((64, 1))
hidden = residual(residual(inputs, 16), 32)
hidden = keras.layers.GlobalMaxPooling1D()(hidden)
outputs = keras.layers.Dense(5, dtype="float32")(hidden)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

model = thinwire.distribute(model)
model.fit(x[:4500], y[:4500], batch_size=32, epochs=16, verbose=2)

loss, accuracy = model.evaluate(x[4500:], y[4500:], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
