"""Accuracy of a snapshot on the whole test set, in the harness and off everybody's clock."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.peers import work

_BATCH = 1000


def evaluator() -> Callable[[Path], float]:
    """Return a function of a snapshot's path that gives its accuracy; imports TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import keras

    from thinwire.models.registry import build_network
    from thinwire.supervisor.evaluator import Evaluator

    model = build_network("mnist_cnn", 28, 1, 10, seed=1)
    images, labels = work.load("t10k")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    own = Evaluator(model, loss, images[..., None], labels, _BATCH)

    def accuracy(path: Path) -> float:
        flat = np.load(path)
        # A model that diverged is worth what it is: nothing.
        return own.evaluate(work.unflatten(flat))["accuracy"] if np.isfinite(flat).all() else 0.0

    return accuracy
