"""Thinwire's model file for the wide work: the perceptron with all contenders' initial weights."""

from __future__ import annotations

import keras

from bench.peers import wide_work, work

_SEED = 1


def build_model() -> keras.Model:
    """Return the network: images [N, 28, 28, 1] float32 to logits [N, 10]."""
    *hidden, outputs = wide_work.WIDTHS[1:]
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            *(keras.layers.Dense(units, activation="relu") for units in hidden),
            keras.layers.Dense(outputs),
        ]
    )
    model.set_weights(work.unflatten(wide_work.initial(_SEED), wide_work.TENSORS))
    return model
