"""After fit: evaluate, predict, save, load with the state of the optimizer, go on training."""

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
x = rng.uniform(-2, 2, (6000, 2)).astype("float32")
ring = (np.hypot(x[:, 0], x[:, 1]) < 1.3).astype("int32")
y = np.where(rng.random(6000) < 0.05, 1 - ring, ring)
x_train, y_train, x_test, y_test = x[:4500], y[:4500], x[4500:], y[4500:]

model = keras.Sequential(
    [
        keras.Input((2,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
history = model.fit(x_train, y_train, batch_size=32, epochs=25, verbose=2)
assert list(history.history) == ["accuracy", "loss"], history.history
assert len(history.history["loss"]) == 25

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
predicted = model.predict(x_test, verbose=0)
assert np.isclose(np.mean((predicted[:, 0] > 0.5) == y_test), accuracy)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    model.save_weights(Path(folder) / "model.weights.h5")
    model.load_weights(Path(folder) / "model.weights.h5")
np.testing.assert_allclose(loaded.predict(x_test, verbose=0), predicted, atol=1e-6)
slots = [np.abs(variable.numpy()).max() for variable in loaded.optimizer.variables[2:]]
assert int(loaded.optimizer.iterations) > 0 and max(slots) > 0, "the optimizer's state is lost"
loaded.fit(x_test, y_test, epochs=1, verbose=0)  # alone, as any loaded model

print(json.dumps({"metric": "accuracy", "value": accuracy}))
