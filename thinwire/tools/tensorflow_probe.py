"""A program that imports TensorFlow and trains a small model for a few steps.

``python tensorflow_probe.py`` writes one JSON object to standard output: ``import_seconds``,
``version``, ``keras``, ``backend``, ``gpus`` (names), ``built_with_cuda``, ``step_seconds`` (median
time of a training step of Keras' mnist_cnn network, batch 64). `thinwire doctor` runs this program
in a separate process, which it can end after a time limit and which keeps TensorFlow out of its own
process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
_BATCH, _STEPS = 64, 10


def _import() -> dict[str, Any]:
    began = time.perf_counter()
    import keras
    import tensorflow as tf

    return {
        "import_seconds": time.perf_counter() - began,
        "version": tf.__version__,
        "keras": keras.__version__,
        "backend": keras.backend.backend(),
        "gpus": [device.name for device in tf.config.list_physical_devices("GPU")],
        "built_with_cuda": tf.test.is_built_with_cuda(),
    }


def _step_seconds() -> float:
    import keras
    import numpy as np

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    images = np.zeros((_BATCH, 28, 28, 1), np.float32)
    labels = np.zeros(_BATCH, np.int32)
    # Compile the training step before the measurement.
    model.train_on_batch(images, labels)
    seconds = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        model.train_on_batch(images, labels)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    found = _import()
    found["step_seconds"] = _step_seconds()
    sys.stdout.write(f"{json.dumps(found)}\n")
