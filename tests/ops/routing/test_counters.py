"""Counters of datagrams add up, survive the wire, and match the assembler's events."""

import dataclasses
import json

import pytest

from tests.ops.datagram_samples import CHANNELS, SIZES, dropped, make_step, new_pair, signed
from thinwire.ops.routing.counters import ReassemblyCounters, SentCounts, total
from thinwire.runtime.persistence.documents import from_dict, to_dict

ONE = SentCounts(2, 1.5, [1, 2], 3, 0, 0, [0, 4], [100, 50], {"outdated": 1}, 0)
OTHER = SentCounts(1, 0.25, [5, 6, 7], 0, 2, 1, [0, 1, 1], [1, 2, 3], {"refused": 2}, 1)


def test_counts_add_up_field_by_field():
    both = ONE.plus(OTHER)
    assert both == SentCounts(
        3, 1.75, [6, 8, 7], 3, 2, 1, [0, 5, 1], [101, 52, 3], {"outdated": 1, "refused": 2}, 1
    )
    assert (ONE.pushes, ONE.unsent) == (2, {"outdated": 1})
    assert both.minus(ONE).plus(ONE) == both
    assert both.minus(OTHER).datagrams[:2] == ONE.datagrams
    assert total([ONE, OTHER], SentCounts()) == both


def through_json(counts):
    return json.loads(json.dumps(to_dict(counts)))


def test_counts_travel():
    assert from_dict(SentCounts, through_json(OTHER)) == OTHER
    kept = dataclasses.replace(ReassemblyCounters.zero(3), sum_k=0.5, num_late=[0, 1, 2, 3])
    assert from_dict(ReassemblyCounters, through_json(kept)) == kept


@pytest.mark.parametrize("bad", [{"pushes": -1}, {"sum_k": "1"}, {"blocks": [1.5]}, {"more": 1}])
def test_ill_formed_counts_are_refused(bad):
    with pytest.raises(ValueError, match="SentCounts"):
        from_dict(SentCounts, bad)


def test_counters_of_two_steps_of_which_one_loses_some():
    sealer, assembler = new_pair(SIZES)
    first, second = (make_step(sealer, number, SIZES) for number in (1, 2))
    second.manifest = dataclasses.replace(second.manifest, num_skipped=2, num_dropped=1, k=0.25)
    first.deliver(assembler)
    whole = first.finish(assembler)
    num_sent = len(signed(second.sealed))
    second.deliver(assembler, range(num_sent - 5))
    torn = second.finish(assembler)
    book = assembler.counters
    assert book.num_closed == 2
    assert book.num_incomplete == 1
    assert sum(book.num_announced) - sum(book.num_arrived) == 5
    assert (book.sum_fresh, book.sum_fill) == (whole.fresh + torn.fresh, whole.fill + torn.fill)
    assert book.blocks == 2 * first.manifest.num_blocks
    assert book.blocks_reliable == first.manifest.num_reliable + second.manifest.num_reliable
    assert (book.blocks_skipped, book.blocks_dropped) == (2, 1)
    assert book.sum_k == first.manifest.k + 0.25
    assert from_dict(ReassemblyCounters, through_json(book)) == book


def test_counters_of_late_ones():
    """A late datagram counts once, at any stage; only retained datagrams are used."""
    sealer, assembler = new_pair(SIZES)
    steps = [make_step(sealer, number, SIZES) for number in (1, 2, 3)]
    steps[0].finish(assembler)
    for chosen in ([0], [1, 1], [0]):  # two of them, each of them twice
        steps[0].deliver(assembler, chosen)
    steps[1].finish(assembler)
    book = assembler.counters
    assert (sum(book.num_late), book.num_late_used, book.sum_of_ages) == (2, 2, 2)
    steps[0].deliver(assembler, [2])  # one more is late by two steps
    steps[2].finish(assembler)
    assert (sum(book.num_late), book.num_late_used, book.sum_of_ages) == (3, 3, 4)
    assert dropped(assembler) == {"duplicate": 2}


@pytest.mark.parametrize("copies", [1, 3])
def test_late_ones_that_are_dropped_count_once(copies):
    sealer, assembler = new_pair(SIZES, dgt_reception="drop")
    step = make_step(sealer, 1, SIZES)
    step.finish(assembler)
    for _ in range(copies):
        step.deliver(assembler)
    num_sent = len(signed(step.sealed))
    assert sum(assembler.counters.num_late) == num_sent == sum(assembler.counters.num_announced)
    expected = {"late": num_sent, "duplicate": (copies - 1) * num_sent}
    assert dropped(assembler) == {reason: count for reason, count in expected.items() if count}
    assert assembler.counters.num_late_used == 0


def test_counters_start_at_zero_for_each_channel():
    assert len(ReassemblyCounters.zero(CHANNELS).num_late) == CHANNELS + 1
    fields = dataclasses.asdict(ReassemblyCounters.zero(CHANNELS)).values()
    assert not any(sum(each) for each in fields if isinstance(each, list))
