"""Selection as `tf.function`s on a processor: as long as what is found.

XLA needs shapes that follow from the lengths alone (`tensorflow_select`); without it TensorFlow's
own `where` and `nth_element`, which only a processor has, take a twelfth of the time.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from thinwire.ops.kernels.device import FLOAT, FLOATS, NUMBER, traced

_MAGNITUDE_BITS = 0x7FFFFFFF


def magnitudes_of(x: Any) -> Any:
    """Return the bits of floats [n] without their signs: int32 of the same order."""
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), tf.constant(_MAGNITUDE_BITS))


def _places_of(mask: Any) -> Any:
    return tf.reshape(tf.where(mask), [-1])


def _at_rank(magnitudes: Any, rank: Any) -> Any:
    """Return the magnitude of a rank, 1 for the largest."""
    return tf.raw_ops.NthElement(input=magnitudes, n=rank - 1, reverse=True)


def _largest(x: Any, k: Any, stride: Any, rank: Any) -> tuple[Any, Any]:
    """Candidates above a sampled threshold, or all but zeros where these are too few; k of them."""
    magnitudes = magnitudes_of(x)
    threshold = tf.maximum(_at_rank(magnitudes[::stride], rank), 1)  # zeros are never selected
    places = _places_of(magnitudes >= threshold)
    if tf.size(places) < k:
        places = _places_of(magnitudes > 0)
    if tf.size(places) > k:
        found = tf.gather(magnitudes, places)
        least = _at_rank(found, k)
        above, ties = found > least, _places_of(found == least)
        last = ties[k - tf.reduce_sum(tf.cast(above, tf.int32)) - 1]  # of equals the first ones
        equal = tf.logical_and(found == least, tf.range(tf.size(found, tf.int64)) <= last)
        places = tf.gather(places, _places_of(tf.logical_or(above, equal)))
    places = tf.ensure_shape(places, [None])
    return places, tf.gather(x, places)


@traced(FLOATS, *[NUMBER] * 3)
def top_k(x: Any, k: Any, stride: Any, rank: Any) -> Any:
    """Return the k largest: ascending places int64 and values; 0 < k <= n."""
    return _largest(x, k, stride, rank)


@traced(FLOATS, FLOATS, FLOAT, *[NUMBER] * 3)
def feedback_top_k(residual: Any, addend: Any, factor: Any, k: Any, stride: Any, rank: Any) -> Any:
    """Return what is left of the residual plus an addend, and `top_k` of it."""
    total = residual + factor * addend
    places, values = _largest(total, k, stride, rank)
    rest = tf.tensor_scatter_nd_update(total, places[:, None], tf.zeros_like(values))
    return rest, places, values


@traced(FLOATS, FLOAT)
def reaching(x: Any, threshold: Any) -> Any:
    """Return the entries of at least this magnitude > 0."""
    places = _places_of(magnitudes_of(x) >= tf.bitcast(threshold, tf.int32))
    return places, tf.gather(x, places)
