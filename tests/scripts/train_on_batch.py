"""train_on_batch in a loop of its own, test_on_batch now and then; RMSprop."""

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
templates = rng.normal(size=(6, 50))
y = rng.integers(6, size=5000)
x = (templates[y] + rng.normal(0, 2.2, (5000, 50))).astype("float32")
x_train, y_train, x_test, y_test = x[:3500], y[:3500], x[3500:], y[3500:]

model = keras.Sequential(
    [
        keras.Input((50,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(6, activation="softmax"),
    ]
)
model.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
for step in range(600):
    rows = rng.integers(len(x_train), size=32)
    results = model.train_on_batch(x_train[rows], y_train[rows], return_dict=True)
    if step % 100 == 99:
        tested = model.test_on_batch(x_test[:200], y_test[:200], return_dict=True)
        print(f"step {step + 1}: {results}, {tested}")
        model.reset_metrics()

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
