"""Few-bit values on the wire: codes survive, and hostile bytes raise WireError."""

import math
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ops.wire.test_value_codings import decode as decode_plain
from thinwire.ops.kernels import few_bits
from thinwire.ops.types import FEW_BITS, Block, ChunkedValues
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.ops.wire.index_codings import WireError
from thinwire.ops.wire.value_codings import ValueCoding
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed

#: Three values of two chunks of 4 entries in each dtype, never changed.
GOLDEN = {
    "int4": "40404040" + "f207",
    "int2": "40404040" + "1c",
    "means2": "803f4040" + "40404040" + "0c",
    "sign": "00404040" + "02",
}


def block_of(values, indices, dtype, chunk, size, first=0):
    edges = few_bits.edges_of(indices, size, chunk, first)
    codes, scales = few_bits.quantise_chunks(values, edges, dtype)
    chunked = ChunkedValues(dtype, codes, scales=scales, edges=edges, chunk=chunk, first=first)
    return Block(3, size, indices, chunked)


def decode(coded, size, **changes):
    chunked = {"chunk": coded.chunk, "chunk_first": coded.chunk_first}
    return decode_plain(coded, size, **chunked | changes)


def largest_of_chunks(num_chunks, dtype, k=64, chunk=4096, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(num_chunks * chunk).astype(np.float32)
    from thinwire.ops.kernels.numpy_chunks import chunk_top_k

    indices, chosen = chunk_top_k(values, k, chunk)
    return block_of(chosen, indices, dtype, chunk, values.size)


def same(one, other):
    assert one.dtype == other.dtype and one.scale == other.scale
    assert (one.chunk, one.first) == (other.chunk, other.first)
    for name in ("data", "scales", "edges"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("dtype", FEW_BITS)
@example(size=0, chunk=2, first=1, share=None, seed=0)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 90),
    chunk=st.integers(1, 30),
    first=st.integers(0, 29),
    share=st.sampled_from([None, 0.1, 0.6]),
    seed=st.integers(0, 99),
)
def test_round_trip(dtype, size, chunk, first, share, seed):
    rng = np.random.default_rng(seed)
    indices = None if share is None else np.flatnonzero(rng.random(size) < share)
    values = rng.standard_normal(size if indices is None else indices.size).astype(np.float32)
    block = block_of(values, indices, dtype, chunk, size, first % chunk)
    coded = IndexChooser().encode(block)
    found = decode(coded, size)
    same(found.values, block.values)
    if indices is not None and indices.size < size:
        np.testing.assert_array_equal(found.indices, indices)


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_bytes_of_three_values(dtype):
    block = block_of(np.float32([1, -3, 3]), np.array([0, 2, 6]), dtype, 4, 8)
    coded = IndexChooser().encode(block)
    assert (coded.value_coding, coded.chunk) == (ValueCoding.CODES, 4)
    assert coded.value_bytes.hex() == GOLDEN[dtype]


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_many_values_travel_near_their_entropy(dtype):
    block = largest_of_chunks(200, dtype)
    coded = IndexChooser().encode(block)
    same(decode(coded, block.size).values, block.values)
    counts = np.bincount(block.values.data) / block.values.data.size
    entropy = -sum(share * math.log2(share) for share in counts if share) * block.values.data.size
    scale_bytes = 2 * block.values.scales.size
    deflated = coded.value_coding is ValueCoding.DEFLATED_CODES
    assert deflated is (dtype not in ("sign", "means2"))
    codes_bytes = len(coded.value_bytes) - scale_bytes
    assert codes_bytes <= min(entropy / 8 * 1.03 + 120, 8 * FEW_BITS[dtype] * 200)


@pytest.mark.parametrize(("dtype", "times"), [("int2", 208), ("means2", 203), ("sign", 230)])
def test_a_push_of_64_of_4096_is_as_small_as_computed(dtype, times):
    """2 bits and 7.4 of position a value, and a scale: 1/208 of float32."""
    block = largest_of_chunks(200, dtype)
    coded = IndexChooser().encode(block)
    message = pb.Push()
    pieces = messages.blocks_to_message([coded], message.blocks)
    num_bytes = sum(map(len, pieces)) + message.ByteSize()
    assert 4 * block.size / num_bytes > times


