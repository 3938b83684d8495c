"""Coding of few-bit values as bytes: the scales of each chunk, then the codes of the values.

Each scale of few-bit values is sent as the upper two bytes of a float32, little-endian, in order of
the chunks. Codes of few-bit values are packed from the lowest bit of each byte on; zeros fill the
last byte. If a block has many few-bit codes, and some codes are more frequent than others, the
packed bytes are deflated with a Huffman code alone, to near their entropy.
"""

from __future__ import annotations

import zlib

import numpy as np

from thinwire.ops.kernels.few_bits import edges_of, num_scales
from thinwire.ops.types import FEW_BITS, ChunkedValues, Float32, Int64, UInt8
from thinwire.ops.wire.index_codings import WireError, inflated
from thinwire.ops.wire.value_codings import LEAST_VALUES, ValueCoding

# largest legal scale of few-bit values: the bits of the largest finite bfloat16
_LARGEST_SCALE_BITS = 0x7F7F
_LARGEST_CHUNK = (1 << 32) - 1


def encode_codes(coded: ChunkedValues) -> tuple[ValueCoding, bytes]:
    """Code few-bit values as bytes with the shorter of the codings CODES and DEFLATED_CODES."""
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
    """Return the edges of a `ChunkedValues`: each chunk's first value, then the number of values.

    Args:
        indices: [k] int64, checked positions of the values; None: the block has all entries.
        size: Number of entries in the block's slot (tensor or variable slice).
        chunk: Number of entries in a chunk (a range of entries that share scales).
        first: Position of the block's first entry in that entry's chunk.
        num_bytes: Number of received bytes of values, which limits the allocated memory.

    Raises:
        WireError: `first` is not a position in a chunk, or the chunks need more bytes than were
            received.
    """
    if not (0 < chunk <= _LARGEST_CHUNK and 0 <= first < chunk):
        raise WireError(
            f"a block begins at entry {first} in chunks of {chunk} entries; expected a lower entry"
        )
    # A dense block gets one edge per chunk. Each chunk has at least one scale of two bytes, so a
    # size with more chunks than the received bytes can hold is rejected before the allocation.
    if indices is None and size and 2 * -(-(size + first) // chunk) > num_bytes:
        raise WireError(f"{num_bytes} bytes are too few for {size} values in chunks of {chunk}")
    return edges_of(indices, size, chunk, first)


def decode_codes(data: memoryview, dtype: str, edges: Int64, coding: int) -> tuple[UInt8, Float32]:
    """Check and decode the few-bit values of a block.

    Args:
        data: Received bytes: the scales of all chunks, then the codes of all values.
        dtype: Few-bit dtype of the values, for example int4 or sign (FEW_BITS).
        edges: [c + 1] int64, edges of the c chunks from `checked_edges`.
        coding: Value coding of the received bytes, CODES or DEFLATED_CODES.

    Returns:
        Codes [k] uint8 and scales [c, m] float32, as in a `ChunkedValues`.

    Raises:
        WireError: `data` has too few or too many bytes for the values, or does not decode.
    """
    count, bits = int(edges[-1]), FEW_BITS[dtype]
    shape = edges.size - 1, num_scales(dtype)
    scale_bytes, packed_bytes = 2 * shape[0] * shape[1], -(-count * bits // 8)
    if len(data) < scale_bytes:
        raise WireError(
            f"a block has {len(data)} bytes; the scales of {shape[0]} chunks need {scale_bytes}"
        )
    upper = np.frombuffer(data, "<u2", shape[0] * shape[1])
    if upper.size and int(upper.max()) > _LARGEST_SCALE_BITS:
        raise WireError("the scale factor of a block's chunk is negative or not finite")
    packed = data[scale_bytes:]
    if coding == ValueCoding.DEFLATED_CODES:
        packed = memoryview(inflated(packed, packed_bytes, "codes"))
    if len(packed) != packed_bytes:
        raise WireError(f"{len(packed)} bytes of codes do not match {count} values of {bits} bits")
    scales = (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _unpack(packed, count, bits), scales.reshape(shape)


def _pack(codes: UInt8, bits: int) -> bytes:
    """Pack the lowest `bits` bits of each code into bytes, from the lowest bit of a byte on."""
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


def _unpack(packed: memoryview, count: int, bits: int) -> UInt8:
    """Return the few-bit codes [count] that `_pack` packed."""
    octets = np.frombuffer(packed, np.uint8)
    if bits == 1:
        codes = np.unpackbits(octets, bitorder="little")
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = ((octets[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)
    if codes[count:].any():
        raise WireError(f"the last byte of {count} codes of {bits} bits is not filled with zeros")
    return codes[:count]
