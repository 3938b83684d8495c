"""Ascending positions as bytes, near their entropy, and back: one pair of functions per coding.

Bits are numbered from the lowest bit of each byte; zeros fill the last byte. A *gap* is the number
of skipped positions: ``index[i] - index[i - 1] - 1``, with -1 before the first index. Encoders take
positions [k] int64, k > 0, ascending, unique and below ``size``. Decoders accept hostile bytes:
they raise WireError and allocate memory only in proportion to the received bytes.

Source: Rice (1979) for coded gaps.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Int64

MAX_LOW_BITS = 24  # a field shifted by up to 7 bits then fits into four bytes
DEFLATE_LEVEL = 6  # 4-21 % smaller than level 1 on clustered positions; 0.4 ms for 12,000
_ESCAPE = 255  # marks a gap of 255 or more; the excess follows after the bytes of all gaps
_ESCAPE_BYTES = 4
_MANY = 4096  # numbers from which the faster packing saves more than its extra calls cost
# Gaps deflated for an estimate, and gaps per run of this sample: deflating all gaps would take as
# long as coding a reply.
_SAMPLED, _SAMPLE_RUN = 4096, 512


class WireError(ValueError):
    """Bytes that do not decode; the message names the found and the expected value."""


def encode_bitmap(indices: Int64, size: int) -> bytes:
    """Return one bit per entry, set at the positions."""
    bits = np.zeros(size, bool)
    bits[indices] = True
    return np.packbits(bits, bitorder="little").tobytes()


def decode_bitmap(data: memoryview, count: int, size: int) -> Int64:
    """Invert `encode_bitmap`."""
    if len(data) != -(-size // 8):
        raise WireError(f"bitmap of {len(data)} bytes; {size} entries need {-(-size // 8)}")
    indices: Int64 = _bits_of(data).nonzero()[0]
    if indices.size != count:
        raise WireError(f"bitmap with {indices.size} bits set for {count} values")
    return indices


def encode_best_rice(indices: Int64) -> tuple[int, bytes]:
    """Return (low bits, bytes) of the smallest Rice coding."""
    gaps = _gaps(indices)
    low_bits = _best_rice(gaps, int(indices[-1]))[0]
    return low_bits, _encode_gaps(gaps, low_bits)


def _encode_gaps(gaps: Int64, low_bits: int) -> bytes:
    """Return the Golomb-Rice code: high parts of all gaps in unary, then all low parts.

    A number in unary is that many zeros, then a one.
    """
    return _unary(np.cumsum(gaps >> low_bits)) + _pack(gaps, low_bits)


def decode_rice(data: memoryview, count: int, size: int, low_bits: int) -> Int64:
    """Invert `encode_best_rice`, which has returned `low_bits` too."""
    indices, low = _high_and_low(data, count, size, low_bits)
    indices <<= low_bits
    indices += low.cumsum()
    indices += np.arange(count)
    return indices


def encode_deflated_gaps(indices: Int64, searches: bool = True) -> bytes:
    """Return the raw deflate of one byte per gap, followed by the excess of gaps over 255.

    The excess is stored in four planes, the plane of the lowest bytes first.

    Args:
        indices: [k] int64, ascending positions.
        searches: Whether deflate searches for repeated gaps, which clustered positions have.
            Without the search only the frequencies of bytes are used, in a fifth of the time.
    """
    return _deflate_gaps(_gaps(indices), searches)


def estimated_deflated_bytes(indices: Int64, searches: bool) -> int:
    """Estimate the bytes of `encode_deflated_gaps`; for many gaps, from a deflated sample."""
    gaps = _gaps(indices)
    if gaps.size <= _SAMPLED:
        return len(_deflate_gaps(gaps, searches))
    starts = np.linspace(0, gaps.size - _SAMPLE_RUN, _SAMPLED // _SAMPLE_RUN).astype(np.int64)
    sample = np.concatenate([gaps[start : start + _SAMPLE_RUN] for start in starts.tolist()])
    return len(_deflate_gaps(sample, searches)) * gaps.size // sample.size


def _deflate_gaps(gaps: Int64, searches: bool) -> bytes:
    heads = np.minimum(gaps, _ESCAPE).astype(np.uint8)
    excess = (gaps[heads == _ESCAPE] - _ESCAPE).astype("<u4")
    planes = excess.view(np.uint8).reshape(-1, _ESCAPE_BYTES).T
    if searches:
        # With few different gaps, the search of level 6 takes 14 times as long as level 1.
        crowded = gaps.sum() < 3 * gaps.size
        deflater = zlib.compressobj(1 if crowded else DEFLATE_LEVEL, wbits=-zlib.MAX_WBITS)
    else:
        deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return deflater.compress(heads.tobytes() + planes.tobytes()) + deflater.flush()


def decode_deflated_gaps(data: memoryview, count: int) -> Int64:
    """Invert `encode_deflated_gaps`."""
    inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        # Accept one byte more than the largest legal length. This detects a longer stream, for
        # example a decompression bomb, without unpacking it.
        plain = inflater.decompress(data, count * (1 + _ESCAPE_BYTES) + 1)
    except zlib.error as error:
        raise WireError(f"deflated gaps do not inflate: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise WireError("deflated gaps: the stream does not end where its bytes do")
    heads = np.frombuffer(plain, np.uint8, min(count, len(plain)))
    escaped = (heads == _ESCAPE).nonzero()[0]
    if len(plain) != count + _ESCAPE_BYTES * escaped.size:
        raise WireError(
            f"deflated gaps: {len(plain)} bytes for {count} positions, {escaped.size} escaped"
        )
    gaps = heads.astype(np.int64)
    if escaped.size:
        planes = np.frombuffer(plain, np.uint8, offset=count).reshape(_ESCAPE_BYTES, -1)
        gaps[escaped] += np.ascontiguousarray(planes.T).view("<u4").ravel()
    return gaps.cumsum() + np.arange(count)


def encode_uint32(indices: Int64) -> bytes:
    """Return little-endian uint32 positions; positions must be below 2**32."""
    return indices.astype("<u4").tobytes()


def decode_uint32(data: memoryview, count: int) -> Int64:
    """Invert `encode_uint32`; the caller must check the order of the positions."""
    if len(data) != 4 * count:
        raise WireError(f"{len(data)} bytes of uint32 positions for {count} values")
    return np.frombuffer(data, "<u4").astype(np.int64)


def best_rice(indices: Int64) -> tuple[int, int]:
    """Return (low bits, bytes) of the smallest Rice coding.

    For geometric gaps the best parameter is log2(mean * ln 2). Clustered positions have a lower
    best parameter, so the search starts at this value and goes down while the size shrinks.
    """
    return _best_rice(_gaps(indices), int(indices[-1]))


def _best_rice(gaps: Int64, last: int) -> tuple[int, int]:
    mean = (last + 1 - gaps.size) / gaps.size
    low_bits = min(MAX_LOW_BITS, max(0, int(mean * 0.69314718).bit_length()))
    size_bytes = _rice_bytes(gaps, low_bits)
    while low_bits and (smaller := _rice_bytes(gaps, low_bits - 1)) <= size_bytes:
        low_bits, size_bytes = low_bits - 1, smaller
    return low_bits, size_bytes


def _rice_bytes(gaps: Int64, low_bits: int) -> int:
    num_zeros = int((gaps >> low_bits).sum())
    return -(-(gaps.size + num_zeros) // 8) + -(-gaps.size * low_bits // 8)


def _gaps(indices: Int64) -> Int64:
    gaps = indices.copy()  # np.diff takes several times as long on short arrays
    gaps[1:] -= indices[:-1]
    gaps[1:] -= 1
    return gaps


def _unary(high: Int64) -> bytes:
    """Code ascending numbers: per number, one zero per unit of increase, then a one."""
    bits = np.zeros(int(high[-1]) + high.size, bool)
    bits[high + np.arange(high.size)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _high_and_low(
    data: memoryview, count: int, size: int, low_bits: int
) -> tuple[Int64, NDArray[Any]]:
    """Split the data and decode the unary and the packed part; check the unary part completely."""
    if not 0 <= low_bits <= MAX_LOW_BITS:
        raise WireError(f"{low_bits} low bits; expected 0 to {MAX_LOW_BITS}")
    unary_bytes = len(data) - -(-count * low_bits // 8)
    if not -(-count // 8) <= unary_bytes <= -(-(count + (size >> low_bits)) // 8):
        raise WireError(
            f"{len(data)} index bytes cannot hold {count} positions below {size} "
            f"with {low_bits} low bits"
        )
    ones = _bits_of(data[:unary_bytes]).nonzero()[0]
    if ones.size != count or ones[-1] // 8 != unary_bytes - 1:
        raise WireError(
            f"unary part: {ones.size} ones in {unary_bytes} bytes for {count} positions"
        )
    return ones - np.arange(count), _unpack(data[unary_bytes:], count, low_bits)


def _pack(numbers: Int64, low_bits: int) -> bytes:
    """Pack the lowest bits of each number into consecutive fields."""
    if not low_bits:
        return b""
    if low_bits <= 8 and numbers.size >= _MANY:
        return _pack_octets(numbers.astype(np.uint8), low_bits)
    width = 16 if low_bits <= 16 else 32
    fields = numbers.astype(f"<u{width // 8}").view(np.uint8)
    bits = np.unpackbits(fields, bitorder="little").reshape(-1, width)
    return np.packbits(bits[:, :low_bits], bitorder="little").tobytes()


def _pack_octets(numbers: NDArray[np.uint8], low_bits: int) -> bytes:
    """Pack at most 8 bits of each number; eight fields of b bits fill exactly b bytes."""
    rows = np.zeros((-(-numbers.size // 8), 8), np.uint8)
    rows.reshape(-1)[: numbers.size] = numbers
    rows &= np.uint8((1 << low_bits) - 1)
    words = rows[:, 0].astype("<u8")
    for place in range(1, 8):
        words |= rows[:, place].astype("<u8") << np.uint64(place * low_bits)
    packed = words.view(np.uint8).reshape(-1, 8)[:, :low_bits].tobytes()
    return packed[: -(-numbers.size * low_bits // 8)]


def _unpack(data: memoryview, count: int, low_bits: int) -> NDArray[Any]:
    """Invert `_pack`: read four bytes around each field, shift and mask."""
    if not low_bits:
        return np.zeros(count, np.int64)
    padded = np.zeros(len(data) + 3, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    words = np.ndarray((len(data),), "<u4", padded.data, strides=(1,))  # one word per byte
    starts = np.arange(count) * low_bits
    fields = words.take(starts >> 3) >> (starts & 7).astype(np.uint32)
    return (fields & np.uint32((1 << low_bits) - 1)).astype(np.int64)


def _bits_of(data: memoryview) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(bool)
