"""Use SwapEMAWeights at each end of an epoch, so that checkpoints hold averaged weights."""

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
templates = rng.normal(size=(8, 60))
y = rng.integers(8, size=6000)
x = (templates[y] + rng.normal(0, 2.4, (6000, 60))).astype("float32")

model = keras.Sequential(
    [
        keras.Input((60,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(8),
    ]
)
model.compile(
    optimizer=keras.optimizers.AdamW(3e-3, weight_decay=1e-3, use_ema=True, ema_momentum=0.95),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model = thinwire.distribute(model)

with tempfile.TemporaryDirectory() as folder:
    best = Path(folder) / "best.keras"
    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.ModelCheckpoint(best, monitor="val_accuracy", save_best_only=True),
    ]
    model.fit(
        x[:3500],
        y[:3500],
        batch_size=32,
        epochs=10,
        validation_data=(x[3500:4500], y[3500:4500]),
        callbacks=callbacks,
        verbose=2,
    )
    model = keras.models.load_model(best)

loss, accuracy = model.evaluate(x[4500:], y[4500:], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
