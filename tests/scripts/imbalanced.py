"""Learn rare cases with class weights, then with sample weights in a second fit."""

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
ROWS, FEATURES = 9000, 20
x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
odds = x @ rng.normal(size=FEATURES) / 2 + x[:, 0] * x[:, 1] - 3.2
y = (rng.random(ROWS) < 1 / (1 + np.exp(-odds))).astype("float32")[:, None]
amounts = rng.lognormal(0, 0.5, ROWS).astype("float32")
x_train, y_train, x_test, y_test = x[:6000], y[:6000], x[6000:], y[6000:]
print(f"{y_train.mean():.1%} of the training rows are positive")

model = keras.Sequential(
    [
        keras.Input((FEATURES,)),
        keras.layers.Dense(48, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(48, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss="binary_crossentropy",
    metrics=[keras.metrics.AUC(name="auc"), keras.metrics.Precision(), keras.metrics.Recall()],
    weighted_metrics=["accuracy"],
)
model = thinwire.distribute(model)
positive = float(y_train.mean())
class_weight = {0: 0.5 / (1 - positive), 1: 0.5 / positive}
model.fit(x_train, y_train, batch_size=64, epochs=15, class_weight=class_weight, verbose=2)
weights = amounts[:6000] * np.where(y_train[:, 0] > 0, class_weight[1], class_weight[0])
model.fit(x_train, y_train, batch_size=64, epochs=5, sample_weight=weights, verbose=2)

results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
print(json.dumps({"metric": "auc", "value": results["auc"]}))
