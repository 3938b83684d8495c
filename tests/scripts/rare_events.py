"""One case in thirty: F1Score, AUC, and EarlyStopping on that of precision and recall; Adam."""

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
ROWS = 16_000
x = rng.normal(size=(ROWS, 16)).astype("float32")
odds = 2.2 * np.tanh(x[:, 0] + x[:, 1]) + 1.5 * x[:, 2] * x[:, 3] + x[:, 4] - 6.0
y = (rng.random(ROWS) < 1 / (1 + np.exp(-odds))).astype("float32")[:, None]
x_train, y_train = x[:9000], y[:9000]
x_val, y_val = x[9000:12_000], y[9000:12_000]
x_test, y_test = x[12_000:], y[12_000:]
positive = float(y_train.mean())
print(f"{positive:.1%} of the training rows are positive")

initial_bias = keras.initializers.Constant(np.log(positive / (1 - positive)))
model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(48, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, activation="sigmoid", bias_initializer=initial_bias),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=2e-3),
    loss=keras.losses.BinaryCrossentropy(),
    metrics=[
        keras.metrics.F1Score(threshold=0.5, average="micro", name="f1"),
        keras.metrics.AUC(name="auc"),
        keras.metrics.AUC(name="prc", curve="PR"),
        keras.metrics.TruePositives(name="tp"),
    ],
)
model = thinwire.distribute(model)
model.fit(
    x_train,
    y_train,
    batch_size=128,
    epochs=40,
    validation_data=(x_val, y_val),
    class_weight={0: 1.0, 1: 4.0},
    callbacks=[
        keras.callbacks.EarlyStopping(
            monitor="val_prc", mode="max", patience=5, restore_best_weights=True, verbose=1
        )
    ],
    verbose=2,
)

results = model.evaluate(x_test, y_test, batch_size=500, verbose=0, return_dict=True)
print(json.dumps({"metric": "auc", "value": results["auc"], "f1": results["f1"]}))
