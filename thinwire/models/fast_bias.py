"""Biases whose gradient is a plain sum, which a CPU takes in a fraction of the time.

Keras adds a bias with `tf.nn.bias_add`. The operation behind its gradient goes through the memory
of a convolution's output so slowly on one thread that it was a seventh of mnist_cnn's whole step
(5.3 of 37 ms at batch 64); the gradient of a broadcast addition is a sum, and takes 0.5 ms.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_swapping = threading.RLock()


@contextlib.contextmanager
def plain_bias_sums() -> Iterator[None]:
    """Have what is traced meanwhile add its biases by a broadcast addition.

    Same values; gradients differ by the order of summation. Where there is a GPU, and for channels
    in front, everything stays as it is.
    """
    if tf.config.list_physical_devices("GPU"):
        yield
        return
    with _swapping:
        original = tf.nn.bias_add
        tf.nn.bias_add = _adding(original)
        try:
            yield
        finally:
            tf.nn.bias_add = original


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes `tf.nn.bias_add`'s place."""

    def add(value: Any, bias: Any, data_format: str | None = None, name: str | None = None) -> Any:
        channels_in_front = data_format is not None and data_format.startswith("NC")
        if channels_in_front:
            return original(value, bias, data_format=data_format, name=name)
        return tf.add(value, bias, name=name)

    return add
