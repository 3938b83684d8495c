"""Callbacks of Thinwire's own for Keras' `fit`: ``thinwire.callbacks.Traffic()`` and the like."""

from thinwire.keras.callbacks import Staleness, Traffic, Version

__all__ = ["Staleness", "Traffic", "Version"]
