"""Steps are reassembled completely, with zeros in place of missing datagrams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.datagram_samples import (
    CHANNELS,
    ENTRIES,
    KEY,
    NOTHING,
    SIZES,
    assert_values,
    closed,
    dense_part,
    dropped,
    fields,
    make_step,
    new_pair,
    ranged,
    signed,
    sparse_block,
    sparse_part,
    with_zeros,
)
from thinwire.ops.kernels.numpy_ops import dequantise, quantise
from thinwire.ops.routing.base import Manifest, ValueEncoding
from thinwire.ops.types import Block, CodedValues, LowRankBlock, RangedBlock

# -- everything arrives -----------------------------------------------------------------------


@pytest.mark.parametrize("marker_first", [False, True])
def test_without_loss_it_is_what_was_sent(marker_first):
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000)
    for number in (1, 2, 5):
        step = make_step(sealer, number, SIZES)
        if marker_first:
            assert step.finish(assembler) is None
        step.deliver(assembler)
        assembled = assembler.close(0.0) if marker_first else step.finish(assembler)
        assert_values(assembled, step.values)
        assert assembled.step == number
        assert (assembled.fresh, assembled.fill, assembled.num_late) == (1.0, 1.0, 0)
        assert assembled.announced == assembled.arrived == len(signed(step.sealed))
        np.testing.assert_array_equal(assembled.flat, np.concatenate(step.values))
    assert not dropped(assembler)
    assert assembler.counters.num_announced == assembler.counters.num_arrived
    assert assembler.counters.num_closed == 3


def test_a_whole_buffer_is_as_good_as_single_datagrams():
    sealer, assembler = new_pair(SIZES)
    step = make_step(sealer, 1, SIZES)
    for batch in step.sealed.batches:
        batch.sign(KEY)
        assembler.feed(batch.data, batch.size, 0.0)
    assert_values(step.finish(assembler), step.values)
    total = sum(len(datagram) for datagram in signed(step.sealed))
    assert sum(assembler.counters.num_bytes) == total


def test_the_last_of_a_buffer_may_be_shorter():
    sealer, assembler = new_pair(SIZES)
    step = make_step(sealer, 1, SIZES)
    datagrams = sorted(signed(step.sealed), key=len, reverse=True)
    longest = [each for each in datagrams if len(each) == len(datagrams[0])]
    assembler.feed(b"".join([*longest, datagrams[-1]]), len(longest[0]), 0.0)
    assert sum(assembler.counters.num_datagrams) == len(longest) + 1
    assert not dropped(assembler)


def test_buffers_may_be_overwritten_after_feeding():
    sealer, assembler = new_pair([64])
    values = np.arange(1, 5, dtype=np.float32)
    part = sparse_part(0, 64, np.array([1, 2, 20, 33]), values, [0, 1, 2], [1, 1, 1])
    sealed = sealer.seal(1, [part])
    for datagram in signed(sealed):
        buffer = bytearray(datagram)
        assembler.feed(buffer, len(buffer), 0.0)
        buffer[:] = bytes(len(buffer))
    assembler.add_reliable(1, [sparse_block(0, 64, [], np.zeros(0, np.float32))], NOTHING, 0.0)
    np.testing.assert_array_equal(closed(assembler, 1).blocks[0].values.data, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_value_dtypes_decode_as_on_the_stream(dtype):
    encoding = ValueEncoding[dtype.upper()]
    values = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    data = quantise(values, dtype).data
    coded = CodedValues(dtype, data, 0.3)
    sealer, assembler = new_pair([100])
    scales = np.full(7, 0.3, np.float32)
    sealed = sealer.seal(1, [dense_part(0, data, [4, 0, 2], [1, 1, 3], encoding, scales)])
    for datagram in signed(sealed):
        assembler.feed(datagram, len(datagram), 0.0)
    present = np.array([False, True, False, True, False, True, True])
    kept = np.repeat(present, ENTRIES)[:100]
    block = RangedBlock(0, 100, None, CodedValues(dtype, data[kept], 0.3), ENTRIES, present)
    assembler.add_reliable(1, [block], Manifest(sealed.announced, 0.5, 7, 0, 4, 0), 0.0)
    assert_values(closed(assembler, 1), [dequantise(coded)])


def test_a_sparse_slot_comes_out_sparse_and_complete():
    rng = np.random.default_rng(4)
    indices = np.sort(rng.permutation(500)[:120])
    values = rng.standard_normal(120).astype(np.float32)
    some = np.arange(0, 32, 2)
    sealer, assembler = new_pair([500, 30])
    channels = np.sort(rng.integers(1, CHANNELS + 1, len(some)))
    sealed = sealer.seal(1, [sparse_part(0, 500, indices, values, some[::-1], channels)])
    for datagram in reversed(signed(sealed)):
        assembler.feed(datagram, len(datagram), 0.0)
    kept = ~np.isin(indices // ENTRIES, some)
    blocks = [
        sparse_block(0, 500, indices[kept], values[kept]),
        sparse_block(1, 30, [], np.zeros(0, np.float32)),
    ]
    assembler.add_reliable(1, blocks, Manifest(sealed.announced, 0.5, 34, 0, 18, 0), 0.0)
    assembled = closed(assembler, 1)
    (block,) = assembled.blocks  # nothing came for slot 1: it is left out
    np.testing.assert_array_equal(block.indices, indices)
    np.testing.assert_array_equal(block.values.data, values)
    assert (assembled.flat, assembled.fresh) == (None, 1.0)


def test_what_is_reliable_alone_passes():
    _, assembler = new_pair([40, 6, 12, 8])
    rng = np.random.default_rng(5)
    whole = rng.standard_normal(40).astype(np.float32)
    low_rank = LowRankBlock(
        2,
        12,
        None,
        CodedValues("float32", rng.standard_normal(3).astype(np.float32)),
        CodedValues("float32", rng.standard_normal(4).astype(np.float32)),
        1,
        0,
    )
    coded = CodedValues("int8", np.array([3, -4], np.int8), 0.5)
    blocks = [
        Block(0, 40, None, CodedValues("float32", whole)),
        Block(1, 6, np.array([0, 5]), coded),
        low_rank,
    ]
    assembler.add_reliable(1, blocks, Manifest((), 1.0, 5, 0, 5, 0), 0.0)
    first, second, third = closed(assembler, 1).blocks
    np.testing.assert_array_equal(first.values.data, whole)
    np.testing.assert_array_equal(second.values.data, np.array([1.5, -2.0], np.float32))
    assert third is low_rank


def test_an_empty_shard_part_and_zero_gradients():
    sealer, assembler = new_pair([100, 0])
    assembler.add_reliable(1, [], Manifest((), 0.5, 0, 0, 0, 0), 0.0)
    assembled = closed(assembler, 1)
    assert (assembled.blocks, assembled.fresh, assembled.arrived) == ((), 1.0, 0)
    only_end = ranged(0, np.zeros(100, np.float32), np.arange(7) == 6)
    assembler.add_reliable(
        2, [only_end], Manifest(sealer.seal(2, []).announced, 0.5, 7, 6, 1, 0), 0.0
    )
    assembled = closed(assembler, 2)
    assert_values(assembled, [np.zeros(100, np.float32)])
    assert (assembled.fresh, assembled.fill) == (1.0, 1.0)


# -- loss, order, duplicates ------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_loss_and_duplication(data):
    sizes = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    sealer, assembler = new_pair(sizes, dgt_error_feedback=True, dgt_reception="drop")
    step = make_step(sealer, data.draw(st.integers(0, 1 << 40)), sizes)
    total = len(signed(step.sealed))
    order = data.draw(st.lists(st.integers(0, total - 1), max_size=2 * total)) if total else []
    step.deliver(assembler, order)
    assembled = step.finish(assembler)
    arrived = set(order)
    assert_values(assembled, with_zeros(step, arrived))
    assert (assembled.announced, assembled.arrived) == (total, len(arrived))
    repeats = len(order) - len(arrived)
    assert dropped(assembler) == ({"duplicate": repeats} if repeats else {})
    bits = np.array([number in arrived for number in range(total)], bool)
    assert assembled.bitmap == np.packbits(bits, bitorder="little").tobytes()
    lost = step.sealed.lost(assembled.bitmap)
    for each in lost:
        for start, stop in each.ranges:
            assert not assembled.blocks[each.slot].values.data[start:stop].any()
    missing = sum(fields(signed(step.sealed)[i])[2] for i in range(total) if i not in arrived)
    assert sum(int(np.diff(each.ranges).sum()) for each in lost) == missing


def test_nothing_arrives_and_k_is_zero():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=50)
    step = make_step(sealer, 1, SIZES)
    assert step.finish(assembler, 10.0) is None
    assert assembler.next_deadline() == 10.05
    assert assembler.close(10.04) is None
    assembled = assembler.close(10.05)
    assert_values(assembled, with_zeros(step, []))
    assert assembled.fresh == assembled.fill == 4 / 13
    assert assembler.counters.num_incomplete == 1
    assert assembler.next_deadline() is None


def test_fresh_and_fill_count_what_was_dropped_at_the_sender():
    _, assembler = new_pair([160])
    block = ranged(0, np.zeros(160, np.float32), np.arange(10) > 5)
    assembler.add_reliable(1, [block], Manifest((), 0.4, 10, 2, 4, 4), 0.0)
    assert closed(assembler, 1).fresh == 0.5


def test_the_wait_ends_early_when_all_is_there():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000)
    step = make_step(sealer, 1, SIZES)
    assert step.finish(assembler, 5.0) is None
    assert assembler.next_deadline() == 6.0
    total = len(signed(step.sealed))
    step.deliver(assembler, range(total - 1), 5.1)
    assert assembler.close(5.1) is None
    step.deliver(assembler, [total - 1], 5.2)
    assert assembler.next_deadline() <= 5.2
    assert_values(assembler.close(5.2), step.values)


def test_datagrams_after_the_deadline_are_late():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=100)
    step = make_step(sealer, 1, SIZES)
    step.finish(assembler, 5.0)
    step.deliver(assembler, now=5.2)  # close has not been called yet
    assembled = assembler.close(5.2)
    assert_values(assembled, with_zeros(step, []))
    assert assembled.arrived == 0
    assert sum(assembler.counters.num_late) == len(signed(step.sealed))
