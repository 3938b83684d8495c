"""Coding of ascending positions as bytes near their entropy: encoders and their decoders.

The bits of coded positions are numbered from the lowest bit of each byte; zeros fill the last byte.
A *gap* between ascending positions is the number of skipped positions,
``index[i] - index[i - 1] - 1``, with -1 before the first index. The encoders of positions take an
array [k] int64, k > 0, ascending, unique and below ``size``. The decoders of positions accept
hostile bytes: they raise WireError and allocate memory only in proportion to the received bytes.

Source: Rice (1979) for coded gaps.
"""

from __future__ import annotations

import zlib

import numpy as np

from thinwire.ops.types import Array, Bool, Int64, UInt8

# largest parameter of the Rice code: a field shifted by up to 7 bits fits into four bytes
MAX_LOW_BITS = 24
# deflate level 6 takes 4-21 % fewer bytes than level 1 for clustered positions, and 0.4 ms per
# 12,000 positions
DEFLATE_LEVEL = 6
_ESCAPE = 255  # byte value for a gap of 255 or more; gap - 255 follows after the bytes of all gaps
_ESCAPE_BYTES = 4
_MANY = 4096  # count of numbers from which `_pack_octets` saves more time than its calls cost
# The first number is how many gaps are deflated to estimate the bytes, the second is how many
# consecutive gaps of this sample are taken together: deflating all gaps would take as long as
# coding a reply.
_SAMPLED, _SAMPLE_RUN = 4096, 512


class WireError(ValueError):
    """Error: received bytes do not decode; its message has the found and the expected value."""


def encode_bitmap(indices: Int64, size: int) -> bytes:
    """Code positions as a bitmap: one bit for each of `size` entries, 1 at the positions."""
    bits = np.zeros(size, bool)
    bits[indices] = True
    return np.packbits(bits, bitorder="little").tobytes()


