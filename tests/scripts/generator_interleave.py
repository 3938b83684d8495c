"""Train on records of interleaved Python generators, with Adamax and label smoothing."""

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

FEATURES, CLASSES, SOURCES = 20, 5, 8
centres = np.random.default_rng(options.seed).normal(size=(CLASSES, FEATURES))


def read(source, number):
    """Yield the records of one source: every source has a bias of its own."""
    rng = np.random.default_rng([options.seed, source])
    bias = rng.normal(0, 0.3, FEATURES)
    for _ in range(number):
        label = rng.integers(CLASSES)
        yield (centres[label] + bias + rng.normal(0, 2.0, FEATURES)).astype("float32"), label


def records(source, number=700):
    """Return the data set of one source."""
    signature = (tf.TensorSpec((FEATURES,), tf.float32), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(read, args=(source, number), output_signature=signature)


train = (
    tf.data.Dataset.range(SOURCES)
    .interleave(records, cycle_length=4, num_parallel_calls=4)
    .map(lambda x, y: (x, tf.one_hot(y, CLASSES)))
    .shuffle(2000)
    .batch(32)
)
test = tf.data.Dataset.range(SOURCES, SOURCES + 4).interleave(records)
test = test.map(lambda x, y: (x, tf.one_hot(y, CLASSES))).batch(100)

model = keras.Sequential(
    [
        keras.Input((FEATURES,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(64, activation="gelu"),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adamax(0.005),
    loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    metrics=["categorical_accuracy"],
)
model = thinwire.distribute(model)
model.fit(train, epochs=5, verbose=2)

_, accuracy = model.evaluate(test, verbose=0)
print(json.dumps({"metric": "categorical_accuracy", "value": accuracy}))
