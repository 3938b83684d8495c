"""Selection of the largest entries in TensorFlow on a CPU, without XLA.

Without XLA, the selection functions return arrays whose length is the number of selected entries.
XLA needs array shapes that depend only on the lengths of the inputs, as in `tensorflow_select`.
On a CPU without XLA, selection with TensorFlow's `where` and `nth_element` takes a twelfth of the
time of `tensorflow_select`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from thinwire.ops.kernels.device import FLOAT, FLOATS, NUMBER, traced

_MAGNITUDE_BITS = 0x7FFFFFFF


def magnitudes_of(x: Any) -> Any:
    """Return the bits of floats [n] without their signs: int32 in the order of magnitudes."""
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), tf.constant(_MAGNITUDE_BITS))


def _places_of(mask: Any) -> Any:
    return tf.reshape(tf.where(mask), [-1])


def _at_rank(magnitudes: Any, rank: Any) -> Any:
    """Return the magnitude at a rank among `magnitudes`; rank 1 is the largest magnitude."""
    return tf.raw_ops.NthElement(input=magnitudes, n=rank - 1, reverse=True)


def _largest(x: Any, k: Any, stride: Any, rank: Any) -> tuple[Any, Any]:
    """Return the positions and values of the k entries of largest magnitude.

    Candidates for the k largest entries are the entries that reach a magnitude threshold from a
    sample of the entries. If fewer than k entries reach the threshold from the sample, all non-zero
    entries are candidates.
    """
    magnitudes = magnitudes_of(x)
    # The threshold is at least 1, the lowest nonzero magnitude in bits, so zeros are never
    # selected.
    threshold = tf.maximum(_at_rank(magnitudes[::stride], rank), 1)
    places = _places_of(magnitudes >= threshold)
    if tf.size(places) < k:
        places = _places_of(magnitudes > 0)
    if tf.size(places) > k:
        selected = tf.gather(magnitudes, places)
        least = _at_rank(selected, k)
        above, ties = selected > least, _places_of(selected == least)
        # Among entries with magnitudes equal to the k-th largest, the first ones are selected.
        last = ties[k - tf.reduce_sum(tf.cast(above, tf.int32)) - 1]
        equal = tf.logical_and(selected == least, tf.range(tf.size(selected, tf.int64)) <= last)
        places = tf.gather(places, _places_of(tf.logical_or(above, equal)))
    places = tf.ensure_shape(places, [None])
    return places, tf.gather(x, places)


@traced(FLOATS, *[NUMBER] * 3)
def top_k(x: Any, k: Any, stride: Any, rank: Any) -> Any:
    """Return positions (ascending, int64) and values of the k largest of n entries, 0 < k <= n."""
    return _largest(x, k, stride, rank)


@traced(FLOATS, FLOATS, FLOAT, *[NUMBER] * 3)
def feedback_top_k(residual: Any, addend: Any, factor: Any, k: Any, stride: Any, rank: Any) -> Any:
    """Add an addend to a residual; return the sum and, cut out of it, its k largest entries."""
    total = residual + factor * addend
    places, values = _largest(total, k, stride, rank)
    remainder = tf.tensor_scatter_nd_update(total, places[:, None], tf.zeros_like(values))
    return remainder, places, values


@traced(FLOATS, FLOAT)
def reaching(x: Any, threshold: Any) -> Any:
    """Return the positions and values of entries with a magnitude of at least `threshold` > 0."""
    places = _places_of(magnitudes_of(x) >= tf.bitcast(threshold, tf.int32))
    return places, tf.gather(x, places)
