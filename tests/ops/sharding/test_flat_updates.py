"""Blocks over several slices equal the blocks of each slice, for every receiver."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.kernels.numpy_ops import KERNELS
from thinwire.ops.sharding import flat_updates
from thinwire.ops.sharding.flat_updates import SlicesInModel, blocks_of, flatten, joined
from thinwire.ops.types import Block, CodedValues, ModelSpec, ShardLayout, Slice, TensorSpec, Update
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def coded(values, dtype="float32", scale=1.0):
    return CodedValues(dtype, np.asarray(values, "<f4" if dtype == "float32" else "|i1"), scale)


@st.composite
def shards(draw):
    """Return the sizes of a model's tensors, and the layout of a shard that has some of them."""
    sizes = draw(SIZES)
    numbers = draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    return sizes, ShardLayout(tuple(Slice(n, 0, sizes[n]) for n in sorted(numbers)))


@st.composite
def sent(draw):
    """Return a case of `shards`, and blocks of the shard: sparse, dense or left out."""
    sizes, layout = draw(shards())
    blocks = []
    for slot, piece in enumerate(layout.slices):
        kind = draw(st.sampled_from(["none", "sparse", "sparse", "dense", "int8"]))
        some = draw(st.sets(st.integers(0, piece.size - 1), min_size=1)) if piece.size else ()
        at = np.array(sorted(some), np.int64)
        values = np.arange(1, at.size + 1) + 100 * slot
        if kind == "sparse" and at.size:
            blocks.append(Block(slot, piece.size, at, coded(values)))
        elif kind == "int8" and at.size:
            blocks.append(Block(slot, piece.size, at, coded(values % 100, "int8", 0.5 + slot)))
        elif kind == "dense" and piece.size:
            blocks.append(Block(slot, piece.size, None, coded(np.full(piece.size, 7 + slot))))
    return sizes, layout, blocks


def dense(update, size):
    """Return an update as [size] float32."""
    result = np.zeros(size, np.float32)
    result[slice(None) if update.indices is None else update.indices] = update.values
    return result


@given(sent())
def test_joined_blocks_are_the_same_update_and_change_the_same_of_the_model(case):
    sizes, layout, blocks = case
    together = joined(blocks, layout)
    assert len(together) <= len(blocks)
    one, other = flatten(blocks, layout, KERNELS), flatten(together, layout, KERNELS)
    np.testing.assert_array_equal(dense(one, layout.size), dense(other, layout.size))
    expected, offsets = np.zeros(sum(sizes)), np.cumsum([0, *sizes]).tolist()
    spec = ModelSpec(tuple(TensorSpec(str(n), (size,)) for n, size in enumerate(sizes)))
    for block in blocks:
        start = offsets[layout.slices[block.slot].tensor]
        at = slice(None) if block.indices is None else block.indices
        expected[start : start + block.size][at] = KERNELS.dequantise(block.values)
    found = np.zeros(sum(sizes))
    for place, block in SlicesInModel(spec, layout).places(together):
        assert place.stop - place.start == block.size
        at = slice(None) if block.indices is None else block.indices
        found[place][at] += KERNELS.dequantise(block.values)
    np.testing.assert_array_equal(found, expected)


@given(sent())
def test_joined_blocks_survive_a_message(case):
    _, layout, blocks = case
    push, chooser, slots = pb.Push(), IndexChooser(), [piece.size for piece in layout.slices]
    pieces = messages.blocks_to_message(map(chooser.encode, joined(blocks, layout)), push.blocks)
    found = messages.blocks_from_message(push.blocks, memoryview(b"".join(pieces)), slots)
    one, other = flatten(blocks, layout, KERNELS), flatten(found, layout, KERNELS)
    np.testing.assert_array_equal(dense(one, layout.size), dense(other, layout.size))


