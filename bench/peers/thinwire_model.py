"""Thinwire's model file for the peers' work: mnist_cnn with all contenders' initial weights."""

from __future__ import annotations

import keras

from bench.peers import work
from thinwire.models.registry import build_network

_SEED = 1


def build_model() -> keras.Model:
    """Return the network: images [N, 28, 28, 1] float32 to logits [N, 10]."""
    model = build_network("mnist_cnn", 28, 1, 10, seed=_SEED)
    model.set_weights(work.unflatten(work.initial(_SEED)))
    return model
