"""Datagrams that arrive after their step or tensor was closed; end markers of tensors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.datagram_samples import (
    NOTHING,
    SIZES,
    assert_values,
    closed,
    dense,
    dropped,
    fields,
    make_step,
    new_pair,
    signed,
    sparse_block,
    sparse_part,
    with_zeros,
)
from thinwire.ops.routing.base import Manifest
from thinwire.ops.types import Block, CodedValues, LowRankBlock

# -- late datagrams ---------------------------------------------------------------------------


def late_step(assembler, sealer, arrived, number, **others):
    """Close a step after only some datagrams arrived; return the step with the result."""
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
    num_late = len(signed(first.sealed))
    assert dropped(assembler) == {reason: num_late}
    assert assembled.num_late == assembler.counters.num_late_used == 0
    assert sum(assembler.counters.num_late) == (num_late if reason == "late" else 0)


def test_late_dense_values_of_a_slot_that_is_sparse_now():
    sealer, assembler = new_pair([48])
    first = make_step(sealer, 1, [48])
    first.finish(assembler)
    first.deliver(assembler)
    indices = np.array([1, 17, 47])
    block = sparse_block(0, 48, indices, np.ones(3, np.float32))
    assembler.add_reliable(2, [block], Manifest((), 0.5, 3, 0, 1, 0), 0.0)
    assembled = closed(assembler, 2)
    assert (assembled.fresh, assembled.fill) == (1 / 3, 1.0)  # two of three blocks came late
    (out,) = assembled.blocks
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
    assembler.add_reliable(1, [empty], Manifest(sealed.announced, 0.0, 3, 0, 1, 0), 0.0)
    assert closed(assembler, 1).blocks == ()
    for datagram in signed(sealed):
        assembler.feed(datagram, len(datagram), 0.0)
    whole = np.full(48, 10, np.float32)
    manifest = Manifest((), 0.5, 3, 0, 1, 0)
    assembler.add_reliable(2, [Block(0, 48, None, CodedValues("float32", whole))], manifest, 0.0)
    expected = whole.copy()
    expected[indices] += values
    assembled = closed(assembler, 2)
    assert_values(assembled, [expected])
    assert assembled.fill == assembled.fresh == 1 / 3  # all places have values of this step


def test_late_sparse_values_wait_for_the_slot_or_come_alone():
    sealer, assembler = new_pair([48, 16])
    indices, values = np.array([1, 17, 20]), np.array([1, 2, 3], np.float32)
    sealed = sealer.seal(1, [sparse_part(0, 48, indices, values, [0, 1], [1, 2])])
    empty = sparse_block(0, 48, [], np.zeros(0, np.float32))
    assembler.add_reliable(1, [empty], Manifest(sealed.announced, 0.0, 3, 0, 1, 0), 0.0)
    closed(assembler, 1)
    for datagram in signed(sealed):
        assembler.feed(datagram, len(datagram), 0.0)
    assembler.add_reliable(2, [], NOTHING, 0.0)
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
    assembler.add_reliable(2, [block], NOTHING, 0.0)
    assert closed(assembler, 2).blocks == (block,)
    assert dropped(assembler) == {"whole": len(signed(first.sealed))}


def test_what_was_refused_is_not_taken_in_late():
    sealer, assembler = new_pair(SIZES)
    first, _ = late_step(assembler, sealer, [0], 1)
    assembler.on_refused(1)
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
        assembler.add_reliable(1, [step.blocks[slot]], step.manifest_of(slot), 0.0)
    step.deliver(assembler)  # one each of slots 0 and 3 is new, but late
    assembled = closed(assembler, 1)
    last = [max(n for n, each in enumerate(of_slot) if each == slot) for slot in (0, 3)]
    in_time = [n for n in range(len(of_slot)) if n not in last]
    assert_values(assembled, with_zeros(step, in_time))
    assert assembled.arrived == len(of_slot) - 2
    assert sum(assembler.counters.num_late) == 2
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
        assembler.add_reliable(1, [step.blocks[slot]], step.manifest_of(slot), float(slot))
    assert assembler.next_deadline() <= 1.0  # slots 1 and 2 have no datagrams
    assembler.end_step(1, 3.0)
    assert assembler.next_deadline() == 4.0  # slot 0 was marked last, slot 3 at 3.0
    step.deliver(assembler, [n for n, each in enumerate(of_slot) if each == 3], 3.5)
    assembled = assembler.close(4.0)
    assert_values(assembled, with_zeros(step, [n for n, each in enumerate(of_slot) if each == 3]))
    bits = [each == 3 for each in of_slot]
    assert assembled.bitmap == np.packbits(bits, bitorder="little").tobytes()