@given(shards(), st.data())
def test_an_update_as_blocks_is_the_update(case, data):
    _, layout = case
    some = data.draw(st.sets(st.integers(0, layout.size - 1))) if layout.size else set()
    at = np.array(sorted(some), np.int64)
    for update in (
        Update(at, np.arange(1, at.size + 1, dtype=np.float32)),
        Update(None, np.arange(layout.size, dtype=np.float32)),
    ):
        again = flatten(blocks_of(update, layout), layout, KERNELS)
        np.testing.assert_array_equal(dense(again, layout.size), dense(update, layout.size))


LAYOUT = ShardLayout((Slice(0, 0, 4), Slice(1, 0, 6), Slice(2, 0, 5)))


def test_a_dense_update_has_a_block_even_of_an_empty_slice():
    layout = ShardLayout((Slice(0, 0, 3), Slice(1, 0, 0), Slice(2, 0, 2)))
    update = Update(None, np.arange(5, dtype=np.float32))
    assert [block.slot for block in blocks_of(update, layout)] == [0, 1, 2]
    assert flatten(blocks_of(update, layout), layout, KERNELS).indices is None


def test_what_is_alike_is_joined_and_nothing_else():
    first, second = (Block(slot, 5, np.array([1]), coded([2])) for slot in (0, 2))
    (block,) = joined([first, second], LAYOUT)
    assert (block.slot, block.slots, block.size) == (0, 3, 15)
    np.testing.assert_array_equal(block.indices, [1, 11])
    whole = Block(1, 6, None, coded(np.ones(6)))
    assert joined([first, whole, second], LAYOUT) == (first, whole, second)
    coarse = Block(2, 5, np.array([1]), coded([2], "int8", 0.5))
    assert joined([first, coarse], LAYOUT) == (first, coarse)
    assert joined([first], LAYOUT) == (first,)
    all_of_one = Block(0, 4, np.arange(4), coded(np.ones(4)))
    all_of_next = Block(1, 6, np.arange(6), coded(np.ones(6)))
    (block,) = joined([all_of_one, all_of_next], LAYOUT)
    assert (block.indices, block.size) == (None, 10)


def test_large_blocks_stay_apart(monkeypatch):
    monkeypatch.setattr(flat_updates, "_MOST_JOINED", 5)
    blocks = [Block(slot, 4, np.arange(2), coded([1, 2])) for slot in range(3)]
    assert [(block.slot, block.slots) for block in joined(blocks, LAYOUT)] == [(0, 2), (2, 1)]
    update = Update(np.arange(0, 15, 2), np.ones(8, np.float32))
    assert [block.slots for block in blocks_of(update, LAYOUT)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"slot": 1, "slots": 3}, "slots 1 to 3 "),
        ({"slots": 1 << 31}, "slots below 3"),
        ({"slots": 2, "count": 11}, "11 values"),
        ({"slots": 2, "coding": pb.INDEX_CODING_RANGES}, "legal only with datagrams"),
        ({"slots": 2, "coding": pb.INDEX_CODING_LOW_RANK}, "2 slots"),
        ({"slots": 2, "value_dtype": pb.VALUE_DTYPE_INT2, "value_coding": 2}, "2 slots"),
    ],
)
def test_a_block_that_spans_what_it_cannot_is_malformed(fields, words):
    fields = {"count": 10, "coding": pb.INDEX_CODING_BITMAP, "index_bytes": 2} | fields
    push = pb.Push(blocks=[pb.Block(**fields)])
    sizes = [piece.size for piece in LAYOUT.slices]
    with pytest.raises(Malformed, match=words):
        messages.blocks_from_message(push.blocks, memoryview(bytes(42)), sizes)


def test_slots_of_a_spanning_block_are_taken():
    spanning = pb.Block(slots=2, count=1, coding=pb.INDEX_CODING_BITMAP, index_bytes=2)
    push = pb.Push(blocks=[spanning, pb.Block(slot=1, count=6)])
    payload = memoryview(b"\1\0" + bytes(4 + 24))
    with pytest.raises(Malformed, match="slots 1 to 1 after slot 1"):
        messages.blocks_from_message(push.blocks, payload, [4, 6, 5])
    with pytest.raises(Malformed, match="spans 2 slots"):
        messages.blocks_from_message(push.blocks[:1], payload[:6], [4, 6, 5], ranges=True)
