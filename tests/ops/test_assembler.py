"""Steps come out whole, or with zeros where datagrams are missing; what is late comes later."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.kernels.quantise import dequantise, quantise
from ops.routing.assembler import Assembler
from ops.routing.routed import Announced, Encoding, Manifest
from ops.routing.sequences import ahead
from ops.types import Block, CodedValues, LowRankBlock, RangedBlock
from tests.ops.datagram_samples import (
    CHANNELS,
    ENTRIES,
    KEY,
    SESSION,
    Rules,
    dense_part,
    dropped,
    make_step,
    new_pair,
    num_blocks,
    ranged,
    signed,
    sparse_block,
    sparse_part,
)

SIZES = [100, 16, 5, 64]  # blocks: 7 (the last short), 1, 1 (short), 4
NOTHING = Manifest((), 0.0, 0, 0, 0, 0)


def dense(assembled):
    return [block.values.data for block in assembled.blocks]


def assert_values(assembled, expected):
    assert [block.slot for block in assembled.blocks] == list(range(len(expected)))
    for block, values in zip(assembled.blocks, expected, strict=True):
        assert block.indices is None
        assert block.size == len(values)
        np.testing.assert_array_equal(block.values.data.view(np.uint32), values.view(np.uint32))


def with_zeros(step, arrived):
    """What a step means of which only some datagrams came: the reference."""
    expected = []
    for block in step.blocks:
        each = np.zeros(block.size, np.float32)
        present = np.repeat(block.present, ENTRIES)[: block.size]
        each[present] = step.values[block.slot][present]
        expected.append(each)
    for number in arrived:
        slot, offset, count, values = fields(signed(step.sealed)[number])
        expected[slot][offset : offset + count] = values
    return expected


def fields(datagram):
    """Slot, offset, count and float32 values of a dense datagram."""
    slot = int.from_bytes(datagram[20:24], "little")
    offset, count = (int.from_bytes(datagram[at : at + 4], "little") for at in (36, 40))
    return slot, offset, count, np.frombuffer(datagram[64:-16], "<f4")


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
    assert assembler.books.num_announced == assembler.books.num_arrived
    assert assembler.books.num_closed == 3


def test_a_whole_buffer_is_as_good_as_single_datagrams():
    sealer, assembler = new_pair(SIZES)
    step = make_step(sealer, 1, SIZES)
    for batch in step.sealed.batches:
        batch.sign(KEY)
        assembler.feed(batch.data, batch.size, 0.0)
    assert_values(step.finish(assembler), step.values)
    total = sum(len(datagram) for datagram in signed(step.sealed))
    assert sum(assembler.books.num_bytes) == total


def test_the_last_of_a_buffer_may_be_shorter():
    sealer, assembler = new_pair(SIZES)
    step = make_step(sealer, 1, SIZES)
    datagrams = sorted(signed(step.sealed), key=len, reverse=True)
    longest = [each for each in datagrams if len(each) == len(datagrams[0])]
    assembler.feed(b"".join([*longest, datagrams[-1]]), len(longest[0]), 0.0)
    assert sum(assembler.books.num_datagrams) == len(longest) + 1
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
    assembler.mark(1, [sparse_block(0, 64, [], np.zeros(0, np.float32))], NOTHING, 0.0)
    np.testing.assert_array_equal(closed(assembler, 1).blocks[0].values.data, values)


def closed(assembler, step, now=0.0):
    assembler.end(step, now)
    return assembler.close(now)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_value_dtypes_decode_as_on_the_stream(dtype):
    encoding = Encoding[dtype.upper()]
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
    assembler.mark(1, [block], Manifest(sealed.announced, 0.5, 7, 0, 4, 0), 0.0)
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
    assembler.mark(1, blocks, Manifest(sealed.announced, 0.5, 34, 0, 18, 0), 0.0)
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
    assembler.mark(1, blocks, Manifest((), 1.0, 5, 0, 5, 0), 0.0)
    first, second, third = closed(assembler, 1).blocks
    np.testing.assert_array_equal(first.values.data, whole)
    np.testing.assert_array_equal(second.values.data, np.array([1.5, -2.0], np.float32))
    assert third is low_rank


def test_an_empty_shard_part_and_zero_gradients():
    sealer, assembler = new_pair([100, 0])
    assembler.mark(1, [], Manifest((), 0.5, 0, 0, 0, 0), 0.0)
    assembled = closed(assembler, 1)
    assert (assembled.blocks, assembled.fresh, assembled.arrived) == ((), 1.0, 0)
    only_end = ranged(0, np.zeros(100, np.float32), np.arange(7) == 6)
    assembler.mark(2, [only_end], Manifest(sealer.seal(2, []).announced, 0.5, 7, 6, 1, 0), 0.0)
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
    assert assembler.books.num_incomplete == 1
    assert assembler.next_deadline() is None


def test_fresh_and_fill_count_what_was_dropped_at_the_sender():
    _, assembler = new_pair([160])
    block = ranged(0, np.zeros(160, np.float32), np.arange(10) > 5)
    assembler.mark(1, [block], Manifest((), 0.4, 10, 2, 4, 4), 0.0)
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
    step.deliver(assembler, now=5.2)  # nobody has called close yet
    assembled = assembler.close(5.2)
    assert_values(assembled, with_zeros(step, []))
    assert assembled.arrived == 0
    assert assembler.books.num_late == len(signed(step.sealed))


# -- late datagrams ---------------------------------------------------------------------------


def late_step(assembler, sealer, arrived, number, **others):
    """Close a step of which only some datagrams come in time; return it with the result."""
    step = make_step(sealer, number, SIZES, **others)
    step.deliver(assembler, arrived)
    return step, step.finish(assembler)


def test_late_datagrams_are_added_once_to_the_next_step():
    sealer, assembler = new_pair(SIZES)
    first, _ = late_step(assembler, sealer, [0, 1], 1)
    total = len(signed(first.sealed))
    first.deliver(assembler)
    first.deliver(assembler)
    second, assembled = late_step(assembler, sealer, [2], 2)
    late = [
        whole - part
        for whole, part in zip(
            with_zeros(first, range(2, total)), with_zeros(first, []), strict=True
        )
    ]
    expected = [a + b for a, b in zip(with_zeros(second, [2]), late, strict=True)]
    for block, values in zip(assembled.blocks, expected, strict=True):
        np.testing.assert_array_equal(block.values.data, values)
    assert (assembled.num_late, assembled.mean_lateness) == (total - 2, 1.0)
    assert assembled.fresh < assembled.fill
    assert dropped(assembler) == {"duplicate": total + 2}
    third, assembled = late_step(assembler, sealer, None, 3)
    assert_values(assembled, third.values)
    assert (assembled.num_late, assembled.fill) == (0, 1.0)


def test_fill_counts_places_not_datagrams():
    sealer, assembler = new_pair([64])
    first = make_step(sealer, 1, [64])  # 3 blocks in 6 datagrams, and the end block
    first.finish(assembler)
    first.deliver(assembler)
    second = make_step(sealer, 2, [64])
    keys = [fields(datagram)[:2] for datagram in signed(second.sealed)]
    second.deliver(assembler, [number for number, key in enumerate(keys) if key[1] < 16])
    assembled = second.finish(assembler)
    assert (assembled.fresh, assembled.fill, assembled.num_late) == (0.5, 1.0, 6)


def test_older_ones_weigh_less_and_too_old_ones_nothing():
    sealer, assembler = new_pair([32], dgt_max_late=2, dgt_late_decay=0.5)
    steps = [make_step(sealer, number, [32]) for number in range(1, 5)]
    for step in steps[:3]:
        step.finish(assembler)
    steps[1].deliver(assembler, [0])  # two steps late: a quarter
    steps[2].deliver(assembler, [0])  # one: a half
    steps[0].deliver(assembler)  # three
    assembled = steps[3].finish(assembler)
    expected = with_zeros(steps[3], [])[0]
    for step, weight in ((steps[1], 0.25), (steps[2], 0.5)):
        _, offset, count, values = fields(signed(step.sealed)[0])
        expected[offset : offset + count] += np.float32(weight) * values
    np.testing.assert_array_equal(assembled.blocks[0].values.data, expected)
    assert (assembled.mean_lateness, assembled.num_late) == (1.5, 2)
    assert dropped(assembler) == {"too_old": 2}


@pytest.mark.parametrize(
    ("rules", "reason"), [({"dgt_reception": "drop"}, "late"), ({"dgt_max_late": 0}, "too_old")]
)
def test_late_ones_are_dropped_if_asked(rules, reason):
    sealer, assembler = new_pair(SIZES, **rules)
    first, _ = late_step(assembler, sealer, [], 1)
    first.deliver(assembler)
    second, assembled = late_step(assembler, sealer, None, 2)
    assert_values(assembled, second.values)
    assert dropped(assembler) == {reason: len(signed(first.sealed))}
    assert assembler.books.num_late == 0


def test_late_dense_values_of_a_slot_that_is_sparse_now():
    sealer, assembler = new_pair([48])
    first = make_step(sealer, 1, [48])
    first.finish(assembler)
    first.deliver(assembler)
    indices = np.array([1, 17, 47])
    block = sparse_block(0, 48, indices, np.ones(3, np.float32))
    assembler.mark(2, [block], Manifest((), 0.5, 3, 0, 3, 0), 0.0)
    (out,) = closed(assembler, 2).blocks
    expected = np.concatenate([first.values[0][:32], np.zeros(16, np.float32)])
    expected[indices] += 1
    assert out.indices.tolist() == [*range(32), 47]
    result = np.zeros(48, np.float32)
    result[out.indices] = out.values.data
    np.testing.assert_array_equal(result, expected)


def test_late_sparse_values_of_a_slot_that_is_dense_now():
    sealer, assembler = new_pair([48])
    indices, values = np.array([1, 17, 20]), np.array([1, 2, 3], np.float32)
    sealed = sealer.seal(1, [sparse_part(0, 48, indices, values, [0, 1], [1, 1])])
    empty = sparse_block(0, 48, [], np.zeros(0, np.float32))
    assembler.mark(1, [empty], Manifest(sealed.announced, 0.0, 3, 0, 1, 0), 0.0)
    assert closed(assembler, 1).blocks == ()
    for datagram in signed(sealed):
        assembler.feed(datagram, len(datagram), 0.0)
    whole = np.full(48, 10, np.float32)
    assembler.mark(2, [Block(0, 48, None, CodedValues("float32", whole))], NOTHING, 0.0)
    expected = whole.copy()
    expected[indices] += values
    assert_values(closed(assembler, 2), [expected])


def test_late_sparse_values_wait_for_the_slot_or_come_alone():
    sealer, assembler = new_pair([48, 16])
    indices, values = np.array([1, 17, 20]), np.array([1, 2, 3], np.float32)
    sealed = sealer.seal(1, [sparse_part(0, 48, indices, values, [0, 1], [1, 2])])
    empty = sparse_block(0, 48, [], np.zeros(0, np.float32))
    assembler.mark(1, [empty], Manifest(sealed.announced, 0.0, 3, 0, 1, 0), 0.0)
    closed(assembler, 1)
    for datagram in signed(sealed):
        assembler.feed(datagram, len(datagram), 0.0)
    assembler.mark(2, [], NOTHING, 0.0)
    (block,) = closed(assembler, 2).blocks
    assert block.indices.tolist() == indices.tolist()
    assert block.values.data.tolist() == values.tolist()


def test_late_values_for_a_product_of_matrices_are_dropped():
    sealer, assembler = new_pair([48])
    first = make_step(sealer, 1, [48])
    first.finish(assembler)
    first.deliver(assembler)
    thin = CodedValues("float32", np.ones(6, np.float32))
    block = LowRankBlock(0, 48, None, thin, CodedValues("float32", np.ones(8, np.float32)), 1, 0)
    assembler.mark(2, [block], NOTHING, 0.0)
    assert closed(assembler, 2).blocks == (block,)
    assert dropped(assembler) == {"whole": len(signed(first.sealed))}


def test_what_was_refused_is_not_taken_in_late():
    sealer, assembler = new_pair(SIZES)
    first, _ = late_step(assembler, sealer, [0], 1)
    assembler.refuse(1)
    first.deliver(assembler)
    second, assembled = late_step(assembler, sealer, None, 2)
    assert_values(assembled, second.values)
    assert dropped(assembler) == {"abandoned": len(signed(first.sealed))}


@given(st.lists(st.lists(st.integers(0, 2), min_size=12, max_size=12), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_like_the_original_without_duplicates_and_at_most_one_step_late(fates):
    sealer, assembler = new_pair([112])
    slots = {}  # the original's: block -> payload
    late = []
    for number, fate in enumerate(fates):
        step = make_step(sealer, number, [112])
        datagrams = signed(step.sealed)
        now = [d for d, what in zip(datagrams, fate, strict=True) if what == 1]
        for datagram in [*late, *now]:
            assembler.feed(datagram, len(datagram), 0.0)
            _, offset, count, values = fields(datagram)
            empty = np.zeros(count, np.float32)
            slots[offset, count] = slots.get((offset, count), empty) + values  # store, or add
        tensor = with_zeros(step, [])[0]  # the end block closes: zeros, copy in, clear
        for (offset, count), values in slots.items():
            tensor[offset : offset + count] = values
        slots.clear()
        assembled = step.finish(assembler)
        np.testing.assert_allclose(dense(assembled)[0], tensor, rtol=1e-6)
        late = [d for d, what in zip(datagrams, fate, strict=True) if what == 2]


# -- end markers of tensors -------------------------------------------------------------------


def test_a_tensor_closes_at_its_own_marker():
    sealer, assembler = new_pair(SIZES)
    step = make_step(sealer, 1, SIZES)
    of_slot = [fields(datagram)[0] for datagram in signed(step.sealed)]
    for slot in range(len(SIZES)):
        step.deliver(assembler, [n for n, each in enumerate(of_slot) if each == slot][:-1])
        assembler.mark(1, [step.blocks[slot]], step.manifest_of(slot), 0.0)
    step.deliver(assembler)  # one each of slots 0 and 3 is new, but late
    assembled = closed(assembler, 1)
    last = [max(n for n, each in enumerate(of_slot) if each == slot) for slot in (0, 3)]
    in_time = [n for n in range(len(of_slot)) if n not in last]
    assert_values(assembled, with_zeros(step, in_time))
    assert assembled.arrived == len(of_slot) - 2
    assert assembler.books.num_late == 2
    second = make_step(sealer, 2, SIZES)
    second.deliver(assembler)
    late = second.finish(assembler)
    expected = second.values
    for number in last:
        slot, offset, count, values = fields(signed(step.sealed)[number])
        expected[slot][offset : offset + count] += values
    assert_values(late, expected)


def test_tensors_wait_each_for_itself():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000, dgt_error_feedback=True)
    step = make_step(sealer, 1, SIZES)
    of_slot = [fields(datagram)[0] for datagram in signed(step.sealed)]
    for slot in reversed(range(len(SIZES))):
        assembler.mark(1, [step.blocks[slot]], step.manifest_of(slot), float(slot))
    assert assembler.next_deadline() <= 1.0  # slots 1 and 2 have no datagrams
    assembler.end(1, 3.0)
    assert assembler.next_deadline() == 4.0  # slot 0 was marked last, slot 3 at 3.0
    step.deliver(assembler, [n for n, each in enumerate(of_slot) if each == 3], 3.5)
    assembled = assembler.close(4.0)
    assert_values(assembled, with_zeros(step, [n for n, each in enumerate(of_slot) if each == 3]))
    bits = [each == 3 for each in of_slot]
    assert assembled.bitmap == np.packbits(bits, bitorder="little").tobytes()


# -- steps ------------------------------------------------------------------------------------


def test_one_step_ahead_is_kept():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000)
    first, second, third = (make_step(sealer, number, SIZES) for number in (1, 2, 3))
    first.finish(assembler)
    second.deliver(assembler)
    third.deliver(assembler)  # more than one ahead
    first.deliver(assembler)
    assert_values(assembler.close(0.0), first.values)
    assert_values(second.finish(assembler), second.values)
    assert dropped(assembler) == {"too_new": len(signed(third.sealed))}


def test_two_marked_steps_come_out_in_order():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000)
    first, second, third = (make_step(sealer, number, SIZES) for number in (1, 2, 3))
    second.deliver(assembler)
    first.finish(assembler)
    assert second.finish(assembler) is None
    with pytest.raises(ValueError, match="step 3 begins, but 2 earlier ones wait"):
        third.finish(assembler)
    first.deliver(assembler)
    assert assembler.close(0.0).step == 1
    assert assembler.close(0.0).step == 2
    assert assembler.close(0.0) is None


def test_numbers_of_steps_may_skip():
    sealer, assembler = new_pair(SIZES)
    for number in (1, 4, 9):
        step = make_step(sealer, number, SIZES)
        step.deliver(assembler)
        assert_values(step.finish(assembler), step.values)
    assert not dropped(assembler)


def test_a_step_that_never_ended_is_forgotten():
    sealer, assembler = new_pair(SIZES)
    lost = make_step(sealer, 3, SIZES)
    lost.deliver(assembler)
    assembler.mark(3, [lost.blocks[0]], lost.manifest_of(0), 0.0)  # the stream broke here
    step = make_step(sealer, 4, SIZES)
    step.deliver(assembler)
    assert_values(step.finish(assembler), step.values)
    lost.deliver(assembler)
    assert dropped(assembler) == {"abandoned": 2 * len(signed(lost.sealed))}


def test_steps_without_a_marker_make_room_for_newer_ones():
    sealer, assembler = new_pair(SIZES)
    steps = [make_step(sealer, number, SIZES) for number in (1, 2, 3)]
    for step in steps:
        step.deliver(assembler)
    total = len(signed(steps[0].sealed))
    assert dropped(assembler) == {"abandoned": total}
    steps[0].deliver(assembler)
    assert dropped(assembler) == {"abandoned": 2 * total}
    assert_values(steps[2].finish(assembler), steps[2].values)


def test_numbers_of_steps_wrap():
    sealer, assembler = new_pair(SIZES, dgt_max_late=3)
    start = (1 << 33) - 2
    previous = None
    for number in range(start, start + 5):
        step = make_step(sealer, number, SIZES)
        step.deliver(assembler, range(1, len(signed(step.sealed))))
        if previous is not None:
            previous.deliver(assembler, [0])
        assembled = step.finish(assembler)
        assert (assembled.step, assembled.num_late) == (number, int(previous is not None))
        previous = step
    assert not dropped(assembler)
    old = make_step(sealer, start - 9, SIZES)
    old.deliver(assembler)
    assert dropped(assembler) == {"too_old": len(signed(old.sealed))}


def test_sequence_numbers_wrap():
    sealer, assembler = new_pair(SIZES, dgt_error_feedback=True)
    sealer._next = [(1 << 32) - 3] * (CHANNELS + 1)
    for number in range(4):
        step = make_step(sealer, number, SIZES)
        total = len(signed(step.sealed))
        order = np.random.default_rng(number).permutation(total)
        step.deliver(assembler, order[2:])
        assembled = step.finish(assembler)
        arrived = [each in order[2:] for each in range(total)]
        assert assembled.bitmap == np.packbits(arrived, bitorder="little").tobytes()


@given(st.integers(0, (1 << 32) - 1), st.integers(1 - (1 << 31), (1 << 31) - 1))
def test_steps_are_compared_modulo(base, distance):
    assert ahead((base + distance) % (1 << 32), base) == distance


def test_a_repeated_push_gets_the_same_again():
    sealer, assembler = new_pair(SIZES)
    step = make_step(sealer, 7, SIZES)
    assert assembler.again(7) is None
    step.deliver(assembler, [0, 1])
    assembled = step.finish(assembler)
    step.deliver(assembler)
    assert assembler.again(7) is assembled
    assert assembler.again(6) is None
    assert_values(assembler.again(7), with_zeros(step, [0, 1]))
    with pytest.raises(ValueError, match="read-only"):
        assembled.blocks[0].values.data[0] = 1
    with pytest.raises(ValueError, match="step 7 is closed"):
        step.finish(assembler)


def test_a_marker_that_comes_twice_counts_once():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000)
    step = make_step(sealer, 1, SIZES)
    step.finish(assembler, 0.0)
    step.finish(assembler, 0.5)
    assert assembler.next_deadline() == 1.0
    step.deliver(assembler)
    assembled = assembler.close(0.6)
    assert assembled.announced == len(signed(step.sealed))
    assert_values(assembled, step.values)


def test_a_new_session_does_not_take_the_old_ones_datagrams():
    sealer, _ = new_pair(SIZES)
    old = make_step(sealer, 1, SIZES)
    successor = type(SESSION)(SESSION.id + 1, bytes(32), SESSION.worker)
    assembler = Assembler(successor, SIZES, Rules())
    old.deliver(assembler)
    assert dropped(assembler) == {"session": len(signed(old.sealed))}


def test_what_was_not_announced_is_not_believed_afterwards():
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000)
    step = make_step(sealer, 1, SIZES)
    step.finish(assembler)
    again = make_step(sealer, 1, SIZES, seed=1)  # the same places, other sequence numbers
    again.deliver(assembler)
    assert dropped(assembler) == {"unannounced": len(signed(again.sealed))}
    step.deliver(assembler)
    assert_values(assembler.close(0.0), step.values)


# -- reliable parts that do not fit -----------------------------------------------------------


def good_block(size=100, present=None):
    count = num_blocks(size)
    return ranged(0, np.zeros(size, np.float32), np.ones(count) if present is None else present)


@pytest.mark.parametrize(
    ("blocks", "manifest", "complaint"),
    [
        ([good_block(), good_block()], NOTHING, "one of them repeats"),
        ([good_block(99)], NOTHING, "99 entries for slot 0"),
        ([Block(9, 4, None, CodedValues("float32", np.zeros(4)))], NOTHING, "for slot 9"),
        (
            [RangedBlock(0, 100, None, CodedValues("float32", np.zeros(9)), 16, np.ones(7, bool))],
            NOTHING,
            "9 values for ranges of 100 entries",
        ),
        (
            [RangedBlock(0, 100, None, CodedValues("float32", np.zeros(9)), 16, np.ones(6, bool))],
            NOTHING,
            "6 ranges of 16 entries.*expected 7",
        ),
        ([], Manifest((Announced(4, 0, 1),), 0, 0, 0, 0, 0), "channel 4: expected 1 to 3"),
        ([], Manifest((Announced(1, 0, 186),), 0, 0, 0, 0, 0), "186 datagrams.*0 to 185"),
        ([], Manifest((Announced(1, 1 << 32, 1),), 0, 0, 0, 0, 0), "below 2"),
        ([], Manifest((Announced(1, 0, -1),), 0, 0, 0, 0, 0), "-1 datagrams"),
    ],
)
def test_refused_markers(blocks, manifest, complaint):
    _, assembler = new_pair(SIZES)
    with pytest.raises(ValueError, match=complaint):
        assembler.mark(1, blocks, manifest, 0.0)
    good = make_step(new_pair(SIZES)[0], 1, SIZES)
    good.deliver(assembler)
    assert_values(good.finish(assembler), good.values)


def test_announcements_must_join():
    _, assembler = new_pair(SIZES)
    assembler.mark(1, [], Manifest((Announced(1, 0, 2),), 0, 0, 0, 0, 0), 0.0)
    assembler.mark(1, [good_block()], Manifest((Announced(1, 3, 2),), 0, 0, 0, 0, 0), 0.0)
    with pytest.raises(ValueError, match="channel 1: datagrams from number 3 on.*expected 2"):
        assembler.end(1, 0.0)


def test_ending_what_was_not_marked():
    _, assembler = new_pair(SIZES)
    with pytest.raises(ValueError, match="step 3 ends, but nothing"):
        assembler.end(3, 0.0)


def test_no_channels_no_datagrams():
    sealer, _ = new_pair(SIZES)
    step = make_step(sealer, 1, SIZES)
    assembler = Assembler(SESSION, SIZES, Rules(dgt_channels=0))
    step.deliver(assembler)
    assert dropped(assembler) == {"channel": len(signed(step.sealed))}
    assert math.isclose(sum(assembler.books.num_bytes), 0)
