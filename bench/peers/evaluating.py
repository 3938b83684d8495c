"""Evaluation of snapshots on the test set, in the harness process after a run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peers import decoder_work, wide_work, work

_BATCH = 1000


def evaluator(model: str, text: str) -> Callable[[Path], float]:
    """Return a function that returns the score of the snapshot at a path; imports TensorFlow.

    Args:
        model: Name of the trained model.
        text: Folder of the decoder's text.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    score, worst = _losses(text) if model == work.DECODER else _accuracies(model)
    last: tuple[NDArray[np.float32], float] | None = None

    def found(path: Path) -> float:
        nonlocal last
        flat = np.load(path)
        # A long round writes several snapshots of the same weights; evaluate them only once.
        if last is None or not np.array_equal(flat, last[0]):
            # A model that diverged gets the worst score: evaluating it could yield NaN.
            last = flat, score(flat) if np.isfinite(flat).all() else worst
        return last[1]

    return found


def _accuracies(work_model: str) -> tuple[Callable[[NDArray[np.float32]], float], float]:
    import keras

    from bench.peers import thinwire_wide
    from thinwire.models.registry import build_network
    from thinwire.supervisor.evaluator import Evaluator

    if work_model == work.WIDE:
        model, named = thinwire_wide.build_model(), wide_work.TENSORS
    else:
        model, named = build_network("mnist_cnn", 28, 1, 10, seed=1), work.TENSORS
    images, labels = work.load("t10k")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    evaluator = Evaluator(model, loss, images[..., None], labels, _BATCH)
    return lambda flat: evaluator.evaluate(work.unflatten(flat, named))["accuracy"], 0.0


def _losses(text: str) -> tuple[Callable[[NDArray[np.float32]], float], float]:
    """Return a function from weights to the negated loss, and the worst possible score."""
    import keras

    from bench.peers.thinwire_decoder import build_model

    model = build_model()
    inputs, labels = decoder_work.load("test", text)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def score(flat: NDArray[np.float32]) -> float:
        model.set_weights(work.unflatten(flat, decoder_work.TENSORS))
        return -float(loss(labels, model.predict_on_batch(inputs)))

    return score, -math.inf
