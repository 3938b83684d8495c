"""Lossless coding of floats as bytes: exponents are deflated, mantissas and signs are not.

A sparse block holds the largest of many gradient values, so the values have few different
exponents, but their mantissas look random. The coding rotates each float left by one bit, which
moves the sign below the mantissa. After each float is rotated left by one bit, its upper byte holds
only exponent bits.
"""

from __future__ import annotations

import enum
import zlib

import numpy as np

from thinwire.ops.types import Array
from thinwire.ops.wire.index_codings import WireError, inflated

# number of values below which they are not deflated: the code table would take much of the saving
LEAST_VALUES = 512
# number of values below which they are copied with numpy slices, which is faster than shifting
# words
_MANY = 4096
WORTH_WHILE = 0.95  # values are deflated only if they take at most this fraction of plain bytes


class ValueCoding(enum.IntEnum):
    """How a block's values are coded; messages contain the enum's numbers."""

    PLAIN = 0  # PLAIN sends the values' own bytes
    EXPONENTS = 1  # EXPONENTS sends floats with deflated exponents
    CODES = 2  # CODES sends few-bit values, packed into bytes (few_bits_coding)
    DEFLATED_CODES = 3  # DEFLATED_CODES sends few-bit values, packed into bytes and deflated


def encode_exponents(data: Array) -> bytes:
    """Code floats, each rotated left by one bit: their lower bytes, then deflated upper bytes.

    Args:
        data: [k] values of 2 or 4 bytes each, from a `CodedValues`, not rotated yet.
    """
    turned = _turned(data.view(f"u{data.itemsize}"), 1)
    octets = turned.view(np.uint8).reshape(-1, data.itemsize)
    # Exponents of floats do not repeat in sequences, so Huffman coding alone is used, which takes a
    # fraction of the time.
    deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 8, zlib.Z_HUFFMAN_ONLY)
    deflated = deflater.compress(octets[:, -1].tobytes()) + deflater.flush()
    return _lower_bytes(turned) + deflated


def _lower_bytes(numbers: Array) -> bytes:
    """Return all bytes of each integer in an array except the integer's upper byte.

    For many numbers of four bytes, `_lower_bytes` shifts four numbers into three words, because
    numpy is slow at copying slices of three bytes.
    """
    if numbers.itemsize != 4 or numbers.size < _MANY:
        return numbers.view(np.uint8).reshape(-1, numbers.itemsize)[:, :-1].tobytes()
    fours = np.zeros((-(-numbers.size // 4), 4), np.uint32)
    fours.reshape(-1)[: numbers.size] = numbers
    first, second, third, fourth = fours.T
    threes = np.empty((len(fours), 3), "<u4")
    threes[:, 0] = (first & 0xFFFFFF) | second << 24
    threes[:, 1] = (second >> 8 & 0xFFFF) | third << 16
    threes[:, 2] = (third >> 16 & 0xFF) | fourth << 8
    return threes.tobytes()[: 3 * numbers.size]


def _with_lower_bytes(data: memoryview, count: int, value_bytes: int) -> Array:
    """Return the numbers that `_lower_bytes` coded, with upper bytes of 0."""
    if value_bytes != 4 or count < _MANY:
        octets = np.zeros((count, value_bytes), np.uint8)
        octets[:, :-1] = np.frombuffer(data, np.uint8).reshape(count, -1)
        return octets.view(f"u{value_bytes}").ravel()
    threes = np.zeros((-(-count // 4), 3), "<u4")
    threes.reshape(-1).view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    first, second, third = threes.T
    fours = np.empty((len(threes), 4), np.uint32)
    fours[:, 0] = first & 0xFFFFFF
    fours[:, 1] = first >> 24 | (second & 0xFFFF) << 8
    fours[:, 2] = second >> 16 | (third & 0xFF) << 16
    fours[:, 3] = third >> 8
    return fours.reshape(-1)[:count]


def decode_exponents(data: memoryview, count: int, value_bytes: int) -> memoryview:
    """Return the plain little-endian bytes of the values that `encode_exponents` coded.

    Args:
        data: Received bytes of the coded floats.
        count: Number of floats to decode.
        value_bytes: Number of bytes of one value, 2 or 4.

    Raises:
        WireError: The received bytes do not decode to `count` values.
    """
    plain = count * (value_bytes - 1)
    if value_bytes not in (2, 4) or count < 1 or len(data) <= plain:
        raise WireError(
            f"{len(data)} bytes with deflated exponents for {count} values of {value_bytes} bytes"
        )
    exponents = inflated(data[plain:], count, f"exponents of {count} values")
    if len(exponents) != count:
        raise WireError(f"{len(exponents)} deflated exponents of a block; expected {count}")
    bits = _with_lower_bytes(data[:plain], count, value_bytes)
    upper = np.frombuffer(exponents, np.uint8).astype(bits.dtype)
    bits |= upper << bits.dtype.type(8 * value_bytes - 8)
    return _turned(bits, 8 * value_bytes - 1).data.cast("B")


def _turned(bits: Array, places: int) -> Array:
    """Return unsigned integers rotated left by `places` bits."""
    left, right = (bits.dtype.type(n) for n in (places, 8 * bits.itemsize - places))
    turned: Array = bits << left
    turned |= bits >> right
    return turned
