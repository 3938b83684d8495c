"""The one name user scripts import from: ``from thinwire import W_global``."""

from ops.collection import W_global

__all__ = ["W_global"]
