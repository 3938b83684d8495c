"""A denoising autoencoder with BatchNorm and Dropout, whose target is its input; Adam."""

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


def blobs(number):
    """Return pictures of two bright spots, [n, 16, 16, 1]."""
    y, x = np.mgrid[:16, :16]
    pictures = np.zeros((number, 16, 16))
    for _ in range(2):
        centre = rng.uniform(3, 12, (2, number, 1, 1))
        pictures += np.exp(-((y - centre[0]) ** 2 + (x - centre[1]) ** 2) / 8)
    return np.clip(pictures, 0, 1).astype("float32")[..., None]


clean_train, clean_test = blobs(3000), blobs(1000)
noisy_train = clean_train + rng.normal(0, 0.4, clean_train.shape).astype("float32")
noisy_test = clean_test + rng.normal(0, 0.4, clean_test.shape).astype("float32")

inputs = keras.Input((16, 16, 1))
x = inputs
for filters in (16, 24):
    x = keras.layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.LeakyReLU(negative_slope=0.1)(x)
x = keras.layers.SpatialDropout2D(0.05)(x)
for filters in (24, 16):
    x = keras.layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu")(x)
outputs = keras.layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
model = keras.Model(inputs, outputs, name="autoencoder")
model.compile(optimizer="adam", loss="mse", metrics=["mae"])
model = thinwire.distribute(model)
model.fit(
    noisy_train,
    clean_train,
    batch_size=32,
    epochs=20,
    validation_data=(noisy_test, clean_test),
    verbose=2,
)

loss, _ = model.evaluate(noisy_test, clean_test, verbose=0)
print(json.dumps({"metric": "r2", "value": 1 - loss / float(clean_test.var())}))
