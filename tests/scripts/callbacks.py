"""Use EarlyStopping, ReduceLROnPlateau, ModelCheckpoint, CSVLogger and a custom callback."""

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
centres = rng.normal(size=(8, 3, 16))  # eight kinds, each of three clusters
y = rng.integers(8, size=7000)
x = centres[y, rng.integers(3, size=7000)] + rng.normal(0, 1.1, (7000, 16))
x = x.astype("float32")

model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(8, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(0.003),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model = thinwire.distribute(model)


class Epochs(keras.callbacks.Callback):
    """Counts epochs, and shows what a user's own callback sees."""

    count = 0

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1
        assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(logs)


with tempfile.TemporaryDirectory() as folder:
    best = Path(folder) / "best.keras"
    epochs = Epochs()
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=1, verbose=1),
        keras.callbacks.EarlyStopping(
            monitor="val_loss", patience=3, restore_best_weights=True, verbose=1
        ),
        keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
        keras.callbacks.CSVLogger(Path(folder) / "log.csv"),
        epochs,
    ]
    history = model.fit(
        x[:5500],
        y[:5500],
        validation_split=0.2,
        batch_size=32,
        epochs=40,
        callbacks=callbacks,
        verbose=2,
    )
    assert epochs.count == len(history.history["val_loss"]) >= 2
    assert (Path(folder) / "log.csv").read_text().startswith("epoch,accuracy")
    model = keras.models.load_model(best)

loss, accuracy = model.evaluate(x[5500:], y[5500:], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy, "epochs": epochs.count}))
