"""Fuzz targets: a shard decodes positions and values of a block in every coding."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np

from tests.fuzz.target import Reader, Target, joined
from thinwire.ops.kernels.few_bits import edges_of, quantise_chunks
from thinwire.ops.kernels.numpy_ops import dequantise
from thinwire.ops.types import FEW_BITS, ChunkedValues, LowRankBlock, RangedBlock
from thinwire.ops.wire import few_bits_coding, index_codings, value_codings
from thinwire.ops.wire.blocks import IndexChooser, decode_block
from thinwire.ops.wire.index_codings import WireError

#: Entries of a block's slot; the last slot is far larger than any block sent.
SIZES = (0, 1, 7, 28, 255, 5000, 1 << 24)
DTYPES = ("float32", "bfloat16", "float16", "int8")


def block(data: bytes) -> None:
    """Decode one block; what decodes is coded again and must be the same."""
    source = Reader(data)
    size, dtype = source.choice(SIZES), source.choice(DTYPES)
    coding, count = source.number() % 10, source.interesting()
    parameter, value_coding = source.interesting() % 2**32, source.number() % 3
    scale, index = source.choice((1.0, 0.0, 0.5, 3e38, -1.0, float("nan"))), source.piece()
    values = source.rest()
    with contextlib.suppress(WireError):
        found = decode_block(
            0,
            count,
            coding,
            parameter,
            memoryview(index),
            dtype,
            scale,
            memoryview(values),
            size,
            value_coding,
        )
        assert found.size == size and found.values.data.size <= max(size, 1)
        if isinstance(found, LowRankBlock | RangedBlock):
            return
        if found.indices is not None and found.indices.size:
            assert found.indices[0] >= 0 and found.indices[-1] < size
            assert (np.diff(found.indices) > 0).all()
        _code_again(found)


def _code_again(found: Any) -> None:
    coded = IndexChooser().encode(found)
    again = decode_block(
        0,
        coded.count,
        coded.coding,
        coded.coding_parameter,
        memoryview(coded.index_bytes),
        coded.value_dtype,
        coded.scale,
        memoryview(coded.value_bytes),
        found.size,
        coded.value_coding,
    )
    assert again.values.data.tobytes() == found.values.data.tobytes()
    full = found.indices is None or found.indices.size == found.size
    assert full or (again.indices == found.indices).all()


def _block_seeds() -> list[bytes]:
    indices = np.array([1, 5, 6, 20], np.int64)
    low, rice = index_codings.encode_best_rice(indices)
    coded = {
        1: index_codings.encode_bitmap(indices, 28),
        2: rice,
        3: index_codings.encode_deflated_gaps(indices),
        4: index_codings.encode_uint32(indices),
        7: b"\4\0\0\0\x11",
    }
    low_bits = {2: low}
    seeds = [bytes([3, 0, 0, 28, 0, 0, 0, 0, 0]) + np.ones(28, "<f4").tobytes()]
    for dtype, (coding, index) in itertools.product(range(4), coded.items()):
        head = bytes([3, dtype, coding, 4, low_bits.get(coding, 0), 0, 0])
        seeds.append(head + joined([index]) + bytes(4 * (4, 2, 2, 1)[dtype]))
    exponents = value_codings.encode_exponents(np.float32([1, -2, 3, 4]))
    seeds.append(bytes([3, 0, 4, 4, 0, 1, 0]) + joined([coded[4]]) + exponents)
    factors = b"\0\0\0\0\7\0\0\0\0\0\x80\x3f"
    seeds.append(bytes([3, 0, 6, 11, 1, 0, 0]) + joined([factors]) + bytes(44))
    return seeds


def positions(data: bytes) -> None:
    """Encode positions in every coding; each must decode to the same positions."""
    source = Reader(data)
    gaps = np.frombuffer(source.rest()[: 2 * (len(data) // 2)].ljust(2, b"\0"), "<u2")
    gaps = gaps[: gaps.size].astype(np.int64)
    scale = 1 << (int(gaps[0]) % 17)
    indices = np.cumsum(gaps * scale + 1) - 1
    size, count = int(indices[-1]) + 1 + int(gaps[-1]), indices.size
    pairs: list[tuple[bytes, Any]] = [
        (index_codings.encode_uint32(indices), index_codings.decode_uint32),
        (index_codings.encode_deflated_gaps(indices), index_codings.decode_deflated_gaps),
    ]
    if size > 1 << 32:
        pairs = []
    for coded, decode in pairs:
        np.testing.assert_array_equal(decode(memoryview(coded), count), indices)
    low, expected = index_codings.best_rice(indices)
    if expected <= 1 << 20:
        low_bits, coded = index_codings.encode_best_rice(indices)
        assert (low_bits, len(coded)) == (low, expected)
        found = index_codings.decode_rice(memoryview(coded), count, size, low)
        np.testing.assert_array_equal(found, indices)
    if size < 1 << 20:
        coded = index_codings.encode_bitmap(indices, size)
        found = index_codings.decode_bitmap(memoryview(coded), count, size)
        np.testing.assert_array_equal(found, indices)


def exponents(data: bytes) -> None:
    """Decode deflated exponents of any description."""
    source = Reader(data)
    width, count, exact = source.choice((2, 4, 1, 3, 8)), source.interesting(), source.number() % 2
    coded = source.rest()
    with contextlib.suppress(WireError):
        plain = value_codings.decode_exponents(memoryview(coded), count, width)
        assert len(plain) == count * width
    if exact and len(coded) >= 4:
        values = np.frombuffer(coded[: len(coded) // 4 * 4], "<f4")
        again = value_codings.encode_exponents(values)
        plain = value_codings.decode_exponents(memoryview(again), values.size, 4)
        assert bytes(plain) == values.tobytes()


def codes(data: bytes) -> None:
    """Decode values of few bits; what decodes is coded again and must be the same."""
    source = Reader(data)
    size, dtype = source.choice(SIZES), source.choice(tuple(FEW_BITS))
    coding, value_coding = source.number() % 8, source.number() % 5
    count, chunk, first = (source.interesting() for _ in range(3))
    parameter, index, values = source.number() % 4, source.piece(), source.rest()
    with contextlib.suppress(WireError):
        found = decode_block(
            *(0, count, coding, parameter, memoryview(index), dtype, 1.0),
            *(memoryview(values), size, value_coding, chunk, first),
        )
        decoded = dequantise(found.values)
        assert decoded.size == count and np.isfinite(decoded).all()
        again = IndexChooser().encode(found)
        assert (again.chunk, again.chunk_first) == (chunk, first)
        back = decode_block(
            *(0, count, again.coding, again.coding_parameter, memoryview(again.index_bytes)),
            *(dtype, again.scale, memoryview(again.value_bytes), size, again.value_coding),
            *(chunk, first),
        )
        assert dequantise(back.values).tobytes() == decoded.tobytes()


def _code_seeds() -> list[bytes]:
    found = []
    for number, dtype in enumerate(FEW_BITS):
        for indices in (None, np.array([1, 5, 6, 20], np.int64)):
            values = np.arange(-2, 26 if indices is None else 2).astype(np.float32)
            edges = edges_of(indices, 28, 7, 2)
            coded, scales = quantise_chunks(values, edges, dtype)
            chunked = ChunkedValues(dtype, coded, scales=scales, edges=edges, chunk=7, first=2)
            index = b"" if indices is None else index_codings.encode_uint32(indices)
            _, plain = few_bits_coding.encode_codes(chunked)
            head = bytes([3, number, 0 if indices is None else 4, 2, values.size, 7, 2, 0])
            found.append(head + joined([index]) + plain)
    return found


def _exponent_seeds() -> list[bytes]:
    values = np.float32([1, -2, 3, 4])
    coded = value_codings.encode_exponents(values)
    half = value_codings.encode_exponents(values.astype(np.float16))
    return [b"\1\4\0" + coded, b"\0\4\0" + half, b"\1\4\1" + values.tobytes()]


TARGETS = {
    "block": Target("coded blocks: positions and values", block, _block_seeds),
    "positions": Target(
        "positions through every coding", positions, lambda: [b"\1\0\2\0\xff\xff", bytes(40)]
    ),
    "codes": Target("values of few bits, and the scales of their chunks", codes, _code_seeds),
    "exponents": Target("deflated exponents", exponents, _exponent_seeds),
}
