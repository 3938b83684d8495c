"""BackupAndRestore, TensorBoard and CSVLogger, and a fit that is called twice; Adam."""

import argparse
import csv
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
x = rng.normal(size=(4500, 10)).astype("float32")
y = (np.tanh(x @ rng.normal(size=(10, 4))) @ rng.normal(size=4) + rng.normal(0, 0.3, 4500)).astype(
    "float32"
)

model = keras.Sequential(
    [keras.Input((10,)), keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(1)]
)
model.compile(
    optimizer=keras.optimizers.Adam(5e-3), loss="huber", metrics=[keras.metrics.R2Score(name="r2")]
)
model = thinwire.distribute(model)

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    table = folder / "log.csv"
    callbacks = [keras.callbacks.BackupAndRestore(folder / "backup")]
    if keras.backend.backend() == "tensorflow":  # Keras' TensorBoard needs TensorFlow
        callbacks.append(keras.callbacks.TensorBoard(folder / "tensorboard"))
    for first, last in ((0, 5), (5, 10)):
        history = model.fit(
            x[:3000],
            y[:3000],
            batch_size=32,
            initial_epoch=first,
            epochs=last,
            validation_data=(x[3000:3500], y[3000:3500]),
            callbacks=[*callbacks, keras.callbacks.CSVLogger(table, append=first > 0)],
            verbose=2,
        )
        assert history.epoch == list(range(first, last))
        assert "val_r2" in history.history
    if table.exists():
        rows = list(csv.DictReader(table.open()))
        assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(10)], rows

results = model.evaluate(x[3500:], y[3500:], verbose=0, return_dict=True)
print(json.dumps({"metric": "r2", "value": float(results["r2"])}))
