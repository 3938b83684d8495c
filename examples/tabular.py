"""Train on a table: a dict of numeric columns and one categorical column.

In one process, without Thinwire's servers:

python examples/tabular.py

On two workers:

thinwire run --nb_workers=2 --method=bsp examples/tabular.py
"""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=12)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

# Synthetic loans; the target is 1 if the borrower defaults. For a pandas DataFrame `frame`, build
# the columns with {name: frame[name].to_numpy() for name in frame}.
rng = np.random.default_rng(options.seed)
ROWS = 10_000
PURPOSES = np.array(["car", "kitchen", "school", "holiday", "debt"])
columns = {
    "age": rng.uniform(18, 80, ROWS).astype("float32"),
    "income": rng.lognormal(10, 0.6, ROWS).astype("float32"),
    "amount": rng.exponential(8000, ROWS).astype("float32"),
    "purpose": rng.integers(len(PURPOSES), size=ROWS),
}
risk = 2 * columns["amount"] / columns["income"] - (columns["age"] - 45) / 25
risk += np.array([0.0, 0.2, -0.8, 0.5, 1.2])[columns["purpose"]]
target = (risk + rng.logistic(0, 0.7, ROWS) > 0.8).astype("float32")


def rows(which):
    """Return the selected rows of each column as [n, 1], and their targets [n]."""
    return {name: column[which, None] for name, column in columns.items()}, target[which]


x_train, y_train = rows(slice(0, 8000))
x_test, y_test = rows(slice(8000, None))

inputs, features = {}, []
for name in ("age", "income", "amount"):
    inputs[name] = keras.Input((1,), name=name)
    normalization = keras.layers.Normalization()
    normalization.adapt(x_train[name])
    features.append(normalization(inputs[name]))
inputs["purpose"] = keras.Input((1,), name="purpose", dtype="int64")
embedded = keras.layers.Embedding(len(PURPOSES), 4)(inputs["purpose"])
features.append(keras.layers.Flatten()(embedded))
hidden = keras.layers.Concatenate()(features)
hidden = keras.layers.Dense(32, activation="relu")(hidden)
hidden = keras.layers.Dropout(0.2)(hidden)
outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model(inputs, outputs, name="tabular")
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
model = thinwire.distribute(model)
model.fit(x_train, y_train, batch_size=32, epochs=options.epochs, validation_split=0.1, verbose=2)

results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
print(json.dumps({"metric": "auc", "value": results["auc"]}))
