"""Forecast a time series with a GRU and the usual Keras callbacks.

The callbacks lower the learning rate, stop the training early and save the best model.

In one process, without Thinwire's servers:

python examples/forecasting.py

On two workers:

thinwire run --nb_workers=2 --method=bsp examples/forecasting.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=12)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

WINDOW = 48
rng = np.random.default_rng(options.seed)
hours = np.arange(8000)
temperature = 8 * np.sin(2 * np.pi * hours / 24) + 10 * np.sin(2 * np.pi * hours / 2000)
temperature += np.convolve(rng.normal(0, 1.5, 8000), np.ones(12) / 3, mode="same")
series = ((temperature - temperature.mean()) / temperature.std()).astype("float32")


def windows(values, shuffle=False):
    """Return a data set of input windows [batch, WINDOW, 1] and targets [batch].

    A window's target is the value 3 hours after the window's last value.
    """
    return keras.utils.timeseries_dataset_from_array(
        values[: -WINDOW - 2, None],
        values[WINDOW + 2 :],
        sequence_length=WINDOW,
        batch_size=64,
        shuffle=shuffle,
        seed=options.seed,
    )


train, validation, test = (
    windows(series[:5000], shuffle=True),
    windows(series[5000:6500]),
    windows(series[6500:]),
)
model = keras.Sequential(
    [keras.Input((WINDOW, 1)), keras.layers.GRU(24), keras.layers.Dense(1)], name="forecasting"
)
model.compile(
    optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=[keras.metrics.R2Score(name="r2")]
)
model = thinwire.distribute(model)

with tempfile.TemporaryDirectory() as folder:
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=2, verbose=1),
        keras.callbacks.EarlyStopping(
            monitor="val_loss", patience=5, restore_best_weights=True, verbose=1
        ),
        keras.callbacks.ModelCheckpoint(Path(folder) / "best.keras", save_best_only=True),
    ]
    model.fit(
        train,
        epochs=options.epochs,
        validation_data=validation,
        callbacks=callbacks,
        verbose=2,
    )

results = model.evaluate(test, verbose=0, return_dict=True)
print(json.dumps({"metric": "r2", "value": float(results["r2"])}))
