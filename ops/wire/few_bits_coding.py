"""Values of few bits as bytes: the scales of each chunk, then the codes, packed or deflated.

Scales are the upper two bytes of their float32, little-endian, chunk by chunk. Codes are packed
from the lowest bit of each byte on, the last byte filled with zeros. Of many values that are not
equally frequent the packed bytes are deflated, by Huffman's code alone, to near their entropy.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.kernels.few_bits import edges_of, num_scales
from thinwire.ops.types import FEW_BITS, ChunkedValues
from thinwire.ops.wire.index_codings import WireError
from thinwire.ops.wire.value_codings import LEAST_VALUES, ValueCoding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32, Int64

_LARGEST_SCALE_BITS = 0x7F7F  # of a bfloat16: the largest finite one
_LARGEST_CHUNK = (1 << 32) - 1


def encode_codes(coded: ChunkedValues) -> tuple[ValueCoding, bytes]:
    """Return the values' bytes, and how they are coded."""
    scales = (coded.scales.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    packed = _pack(coded.data, FEW_BITS[coded.dtype])
    if coded.data.size >= LEAST_VALUES:
        deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 8, zlib.Z_HUFFMAN_ONLY)
        deflated = deflater.compress(packed) + deflater.flush()
        if len(deflated) < len(packed):
            return ValueCoding.DEFLATED_CODES, scales + deflated
    return ValueCoding.CODES, scales + packed


def checked_edges(
    indices: Int64 | None, size: int, chunk: int, first: int, num_bytes: int
) -> Int64:
    """Return where the values of each chunk begin, and their end, for a `ChunkedValues`.

    Args:
        indices: [k] positions of the values, checked; None: all of the block's.
        size: Entries of the block.
        chunk: Entries of a chunk.
        first: Place of the block's first entry in its chunk.
        num_bytes: Of the values: nothing is allocated that they cannot fill.

    Raises:
        WireError: There are no such chunks.
    """
    if not (0 < chunk <= _LARGEST_CHUNK and 0 <= first < chunk):
        raise WireError(f"place {first} in chunks of {chunk} entries; expected one below them")
    if indices is None and size and 2 * -(-(size + first) // chunk) > num_bytes:
        raise WireError(f"{num_bytes} bytes of values of {size} entries, in chunks of {chunk}")
    return edges_of(indices, size, chunk, first)


def decode_codes(
    data: memoryview, dtype: str, edges: Int64, coding: int
) -> tuple[NDArray[np.uint8], Float32]:
    """Check and decode the values of a block.

    Args:
        data: Scales and codes.
        dtype: One of FEW_BITS.
        edges: [c + 1], from `checked_edges`.
        coding: CODES or DEFLATED_CODES.

    Returns:
        Codes [k] uint8 and scales [c, m] float32, as a `ChunkedValues` has them.

    Raises:
        WireError: Anything does not fit.
    """
    count, bits = int(edges[-1]), FEW_BITS[dtype]
    shape = edges.size - 1, num_scales(dtype)
    scale_bytes, packed_bytes = 2 * shape[0] * shape[1], -(-count * bits // 8)
    if len(data) < scale_bytes:
        raise WireError(f"{len(data)} bytes of values; their {shape[0]} chunks need {scale_bytes}")
    upper = np.frombuffer(data, "<u2", shape[0] * shape[1])
    if upper.size and int(upper.max()) > _LARGEST_SCALE_BITS:
        raise WireError("a chunk's scale is negative or not finite")
    packed = data[scale_bytes:]
    if coding == ValueCoding.DEFLATED_CODES:
        packed = _inflated(packed, packed_bytes)
    if len(packed) != packed_bytes:
        raise WireError(f"{len(packed)} bytes of codes for {count} values of {bits} bits")
    scales = (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _unpack(packed, count, bits), scales.reshape(shape)


def _inflated(data: memoryview, num_bytes: int) -> memoryview:
    inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        plain = inflater.decompress(data, num_bytes + 1)  # a longer one shows
    except zlib.error as error:
        raise WireError(f"deflated codes do not inflate: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise WireError(f"deflated codes: more than {num_bytes} bytes, or something behind")
    return memoryview(plain)


def _pack(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Pack the lowest bits of each code."""
    if bits == 1:
        return np.packbits(codes, bitorder="little").tobytes()
    per_byte = 8 // bits
    padded = np.zeros(-(-codes.size // per_byte) * per_byte, np.uint8)
    padded[: codes.size] = codes
    columns = padded.reshape(-1, per_byte)
    packed = columns[:, 0].copy()
    for place in range(1, per_byte):
        packed |= columns[:, place] << np.uint8(place * bits)
    return packed.tobytes()


def _unpack(packed: memoryview, count: int, bits: int) -> NDArray[np.uint8]:
    """Invert `_pack`."""
    octets = np.frombuffer(packed, np.uint8)
    if bits == 1:
        codes = np.unpackbits(octets, bitorder="little")
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = ((octets[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)
    if codes[count:].any():
        raise WireError(f"the last byte of {count} codes of {bits} bits is not filled with zeros")
    return codes[:count]
