"""Three folds, each with a model and an optimizer of its own; the mean of their scores."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

FOLDS = 3
rng = np.random.default_rng(options.seed)
x = rng.normal(size=(4500, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 4))).argmax(axis=1)

scores = []
for fold in range(FOLDS):
    is_test = np.arange(len(x)) % FOLDS == fold
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.003),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model = thinwire.distribute(model)
    model.fit(x[~is_test], y[~is_test], batch_size=32, epochs=6, verbose=2)
    scores.append(model.evaluate(x[is_test], y[is_test], verbose=0)[1])

print(json.dumps({"metric": "accuracy", "value": float(np.mean(scores))}))
