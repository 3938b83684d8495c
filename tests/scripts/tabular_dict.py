"""Train on tabular data as a dict of columns, with Normalization and IntegerLookup."""

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
ROWS = 8000
columns = {
    "age": rng.uniform(18, 80, ROWS).astype("float32"),
    "income": rng.lognormal(10, 0.6, ROWS).astype("float32"),
    "debt": rng.exponential(8000, ROWS).astype("float32"),
    "region": rng.choice([10, 20, 30, 40], ROWS),
}
risk = (
    columns["debt"] / columns["income"] * 2
    - (columns["age"] - 45) / 25
    + np.where(columns["region"] == 30, 1.0, -0.5)
)
target = (risk + rng.logistic(0, 0.7, ROWS) > 0.5).astype("float32")


def rows(which):
    """Return some rows of each column as [n, 1], and their targets."""
    return {name: column[which, None] for name, column in columns.items()}, target[which]


x_train, y_train = rows(slice(0, 6000))
x_test, y_test = rows(slice(6000, None))

inputs, features = {}, []
for name in ("age", "income", "debt"):
    inputs[name] = keras.Input((1,), name=name)
    normalization = keras.layers.Normalization()
    normalization.adapt(x_train[name])
    features.append(normalization(inputs[name]))
lookup = keras.layers.IntegerLookup(output_mode="one_hot")
lookup.adapt(x_train["region"])
inputs["region"] = keras.Input((1,), name="region", dtype="int64")
features.append(lookup(inputs["region"]))
hidden = keras.layers.Concatenate()(features)
hidden = keras.layers.Dense(32, activation="relu")(hidden)
hidden = keras.layers.Dropout(0.2)(hidden)
outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model(inputs, outputs)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])

model = thinwire.distribute(model)
model.fit(x_train, y_train, batch_size=32, epochs=20, validation_split=0.1, verbose=2)

results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
print(json.dumps({"metric": "accuracy", "value": results["accuracy"]}))