def test_damage_is_named():
    plain = block_of(np.float32([1, -3, 3]), np.array([0, 2, 6]), "int2", 4, 8)
    small = IndexChooser().encode(plain)
    dense = IndexChooser().encode(block_of(np.ones(8, np.float32), None, "int2", 4, 8))
    raw = small.value_bytes
    bomb = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    bomb = bomb.compress(bytes(10**8)) + bomb.flush()
    for changes, message in (
        ({"chunk": 0}, "chunks of 0"),
        ({"chunk": 1 << 32}, "chunks of"),
        ({"chunk": 4, "chunk_first": 4}, "entry 4 in chunks of 4"),
        ({"value_coding": 0}, "value coding 0"),
        ({"value_coding": 1}, "value coding 1"),
        ({"value_coding": 4}, "value coding 4"),
        ({"coding": 6}, "index coding 6"),
        ({"coding": 7}, "index coding 7"),
        ({"value_dtype": "sign"}, "codes of 1 bits is not filled"),
        ({"value_dtype": "int8", "value_coding": 0, "value_bytes": b"abc"}, "in chunks of 4"),
        ({"chunk": 1}, "3 chunks need 6"),
        ({"count": 9}, "9 values of int2 for 8"),
        ({"count": 1 << 63, "coding": 3}, "values of int2 for 8"),
        ({"count": -1}, "-1 values"),
        ({"scale": math.nan}, "scale.* nan"),
        ({"scale": -1.0}, "scale.* -1"),
        ({"value_bytes": raw[:-1]}, "0 bytes of codes .* 3 values"),
        ({"value_bytes": raw + b"\0"}, "2 bytes of codes"),
        ({"value_bytes": raw[:1]}, "2 chunks need 4"),
        ({"value_bytes": b"\xff\xff" + raw[2:]}, "negative or not finite"),
        ({"value_bytes": b"\x80\x7f" + raw[2:]}, "negative or not finite"),
        ({"value_bytes": raw[:-1] + b"\xff"}, "not filled with zeros"),
        ({"value_coding": 3, "value_bytes": raw[:4] + b"\xff\xff"}, "do not inflate"),
        ({"value_coding": 3, "value_bytes": raw[:4]}, "more than 1 bytes"),
        ({"value_coding": 3, "value_bytes": raw[:4] + bomb}, "more than 1 bytes"),
    ):
        arguments = dict(changes)
        if "value_bytes" in arguments:
            arguments["value_bytes"] = memoryview(arguments["value_bytes"])
        with pytest.raises(WireError, match=message):
            decode(small, 8, **arguments)
    with pytest.raises(WireError, match="in chunks of 1"):
        decode(dense, 8, chunk=1)


def test_the_largest_finite_scale_is_decoded():
    coded = IndexChooser().encode(
        block_of(np.float32([1, -3, 3]), np.array([0, 2, 6]), "int2", 4, 8)
    )
    largest = b"\x7f\x7f"  # of a bfloat16
    found = decode(coded, 8, value_bytes=memoryview(largest + coded.value_bytes[2:]))
    assert found.values.scales[0] == np.float32(2.0**127 * (2 - 2**-7))


def test_a_large_claim_allocates_nothing():
    size = 1 << 30
    tracemalloc.start()
    for chunk in (1, 4096):
        with pytest.raises(WireError):
            decode(
                IndexChooser().encode(block_of(np.ones(1, np.float32), None, "sign", 1, 1)),
                size,
                count=size,
                chunk=chunk,
            )
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_messages_refuse_plain_values_of_few_bits():
    block = pb.Block(slot=0, count=2, value_dtype=pb.VALUE_DTYPE_INT2)
    with pytest.raises(Malformed, match="plain int2 values"):
        messages.blocks_from_message([block], memoryview(b""), [2])
