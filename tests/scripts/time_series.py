"""Forecast a noisy sum of waves: windows in tf.data, cache and repeat with steps_per_epoch, GRU."""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

BATCH_SIZE = 64
WINDOW = 24
rng = np.random.default_rng(options.seed)
hours = np.arange(9000)
series = np.sin(hours / 4) + 0.7 * np.sin(hours / 11 + 1) + rng.normal(0, 0.35, 9000)
series = series.astype("float32")


def windows(values):
    """Return a data set of windows [batch, 24, 1] and the value after each."""
    return keras.utils.timeseries_dataset_from_array(
        values[:-WINDOW, None], values[WINDOW:], sequence_length=WINDOW, batch_size=BATCH_SIZE
    )


split = 7000
train = windows(series[:split]).cache().shuffle(200).repeat().prefetch(tf.data.AUTOTUNE)
validation = windows(series[split:])
steps_per_epoch = (split - 2 * WINDOW) // BATCH_SIZE

inputs = keras.Input((WINDOW, 1))
x = keras.layers.GRU(24)(inputs)
outputs = keras.layers.Dense(1)(x)
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(0.005), loss="mse", metrics=[keras.metrics.R2Score()])

model = thinwire.distribute(model)
model.fit(
    train,
    epochs=6,
    steps_per_epoch=steps_per_epoch,
    validation_data=validation,
    validation_steps=10,
    verbose=2,
)

_, r2 = model.evaluate(validation, verbose=0)
print(json.dumps({"metric": "r2", "value": float(r2)}))
