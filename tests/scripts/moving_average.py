"""A moving average of the weights, used for validation and in the end; SGD with momentum."""

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
templates = rng.normal(size=(10, 100))
y = rng.integers(10, size=7000)
x = (templates[y] + rng.normal(0, 3.0, (7000, 100))).astype("float32")

model = keras.Sequential(
    [
        keras.Input((100,)),
        keras.layers.Dense(64, activation="relu", kernel_constraint=keras.constraints.MaxNorm(3)),
        keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(0.02, momentum=0.9, use_ema=True, ema_momentum=0.98),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model = thinwire.distribute(model)
model.fit(
    x[:5000],
    y[:5000],
    batch_size=32,
    epochs=12,
    validation_data=(x[5000:], y[5000:]),
    callbacks=[keras.callbacks.SwapEMAWeights()],
    verbose=2,
)
# At its end `fit` puts the average in the place of the weights.
loss, accuracy = model.evaluate(x[5000:], y[5000:], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
