"""Finds the k largest of non-negative integers with operations that JAX and torch share.

The selection compares magnitudes of float32 entries as integers: the bits of the float without the
sign bit. The order of these bits is the order of the magnitudes, even of subnormal numbers, which
float operations of some devices flush to zero.

The functions work along the last axis, and do not sort: the k-th largest magnitude is found bit by
bit, and entries are compared with it. So no array's shape depends on k, as JAX needs. They take
tensors of JAX or of torch, and use only operators and methods that both have.
"""

from __future__ import annotations

from typing import Any

#: Bit mask of a float32's magnitude: all bits except the sign.
MAGNITUDE_BITS = 0x7FFFFFFF
#: Number of bits of a magnitude.
NUM_BITS = 31


def narrowed(found: Any, number: Any, magnitudes: Any, k: Any) -> Any:
    """Return the highest bits of the k-th largest magnitude, with one bit more than `found`.

    Args:
        found: [..., 1] int32, the `number` highest bits of the k-th largest magnitude, or 0.
        number: Number of the bits that are known, 0 to 30.
        magnitudes: [..., n] int32 magnitudes, not negative.
        k: Rank of the magnitude to find, [..., 1] or one for all; 1 is the largest. With fewer than
            k magnitudes, the result is 0.
    """
    bit = 1 << (NUM_BITS - 1 - number)
    reaching = (magnitudes >= found + bit).sum(-1, keepdims=True)
    return found + (reaching >= k) * bit


def are_largest(magnitudes: Any, kth: Any, k: Any) -> Any:
    """Return [..., n] bool: True for the k largest magnitudes that are not 0.

    Among equal magnitudes, the ones with the lowest positions are selected.

    Args:
        magnitudes: [..., n] int32 magnitudes, not negative.
        kth: [..., 1] int32, the k-th largest magnitude.
        k: Number of magnitudes to select, [..., 1] or one for all.
    """
    # a zero is never selected, so the magnitude to reach is at least the smallest subnormal's
    least = kth + (kth == 0) * 1
    above, ties = magnitudes > least, magnitudes == least
    missing = k - above.sum(-1, keepdims=True)
    return above | (ties & (ties.cumsum(-1) <= missing))
