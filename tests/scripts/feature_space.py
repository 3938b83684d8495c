"""Rows of a table with words in it: FeatureSpace adapted to a tf.data data set of dicts; Adam."""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf
from keras.utils import FeatureSpace

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
ROWS = 8000
table = {
    "age": rng.integers(20, 80, ROWS),
    "pressure": rng.normal(130, 18, ROWS).astype("float32"),
    "pain": rng.choice(["none", "typical", "atypical"], ROWS),
    "vessels": rng.integers(0, 4, ROWS),
}
risk = (
    (table["age"] - 50) / 12
    + (table["pressure"] - 130) / 25
    + np.where(table["pain"] == "typical", 1.5, -0.5)
    + np.array([-1.0, 0.2, 0.8, 1.5])[table["vessels"]]
)
target = (risk + rng.logistic(0, 0.6, ROWS) > 0).astype("float32")


def dataset(rows):
    """Return some rows as a data set of dicts."""
    columns = {name: values[rows] for name, values in table.items()}
    return tf.data.Dataset.from_tensor_slices((columns, target[rows]))


train, test = dataset(slice(0, 6000)), dataset(slice(6000, None))
train = train.shuffle(6000).batch(32)
feature_space = FeatureSpace(
    features={
        "age": FeatureSpace.float_discretized(num_bins=20),
        "pressure": FeatureSpace.float_normalized(),
        "pain": FeatureSpace.string_categorical(num_oov_indices=0),
        "vessels": FeatureSpace.integer_categorical(num_oov_indices=0),
    },
    crosses=[("pain", "vessels")],
    crossing_dim=16,
    output_mode="concat",
)
feature_space.adapt(train.map(lambda x, _: x))
train = train.map(lambda x, y: (feature_space(x), y), num_parallel_calls=tf.data.AUTOTUNE)
test = test.batch(500).map(lambda x, y: (feature_space(x), y))
train = train.prefetch(tf.data.AUTOTUNE)

features = feature_space.get_encoded_features()
hidden = keras.layers.Dense(32, activation="relu")(features)
hidden = keras.layers.Dropout(0.5)(hidden)
predictions = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model(inputs=features, outputs=predictions)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(train, epochs=20, validation_data=test, verbose=2)

_, accuracy = model.evaluate(test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
