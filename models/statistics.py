"""The moving statistics of a model's BatchNormalization layers, which training does not share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

#: What Keras calls them; a layer of your own that uses these names is treated likewise.
_NAMES = frozenset({"moving_mean", "moving_variance"})


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the moving means and variances, in the model's order: layer by layer, mean first.

    The order follows from the model alone, so it is the same on every node that builds the same
    model, inner models and frozen layers included. Nothing to return is a legal answer.

    Args:
        model: Built.
    """
    return [v for v in model.non_trainable_variables if v.name in _NAMES]
