"""The steps that an assembler accepts, and the reliable parts that it rejects."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.datagram_samples import (
    CHANNELS,
    NOTHING,
    SESSION,
    SIZES,
    Rules,
    assert_values,
    dropped,
    make_step,
    new_pair,
    num_blocks,
    ranged,
    signed,
    with_zeros,
)
from thinwire.ops.routing.base import AnnouncedDatagrams, Manifest
from thinwire.ops.routing.reassembler import Reassembler
from thinwire.ops.routing.sequence_set import ahead
from thinwire.ops.types import Block, CodedValues, RangedBlock

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
    with pytest.raises(ValueError, match="step 3.* 2 "):
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
    assembler.add_reliable(3, [lost.blocks[0]], lost.manifest_of(0), 0.0)  # the stream broke here
    step = make_step(sealer, 4, SIZES)
    step.deliver(assembler)
    assert_values(step.finish(assembler), step.values)
    lost.deliver(assembler)
    assert dropped(assembler) == {"abandoned": 2 * len(signed(lost.sealed))}


def test_steps_without_a_marker_give_way_to_newer_ones():
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
    assert assembler.find_closed(7) is None
    step.deliver(assembler, [0, 1])
    assembled = step.finish(assembler)
    step.deliver(assembler)
    assert assembler.find_closed(7) is assembled
    assert assembler.find_closed(6) is None
    assert_values(assembler.find_closed(7), with_zeros(step, [0, 1]))
    with pytest.raises(ValueError, match="read-only"):
        assembled.blocks[0].values.data[0] = 1
    with pytest.raises(ValueError, match="closed step 7"):
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
    assembler = Reassembler(successor, SIZES, Rules())
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
        ([good_block(), good_block()], NOTHING, r"slots \[0, 0\]"),
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
        ([], Manifest((AnnouncedDatagrams(4, 0, 1),), 0, 0, 0, 0, 0), "channel 4: expected 1 to 3"),
        ([], Manifest((AnnouncedDatagrams(1, 0, 186),), 0, 0, 0, 0, 0), "186 datagrams.*0 to 185"),
        ([], Manifest((AnnouncedDatagrams(1, 1 << 32, 1),), 0, 0, 0, 0, 0), "below 2"),
        ([], Manifest((AnnouncedDatagrams(1, 0, -1),), 0, 0, 0, 0, 0), "-1 datagrams"),
    ],
)
def test_refused_markers(blocks, manifest, complaint):
    _, assembler = new_pair(SIZES)
    with pytest.raises(ValueError, match=complaint):
        assembler.add_reliable(1, blocks, manifest, 0.0)
    good = make_step(new_pair(SIZES)[0], 1, SIZES)
    good.deliver(assembler)
    assert_values(good.finish(assembler), good.values)


def test_announcements_must_join():
    _, assembler = new_pair(SIZES)
    assembler.add_reliable(1, [], Manifest((AnnouncedDatagrams(1, 0, 2),), 0, 0, 0, 0, 0), 0.0)
    assembler.add_reliable(
        1, [good_block()], Manifest((AnnouncedDatagrams(1, 3, 2),), 0, 0, 0, 0, 0), 0.0
    )
    with pytest.raises(ValueError, match="channel 1: .* 3; expected 2"):
        assembler.end_step(1, 0.0)


def test_ending_what_was_not_marked():
    _, assembler = new_pair(SIZES)
    with pytest.raises(ValueError, match="step 3 ends"):
        assembler.end_step(3, 0.0)


def test_no_channels_no_datagrams():
    sealer, _ = new_pair(SIZES)
    step = make_step(sealer, 1, SIZES)
    assembler = Reassembler(SESSION, SIZES, Rules(dgt_channels=0))
    step.deliver(assembler)
    assert dropped(assembler) == {"channel": len(signed(step.sealed))}
    assert math.isclose(sum(assembler.counters.num_bytes), 0)
