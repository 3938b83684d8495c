"""Blocks with only some ranges present, on the wire."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.types import CodedValues, RangedBlock
from thinwire.ops.wire import blocks as wire_blocks
from thinwire.ops.wire.blocks import IndexChooser, IndexCoding, decode_block
from thinwire.ops.wire.index_codings import WireError


def make(size, block_entries, present, slot=0):
    """Return a block in which each value equals its position."""
    present = np.array(present, bool)
    there = np.repeat(present, wire_blocks.lengths(size, block_entries))
    values = np.arange(size, dtype=np.float32)[there]
    return RangedBlock(slot, size, None, CodedValues("float32", values), block_entries, present)


def decode(coded, size, head=None):
    return decode_block(
        coded.slot,
        coded.count,
        int(coded.coding),
        coded.coding_parameter,
        memoryview(coded.index_bytes if head is None else head),
        coded.value_dtype,
        coded.scale,
        coded.value_bytes,
        size,
    )


def test_bytes_of_one_block_are_these():
    coded = IndexChooser().encode(make(10, 4, [True, False, True]))
    assert coded.coding is IndexCoding.RANGES
    assert coded.index_bytes == b"\x04\x00\x00\x00\x05"
    assert np.frombuffer(coded.value_bytes, "<f4").tolist() == [0, 1, 2, 3, 8, 9]


@given(st.integers(0, 70), st.integers(1, 9), st.randoms(use_true_random=False))
def test_what_is_coded_comes_back(size, block_entries, random):
    present = [random.random() < 0.5 for _ in range(wire_blocks.num_ranges(size, block_entries))]
    block = make(size, block_entries, present, slot=3)
    back = decode(IndexChooser().encode(block), size)
    assert isinstance(back, RangedBlock)
    assert (back.slot, back.size, back.block_entries) == (3, size, block_entries)
    assert back.present.tolist() == present
    whole = np.full(size, -1.0, np.float32)
    there = np.repeat(back.present, wire_blocks.lengths(back.size, back.block_entries))
    whole[there] = back.values.data
    there = np.repeat(np.array(present, bool), wire_blocks.lengths(size, block_entries))
    np.testing.assert_array_equal(whole, np.where(there, np.arange(size), -1.0))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"\x04\x00\x00", "3 bytes"),
        (b"\x00\x00\x00\x00\x05", "no entries"),
        (b"\x04\x00\x00\x00", "bitmap of 0 bytes"),
        (b"\x04\x00\x00\x00\x05\x00", "bitmap of 2 bytes"),
        (b"\x04\x00\x00\x00\x0d", "beyond"),
        (b"\x04\x00\x00\x00\x03", "in ranges of 8"),
    ],
)
def test_what_does_not_fit_is_refused(head, why):
    coded = IndexChooser().encode(make(10, 4, [True, False, True]))
    with pytest.raises(WireError, match=why):
        decode(coded, 10, head)
