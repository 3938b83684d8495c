"""Stop an over-fitting fit by EarlyStopping on val_loss, and restore the best weights."""

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
templates = rng.normal(size=(5, 40))
y = rng.integers(5, size=4000)
x = (templates[y] + rng.normal(0, 2.6, (4000, 40))).astype("float32")
x_train, y_train = x[:1200], y[:1200]
x_val, y_val = x[1200:2000], y[1200:2000]
x_test, y_test = x[2000:], y[2000:]

model = keras.Sequential(
    [
        keras.Input((40,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(5, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
stopping = keras.callbacks.EarlyStopping(
    monitor="val_loss", patience=3, restore_best_weights=True, verbose=1
)
history = model.fit(
    x_train,
    y_train,
    batch_size=16,
    epochs=60,
    validation_data=(x_val, y_val),
    callbacks=[stopping],
    verbose=2,
)
losses = history.history["val_loss"]
assert stopping.stopped_epoch == len(losses) - 1 < 59, "it would have gone on for ever"
assert stopping.best_epoch == int(np.argmin(losses))

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy, "epochs": len(losses)}))
