"""Classify textures with augmentation in tf.data's `map`, a small convnet and Adam."""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)
rng = np.random.default_rng(options.seed)


def textures(number):
    """Return gratings of four directions in noise, [n, 24, 24, 1], and their labels."""
    labels = rng.integers(4, size=number)
    angles = labels * np.pi / 4 + rng.normal(0, 0.12, number)
    phases = rng.uniform(0, 2 * np.pi, number)
    y, x = np.mgrid[:24, :24] * 0.9
    waves = np.cos(angles)[:, None, None] * x + np.sin(angles)[:, None, None] * y
    images = np.sin(waves + phases[:, None, None]) + rng.normal(0, 2.2, (number, 24, 24))
    return np.clip(images * 40 + 128, 0, 255).astype("uint8")[..., None], labels


x_train, y_train = textures(4000)
x_test, y_test = textures(2000)

shift = keras.layers.RandomTranslation(0.1, 0.1)
BATCH_SIZE = 32
train = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    .shuffle(1000)
    .batch(BATCH_SIZE)
    .map(lambda x, y: (shift(tf.cast(x, tf.float32), training=True), y), tf.data.AUTOTUNE)
    .prefetch(tf.data.AUTOTUNE)
)
test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(250)

model = keras.Sequential(
    [
        keras.Input((24, 24, 1)),
        keras.layers.Rescaling(1 / 127.5, offset=-1),
        keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(4, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(train, epochs=options.epochs, validation_data=test, verbose=2)

_, accuracy = model.evaluate(test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
