"""Use ReduceLROnPlateau and EarlyStopping on val_mae, and save the best weights to a file."""

import argparse
import json
import tempfile
from pathlib import Path

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
x = rng.uniform(-2, 2, size=(5000, 6)).astype("float32")
y = np.sin(2 * x[:, 0]) + x[:, 1] * np.abs(x[:, 2]) + rng.normal(0, 0.2, 5000)
y = y.astype("float32")

model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(48, activation="gelu"),
        keras.layers.Dense(48, activation="gelu"),
        keras.layers.Dense(1),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
model = thinwire.distribute(model)

with tempfile.TemporaryDirectory() as folder:
    best = Path(folder) / "best.weights.h5"
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(
            monitor="val_mae", factor=0.4, patience=2, min_lr=1e-4, verbose=1
        ),
        keras.callbacks.EarlyStopping(monitor="val_mae", patience=6, verbose=1),
        keras.callbacks.ModelCheckpoint(
            best, monitor="val_mae", save_best_only=True, save_weights_only=True
        ),
    ]
    history = model.fit(
        x[:3000],
        y[:3000],
        batch_size=32,
        epochs=30,
        validation_data=(x[3000:4000], y[3000:4000]),
        callbacks=callbacks,
        verbose=2,
    )
    rates = history.history["learning_rate"]
    assert rates[0] == np.float32(0.01)
    assert rates[-1] < 0.01, "the rate has never fallen"
    model.load_weights(best)

loss, mae = model.evaluate(x[4000:], y[4000:], verbose=0)
print(json.dumps({"metric": "r2", "value": float(1 - loss / y[4000:].var())}))
