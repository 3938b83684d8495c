"""Fits of small models on Keras' present backend: alone, and as workers of a run in threads."""

import keras
import numpy as np

from tests.thinwire.script.keras.runs import BATCH, LOSS, X, Y, scripts
from thinwire import W_global

#: Largest accepted difference of two workers with half a batch each from Keras alone.
TOLERANCE = 1e-5


def initial(seed):
    """Return an initializer whose values do not depend on Keras' global random numbers."""
    return keras.initializers.GlorotUniform(seed=seed)


def network(*middle, name="toy", kind=keras.Sequential):
    """Return a model of six inputs and four classes, with equal weights in each call."""
    W_global.clear()
    return kind(
        [
            keras.Input((6,), name="in"),
            keras.layers.Dense(8, activation="tanh", name="hidden", kernel_initializer=initial(1)),
            *middle,
            keras.layers.Dense(4, name="logits", kernel_initializer=initial(2)),
        ],
        name=name,
    )


def compiled(optimizer, *middle, loss=LOSS, metrics=("accuracy",), kind=keras.Sequential):
    """Return a function that makes a compiled `network`.

    Args:
        optimizer: Function that makes an optimizer.
        middle: Functions that make the layers between the two dense ones.
        loss: Loss, or a function that makes it.
        metrics: Metrics, or functions that make them.
        kind: Class of the model.
    """

    def make():
        model = network(*(layer() for layer in middle), kind=kind)
        made = [metric() if callable(metric) else metric for metric in metrics]
        model.compile(
            optimizer(), loss=loss() if isinstance(loss, type) else loss, metrics=made or None
        )
        return model

    return make


def alone(make, x=X, y=Y, **options):
    """Return a model that Keras alone has trained, and its History."""
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    if isinstance(x, keras.utils.PyDataset) or y is None:
        del options["batch_size"]
    model = make()
    return model, model.fit(x, y, **options).history


def difference(model, other):
    """Return the largest difference of two models' weights."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(one - two).max()) for one, two in pairs)


__all__ = ["BATCH", "LOSS", "TOLERANCE", "X", "Y", "scripts"]
