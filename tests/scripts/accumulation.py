"""Train with Adam on four accumulated small batches per step (gradient_accumulation_steps)."""

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
x = rng.normal(size=(8000, 30)).astype("float32")
truth = np.tanh(x @ rng.normal(size=(30, 8)) / 4) @ rng.normal(size=8)
y = (truth + rng.normal(0, 1.0, 8000)).astype("float32")
x_train, y_train, x_test, y_test = x[:6400], y[:6400], x[6400:], y[6400:]

model = keras.Sequential(
    [
        keras.Input((30,)),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(1),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(2e-3, gradient_accumulation_steps=4),
    loss="mse",
    metrics=[keras.metrics.R2Score()],
)
model = thinwire.distribute(model)
model.fit(x_train, y_train, batch_size=8, epochs=12, verbose=2)

loss, r2 = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "r2", "value": float(r2)}))
