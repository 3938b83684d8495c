"""A program that imports Keras with its backend and trains a small model for a few steps.

``python backend_probe.py`` writes one JSON object to standard output: ``import_seconds``,
``backend``, ``version`` (of the backend), ``keras``, ``gpus`` (names), ``built_with_cuda``,
``step_seconds`` (median time of a training step of Keras' mnist_cnn network, batch 64). `thinwire
doctor` runs this program in a separate process, which it can end after a time limit and which keeps
the backend out of its own process.
"""

from __future__ import annotations

import importlib
import importlib.util
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

    name = keras.backend.backend()
    library = importlib.import_module(name)
    return {
        "import_seconds": time.perf_counter() - began,
        "version": library.__version__,
        "keras": keras.__version__,
        "backend": name,
        **_GPUS[name](library),
    }


def _gpus_of_tensorflow(tensorflow: Any) -> dict[str, Any]:
    return {
        "gpus": [device.name for device in tensorflow.config.list_physical_devices("GPU")],
        "built_with_cuda": tensorflow.test.is_built_with_cuda(),
    }


def _gpus_of_jax(jax: Any) -> dict[str, Any]:
    plugins = [f"jax_cuda{version}_plugin" for version in _CUDA_OF_JAX]
    return {
        "gpus": [str(device) for device in jax.devices() if device.platform == "gpu"],
        "built_with_cuda": any(importlib.util.find_spec(name) for name in plugins),
    }


def _gpus_of_torch(torch: Any) -> dict[str, Any]:
    return {
        "gpus": [f"cuda:{number}" for number in range(torch.cuda.device_count())],
        "built_with_cuda": torch.version.cuda is not None,
    }


#: Keras backend -> function of the imported backend that describes its GPUs.
_GPUS = {"tensorflow": _gpus_of_tensorflow, "jax": _gpus_of_jax, "torch": _gpus_of_torch}
_CUDA_OF_JAX = (12, 13)  # versions of CUDA for which JAX has a plugin


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
