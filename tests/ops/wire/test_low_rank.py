"""Blocks of factors keep their bits over shards and wire; invalid ones are rejected."""

import itertools
import math
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.drivers import BODIES
from thinwire.ops.kernels import numpy_ops as bodies
from thinwire.ops.kernels.numpy_ops import quantise
from thinwire.ops.sharding.split import split_packet
from thinwire.ops.types import (
    VALUE_DTYPES,
    CodedValues,
    Kind,
    LowRankBlock,
    Packet,
    ShardLayout,
    Slice,
)
from thinwire.ops.wire import low_rank
from thinwire.ops.wire.blocks import IndexChooser, decode_block
from thinwire.ops.wire.index_codings import WireError
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder


def block_of(rows, columns, rank, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    left, right = (rng.standard_normal(side * rank, np.float32) for side in (rows, columns))
    coded = quantise(left, dtype), quantise(right * 100, dtype)
    return LowRankBlock(0, rows * columns, None, *coded, rank, 0)


def entries(block):
    return low_rank.expanded(block).values.data


def sent(block):
    """Return the decoded block."""
    coded = IndexChooser().encode(block)
    return decode_block(
        coded.slot,
        coded.count,
        int(coded.coding),
        coded.coding_parameter,
        memoryview(coded.index_bytes),
        coded.value_dtype,
        coded.scale,
        memoryview(bytes(coded.value_bytes)),
        block.size,
    )


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_entries_are_those_of_the_product(dtype):
    block = block_of(700, 90, 3, dtype)  # several tiles
    left = BODIES.dequantise(block.values).reshape(700, 3).astype(float)
    right = BODIES.dequantise(block.right).reshape(90, 3).astype(float)
    expected = (left @ right.T).ravel()
    np.testing.assert_allclose(entries(block), expected, atol=1e-5 * np.abs(expected).max())
    whole = low_rank.expanded(block)
    assert low_rank.expanded(whole) is whole


def test_full_rank_reproduces_a_matrix():
    matrix = np.random.default_rng(0).standard_normal((40, 12), np.float32)
    left, right = bodies.power_step(matrix, np.eye(12, dtype=np.float32))
    np.testing.assert_allclose(bodies.entries(left, right, 0, 480), matrix.ravel(), atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    rank=st.integers(1, 4),
    dtype=st.sampled_from(VALUE_DTYPES),
    edges=st.sets(st.integers(1, 1599)),
)
def test_slices_and_the_wire_change_no_bit(rows, columns, rank, dtype, edges):
    block = block_of(rows, columns, rank, dtype)
    borders = [0, *sorted(edge for edge in edges if edge < block.size), block.size]
    pieces = [Slice(0, *pair) for pair in itertools.pairwise(borders)]
    layouts = tuple(ShardLayout((piece,)) for piece in pieces)
    parts = [part for (part,) in split_packet(Packet((block,), Kind.GRADIENT), layouts)]
    for part, piece in zip(parts, pieces, strict=True):
        num_rows = -(-piece.stop // columns) - piece.start // columns
        assert part.size == piece.size
        assert isinstance(part, LowRankBlock) == (rank * (num_rows + columns) < piece.size)
    arrived = [sent(part) for part in parts]
    assert all(part.indices is None and part.values.dtype == "float32" for part in arrived)
    together = np.concatenate([part.values.data for part in arrived])
    np.testing.assert_array_equal(together, entries(block))


def test_golden_bytes():
    """Never change: old bytes must decode for ever."""
    about, values = "01000000" + "02000000" + "0000803f", "003c00400042" + "003800bc"
    left = CodedValues("float16", np.float16([1, 2, 3]), 2.0)
    right = CodedValues("float16", np.float16([0.5, -1]))
    coded = IndexChooser().encode(LowRankBlock(4, 5, None, left, right, rank=1, first=1))
    assert (coded.coding, coded.coding_parameter, coded.count, coded.scale) == (6, 1, 5, 2.0)
    assert (coded.index_bytes.hex(), coded.value_bytes.hex()) == (about, values)
    decoded = decode_block(
        4,
        5,
        6,
        1,
        memoryview(bytes.fromhex(about)),
        "float16",
        2.0,
        memoryview(bytes.fromhex(values)),
        5,
    )
    np.testing.assert_array_equal(decoded.values.data, np.float32([-2, 2, -4, 3, -6]))


GOOD = {"count": 7, "rank": 1, "size": 11, "scale": 1.0}  # three rows, the first without an entry
GOOD |= {"first": 1, "columns": 4, "right_scale": 2.0}


def decode(**changes):
    given = GOOD | changes
    about = struct.pack("<IIf", given["first"], given["columns"], given["right_scale"])
    values = memoryview(bytes(range(1, given["count"] + 1)))
    about = memoryview(given.get("about", about))
    return decode_block(
        0, given["count"], 6, given["rank"], about, "int8", given["scale"], values, given["size"]
    )


def test_what_is_right_is_decoded():
    expected = np.outer([1, 2, 3], [8, 10, 12, 14]).ravel()[1:]
    np.testing.assert_array_equal(decode().values.data, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank 0"),
        ({"rank": 2}, "7 values of rank 2 for 3 rows and 4 columns"),
        ({"rank": 2**32 - 1}, "rank 4294967295"),
        ({"count": 6}, "6 values of rank 1"),
        ({"count": 12}, "12 values of int8 in 12 bytes for 11 entries"),
        ({"count": 0}, "0 values"),
        ({"columns": 0, "first": 0}, "column 0 of 0"),
        ({"columns": 2**32 - 1}, "1 rows and 4294967295 columns"),
        ({"first": 4}, "column 4 of 4"),
        ({"first": 2**32 - 1}, "of 4"),
        ({"size": 12}, "for 4 rows"),
        ({"size": 0, "count": 0}, "0 values"),
        ({"right_scale": 0.0}, "right factor's scale 0.0"),
        ({"right_scale": math.nan}, "scale.* nan"),
        ({"right_scale": math.inf}, "scale.* inf"),
        ({"scale": math.inf}, "scale.* inf"),
        ({"about": b""}, "header.* has 0 bytes"),
        ({"about": bytes(13)}, "header.* has 13 bytes"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(WireError, match=message):
        decode(**changes)


@settings(max_examples=300, deadline=None)
@given(
    rank=st.integers(0, 2**32 - 1) | st.integers(0, 9),
    columns=st.integers(0, 2**32 - 1) | st.integers(0, 60),
    first=st.integers(0, 2**32 - 1) | st.integers(0, 60),
    count=st.integers(0, 400),
    size=st.integers(1, 2000) | st.integers(1, 1 << 40),
)
def test_claims_are_refused_or_cost_no_more_than_the_slot(rank, columns, first, count, size):
    payload = memoryview(bytes(count))
    about = memoryview(struct.pack("<IIf", first, columns, 1.0))
    tracemalloc.start()
    try:
        block = decode_block(0, count, 6, rank, about, "int8", 1.0, payload, size)
        assert block.size == block.values.data.size == size
        assert size <= 2000
    except WireError:
        pass
    finally:
        assert tracemalloc.get_traced_memory()[1] < 16 * 2000 + (1 << 18)
        tracemalloc.stop()


def pushed(*blocks):
    push = pb.Push(step=1, samples=1, local_steps=1)
    pieces = messages.blocks_to_message(
        [IndexChooser().encode(each) for each in blocks], push.blocks
    )
    return push, memoryview(b"".join(bytes(piece) for piece in pieces))


def test_a_shard_takes_factors_for_what_they_stand_for():
    """The payload is as long as the whole shard in float32: it must not be taken for that."""
    block = block_of(3, 3, 1)
    push, payload = pushed(block)
    assert len(payload) == 4 * block.size
    decoder = PushDecoder(ShardLayout((Slice(0, 0, 9),)), Kind.GRADIENT, BODIES)
    update = decoder.decode(1, push, payload).update
    assert update.indices is None
    np.testing.assert_array_equal(update.values, entries(block))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_factors_that_are_not_finite_are_refused(bad):
    block = block_of(9, 5, 2)
    for data in (block.values.data, block.right.data):
        kept, data[3] = data[3], bad
        decoder = PushDecoder(ShardLayout((Slice(0, 0, 45),)), Kind.GRADIENT, BODIES)
        with pytest.raises(NonFinite):
            decoder.decode(1, *pushed(block))
        data[3] = kept


def test_a_spoilt_block_is_malformed():
    push, payload = pushed(block_of(9, 5, 2))
    for name, value in (("coding_parameter", 0), ("coding_parameter", 3), ("index_bytes", 11)):
        spoilt = pb.Push()
        spoilt.CopyFrom(push)
        setattr(spoilt.blocks[0], name, value)
        with pytest.raises(Malformed):
            messages.blocks_from_message(spoilt.blocks, payload, [45])
