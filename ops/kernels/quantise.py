"""Entry values in fewer bits, in numpy. Whatever comes out is finite if what went in was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.types import CodedValues

if TYPE_CHECKING:
    from ops.types import Float32

LARGEST_FLOAT16 = np.float32(65504)
LARGEST_BFLOAT16 = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_LEVELS = 127  # int8 codes run from -127 to 127, so that zero is exact and both signs are equal


def quantise(values: Float32, dtype: str) -> CodedValues:
    """Code values.

    Args:
        values: [k] float32, finite.
        dtype: float32 (no copy); bfloat16 (round to nearest even); float16 (cut to +-65504);
            int8 (one scale = max|v| / 127 for all values, round half to even).

    Raises:
        ValueError: Another dtype.
    """
    if dtype == "float32":
        return CodedValues(dtype, values)
    if dtype == "bfloat16":
        return CodedValues(dtype, _to_bfloat16(values))
    if dtype == "float16":
        cut = np.clip(values, -LARGEST_FLOAT16, LARGEST_FLOAT16)
        return CodedValues(dtype, cut.astype(np.float16))
    if dtype == "int8":
        scale = int8_scale(float(np.max(np.abs(values), initial=0.0)))
        codes = np.divide(values, np.float32(scale))
        np.clip(np.rint(codes, out=codes), -_LEVELS, _LEVELS, out=codes)
        return CodedValues(dtype, codes.astype(np.int8), scale)
    raise unknown_dtype(dtype)


def dequantise(coded: CodedValues) -> Float32:
    """Return the values [k] float32 that `coded` stands for: data * scale, rounded once.

    With scale 1 float32 comes back without a copy.

    Raises:
        ValueError: An unknown dtype.
    """
    if coded.dtype == "float32":
        values = coded.data
    elif coded.dtype == "bfloat16":
        bits = coded.data.astype(np.uint32)
        bits <<= 16
        values = bits.view(np.float32)
    elif coded.dtype in ("float16", "int8"):
        values = coded.data.astype(np.float32)
    else:
        raise unknown_dtype(coded.dtype)
    return values if coded.scale == 1 else values * np.float32(coded.scale)


def int8_scale(largest: float) -> float:
    """Return the float32 scale for a block with this largest magnitude: finite and above zero."""
    if largest == 0:
        return 1.0
    scale = np.float32(largest / _LEVELS)
    if float(scale) * _LEVELS > _LARGEST_FLOAT32:  # rounding up would decode to infinity
        scale = np.nextafter(scale, np.float32(0))
    return max(float(scale), _SMALLEST_SCALE)


def unknown_dtype(dtype: str) -> ValueError:
    """Return the error for a value dtype that does not exist."""
    return ValueError(
        f"value dtype {dtype!r} is unknown; expected float32, bfloat16, float16 or int8."
    )


def _to_bfloat16(values: Float32) -> np.ndarray:
    """Return [k] uint16: the upper halves, rounded to nearest even, never to infinity."""
    bits = np.clip(values, -LARGEST_BFLOAT16, LARGEST_BFLOAT16).view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    return bits.astype(np.uint16)