def decode_bitmap(data: memoryview, count: int, size: int) -> Int64:
    """Return the positions [count] that `encode_bitmap` coded."""
    if len(data) != -(-size // 8):
        raise WireError(f"block bitmap of {len(data)} bytes; {size} entries need {-(-size // 8)}")
    indices: Int64 = _bits_of(data).nonzero()[0]
    if indices.size != count:
        raise WireError(f"a block's bitmap has {indices.size} bits set for {count} values")
    return indices


def encode_best_rice(indices: Int64) -> tuple[int, bytes]:
    """Code positions in the shortest Rice code; return (number of low bits, coded bytes)."""
    gaps = _gaps(indices)
    low_bits = _best_rice(gaps, int(indices[-1]))[0]
    return low_bits, _unary(np.cumsum(gaps >> low_bits)) + _pack(gaps, low_bits)


def decode_rice(data: memoryview, count: int, size: int, low_bits: int) -> Int64:
    """Return the positions [count] that `encode_rice` coded."""
    indices, low = _high_and_low(data, count, size, low_bits)
    indices <<= low_bits
    indices += low.cumsum()
    indices += np.arange(count)
    return indices


def encode_deflated_gaps(indices: Int64, searches: bool = True) -> bytes:
    """Code positions as deflated bytes: one byte per gap, then the excess of gaps over 255.

    The excesses of gaps over 255 are stored byte plane by byte plane: first the lowest bytes of all
    excesses, last their highest bytes.

    Args:
        indices: [k] int64, ascending positions to code.
        searches: Whether deflate searches for repeated gaps, which clustered positions have.
            Without the search, deflate uses only the frequencies of bytes, in a fifth of the time.
    """
    return _deflate_gaps(_gaps(indices), searches)


def estimated_deflated_bytes(indices: Int64, searches: bool) -> int:
    """Estimate how many bytes `encode_deflated_gaps` returns; for many gaps, from a sample."""
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
        # With few different gaps, the search of deflate level 6 takes 14 times as long as the
        # search of level 1.
        crowded = gaps.sum() < 3 * gaps.size
        deflater = zlib.compressobj(1 if crowded else DEFLATE_LEVEL, wbits=-zlib.MAX_WBITS)
    else:
        deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return deflater.compress(heads.tobytes() + planes.tobytes()) + deflater.flush()


def inflated(data: memoryview, most_bytes: int, what: str) -> bytes:
    """Return the content of a deflated stream, of at most `most_bytes` bytes.

    Args:
        data: Received bytes of the stream.
        most_bytes: Largest legal number of bytes of the content.
        what: What a block has in the stream, for error messages.

    Raises:
        WireError: The stream does not inflate, is too long, or does not end with the data.
    """
    inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        # The limit accepts one byte more than the largest legal length. The additional byte shows a
        # longer stream, for example a decompression bomb, without unpacking it.
        plain = inflater.decompress(data, most_bytes + 1)
    except zlib.error as error:
        raise WireError(f"the deflated {what} of a block do not inflate: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise WireError(
            f"the stream of a block's {what} inflates to more than {most_bytes} bytes, or does not "
            "end with the data"
        )
    return plain


def decode_deflated_gaps(data: memoryview, count: int) -> Int64:
    """Return the positions [count] that `encode_deflated_gaps` coded."""
    plain = inflated(data, count * (1 + _ESCAPE_BYTES), "index gaps")
    heads = np.frombuffer(plain, np.uint8, min(count, len(plain)))
    escaped = (heads == _ESCAPE).nonzero()[0]
    if len(plain) != count + _ESCAPE_BYTES * escaped.size:
        raise WireError(
            f"deflated index gaps: {len(plain)} bytes for {count} positions, {escaped.size} escaped"
        )
    gaps = heads.astype(np.int64)
    if escaped.size:
        planes = np.frombuffer(plain, np.uint8, offset=count).reshape(_ESCAPE_BYTES, -1)
        gaps[escaped] += np.ascontiguousarray(planes.T).view("<u4").ravel()
    return gaps.cumsum() + np.arange(count)


def encode_uint32(indices: Int64) -> bytes:
    """Code positions as little-endian uint32; the positions must be below 2**32."""
    return indices.astype("<u4").tobytes()


def decode_uint32(data: memoryview, count: int) -> Int64:
    """Return the positions that `encode_uint32` coded; the caller must check their order."""
    if len(data) != 4 * count:
        raise WireError(f"a block has {len(data)} bytes of uint32 positions for {count} values")
    return np.frombuffer(data, "<u4").astype(np.int64)


def best_rice(indices: Int64) -> tuple[int, int]:
    """Return (number of low bits, number of bytes) of the shortest Rice code of positions.

    For geometrically distributed gaps the best number of low bits in a Rice code is log2(mean gap *
    ln 2). Clustered positions have a lower best number of low bits, so `best_rice` starts at
    log2(mean * ln 2), with the mean gap, and tries lower numbers while the number of bytes falls.
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
    # a copy is used, because np.diff takes several times as long on short arrays
    gaps = indices.copy()
    gaps[1:] -= indices[:-1]
    gaps[1:] -= 1
    return gaps


def _unary(high: Int64) -> bytes:
    """Code ascending numbers in unary: per number, one zero per unit of increase, then a one."""
    bits = np.zeros(int(high[-1]) + high.size, bool)
    bits[high + np.arange(high.size)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _high_and_low(data: memoryview, count: int, size: int, low_bits: int) -> tuple[Int64, Array]:
    """Decode the high and low parts of Rice-coded gaps; check the unary code of high parts."""
    if not 0 <= low_bits <= MAX_LOW_BITS:
        raise WireError(f"the index coding has {low_bits} low bits; expected 0 to {MAX_LOW_BITS}")
    unary_bytes = len(data) - -(-count * low_bits // 8)
    if not -(-count // 8) <= unary_bytes <= -(-(count + (size >> low_bits)) // 8):
        raise WireError(
            f"the {len(data)} index bytes of a block cannot hold {count} positions below {size} "
            f"with {low_bits} low bits"
        )
    ones = _bits_of(data[:unary_bytes]).nonzero()[0]
    if ones.size != count or ones[-1] // 8 != unary_bytes - 1:
        raise WireError(
            f"a unary index part has {ones.size} ones in {unary_bytes} bytes for {count} positions"
        )
    return ones - np.arange(count), _unpack(data[unary_bytes:], count, low_bits)


def _pack(numbers: Int64, low_bits: int) -> bytes:
    """Pack the lowest `low_bits` bits of each number into consecutive fields of bytes."""
    if not low_bits:
        return b""
    if low_bits <= 8 and numbers.size >= _MANY:
        return _pack_octets(numbers.astype(np.uint8), low_bits)
    width = 16 if low_bits <= 16 else 32
    fields = numbers.astype(f"<u{width // 8}").view(np.uint8)
    bits = np.unpackbits(fields, bitorder="little").reshape(-1, width)
    return np.packbits(bits[:, :low_bits], bitorder="little").tobytes()


def _pack_octets(numbers: UInt8, low_bits: int) -> bytes:
    """Pack b = `low_bits` <= 8 bits of each number; eight fields of b bits fill b bytes."""
    rows = np.zeros((-(-numbers.size // 8), 8), np.uint8)
    rows.reshape(-1)[: numbers.size] = numbers
    rows &= np.uint8((1 << low_bits) - 1)
    words = rows[:, 0].astype("<u8")
    for place in range(1, 8):
        words |= rows[:, place].astype("<u8") << np.uint64(place * low_bits)
    packed = words.view(np.uint8).reshape(-1, 8)[:, :low_bits].tobytes()
    return packed[: -(-numbers.size * low_bits // 8)]


def _unpack(data: memoryview, count: int, low_bits: int) -> Array:
    """Return the numbers that `_pack` packed into consecutive fields of bits."""
    if not low_bits:
        return np.zeros(count, np.int64)
    padded = np.zeros(len(data) + 3, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    # word i of `words` starts at byte i of the padded data
    words = np.ndarray((len(data),), "<u4", padded.data, strides=(1,))
    starts = np.arange(count) * low_bits
    fields = words.take(starts >> 3) >> (starts & 7).astype(np.uint32)
    return (fields & np.uint32((1 << low_bits) - 1)).astype(np.int64)


def _bits_of(data: memoryview) -> Bool:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(bool)
