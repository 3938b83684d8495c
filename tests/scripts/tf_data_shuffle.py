"""Classify images from a tf.data pipeline with an unseeded shuffle, as in most tutorials.

Nothing in this script sets a seed but for the data.
"""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()

rng = np.random.default_rng(options.seed)
prototypes = rng.normal(size=(10, 12, 12))
labels = rng.integers(10, size=9000)
images = (prototypes[labels] + rng.normal(0, 3.0, (9000, 12, 12))).astype("float32")

train = tf.data.Dataset.from_tensor_slices((images[:6000], labels[:6000]))
train = train.shuffle(6000).batch(32).prefetch(tf.data.AUTOTUNE)
test = tf.data.Dataset.from_tensor_slices((images[6000:], labels[6000:])).batch(500)

model = keras.Sequential(
    [
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.RMSprop(),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model = thinwire.distribute(model)
history = model.fit(train, epochs=20, validation_data=test, verbose=2)
assert set(history.history) == {"accuracy", "loss", "val_accuracy", "val_loss"}

results = model.evaluate(test, verbose=0, return_dict=True)
print(json.dumps({"metric": "accuracy", "value": results["accuracy"]}))
