"""Every all-reduce schedule equals numpy's sum, on a small network of queues without IO."""

import collections
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.ops.aggregation.merge import mean_update
from thinwire.ops.collectives import REGISTRY, CollectivePart, Reduction, SendPart
from thinwire.ops.types import Update

MEMBERS = range(1, 10)


class Network:
    """Members that take turns in a seeded random order; parts arrive in any order."""

    def __init__(self, name, buffers, seed=0):
        self.buffers = [buffer.copy() for buffer in buffers]
        count = len(buffers)
        self.members = [
            Reduction(REGISTRY[name](member, count, len(buffer)), buffer)
            for member, buffer in enumerate(self.buffers)
        ]
        self.mail = {}
        self.sent = collections.Counter()
        self.turns = random.Random(seed)

    def run(self):
        waiting = set(range(len(self.members)))
        while waiting:
            for member in waiting:
                self.send(member)
            able = [member for member in sorted(waiting) if self.can_move(member)]
            assert able, "deadlock"
            member = self.turns.choice(able)
            if self.move(member):
                waiting.remove(member)
        assert not self.mail, "parts that nobody wanted"
        return self.buffers

    def send(self, member):
        for part in self.members[member].outgoing():
            start, stop = part.entries
            self.sent[member] += stop - start
            self.mail[member, part.peer, part.number] = self.buffers[member][start:stop].copy()

    def can_move(self, member):
        awaited = self.members[member].awaited
        return awaited is None or (awaited.peer, member, awaited.number) in self.mail

    def move(self, member):
        awaited = self.members[member].awaited
        if awaited is not None:
            self.members[member].take(self.mail.pop((awaited.peer, member, awaited.number)))
        return awaited is None


def some_buffers(count, size, seed=1):
    return list(np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32))


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("count", MEMBERS)
@settings(max_examples=20)
@given(size=st.integers(0, 70), seed=st.integers(0, 1000))
def test_any_length_sums_like_numpy(name, count, size, seed):
    buffers = some_buffers(count, size, seed)
    sums = Network(name, buffers, seed).run()
    exact = np.sum(np.array(buffers, np.float64), axis=0)
    scale = np.sum(np.abs(np.array(buffers, np.float64)), axis=0)
    for each in sums:
        assert np.all(np.abs(each - exact) <= 1e-6 * scale + 1e-12)
        np.testing.assert_array_equal(each.view(np.uint32), sums[0].view(np.uint32))


@pytest.mark.parametrize("count", MEMBERS)
def test_the_server_s_own_sum_is_numpy_s_too(count):
    buffers = some_buffers(count, 50)
    mean = mean_update([Update(None, buffer) for buffer in buffers], 50).values
    exact = np.sum(np.array(buffers, np.float64), axis=0)
    np.testing.assert_allclose(mean * np.float32(count), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("count", MEMBERS)
def test_repeats_are_bitwise_equal_in_whatever_order_parts_arrive(name, count):
    buffers = some_buffers(count, 997)
    first = Network(name, buffers, seed=1).run()[0]
    for seed in (2, 3):
        again = Network(name, buffers, seed).run()[0]
        np.testing.assert_array_equal(first.view(np.uint32), again.view(np.uint32))


#: Entries sent by each member, as a multiple of 840 entries (divisible by 2..8).
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8])
def test_ring_sends_two_times_all_but_one_part(count):
    network = Network("ring", some_buffers(count, 840))
    network.run()
    assert set(network.sent.values()) == {2 * 840 * (count - 1) // count}


@pytest.mark.parametrize("name", ["butterfly", "blocks"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_powers_of_two_send_no_more_than_the_ring_in_fewer_steps(name, count):
    network = Network(name, some_buffers(count, 840 * 8))
    network.run()
    assert set(network.sent.values()) == {2 * 840 * 8 * (count - 1) // count}
    sends = [step for step in REGISTRY[name](0, count, 840) if isinstance(step, SendPart)]
    assert len(sends) == 2 * (count.bit_length() - 1)


def test_binary_blocks_of_six_by_hand():
    """4 + 2: three quarters twice and a quarter back; a half thrice."""
    network = Network("blocks", some_buffers(6, 840))
    network.run()
    assert [network.sent[member] / 840 for member in range(6)] == [1.75] * 4 + [1.5] * 2


@pytest.mark.parametrize("count", [3, 5, 6, 7, 9])
def test_binary_blocks_send_slightly_more_than_the_ring(count):
    size = 840 * 8
    network = Network("blocks", some_buffers(count, size))
    network.run()
    ring = 2 * size * (count - 1) / count
    assert max(network.sent.values()) <= ring + size / 2
    assert sum(network.sent.values()) == pytest.approx(ring * count, rel=0.01)


@pytest.mark.parametrize("count", [3, 5, 6, 7, 9])
def test_butterfly_folds_the_rest_into_partners(count):
    size = 840 * 8
    network = Network("butterfly", some_buffers(count, size))
    network.run()
    block = 1 << (count.bit_length() - 1)
    inside = 2 * size * (block - 1) // block
    rest = count - block
    expected = [inside + size] * rest + [inside] * (block - rest) + [size] * rest
    assert [network.sent[member] for member in range(count)] == expected


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("count", MEMBERS)
def test_both_ends_of_every_part_agree(name, count):
    sent, received = [], []
    for member in range(count):
        numbers = collections.Counter()
        for step in REGISTRY[name](member, count, 100):
            is_send = isinstance(step, SendPart)
            pair = (member, step.peer) if is_send else (step.peer, member)
            (sent if is_send else received).append((*pair, numbers[pair], step.entries))
            numbers[pair] += 1
            assert step.peer != member
    assert sorted(sent) == sorted(received)


def test_a_range_to_be_sent_is_not_written_before_its_receiver_has_it():
    """The sender's thread may read it late: only a part that depends on it may overwrite it."""
    for name in REGISTRY:
        for count in MEMBERS:
            for member in range(count):
                given_away = []
                for step in REGISTRY[name](member, count, 64):
                    if isinstance(step, SendPart):
                        given_away.append(step.entries)
                    elif step.adds:
                        assert not any(
                            step.entries[0] < stop and start < step.entries[1]
                            for start, stop in given_away
                        )


def test_a_part_of_another_length_is_refused():
    reduction = Reduction(REGISTRY["ring"](0, 2, 10), np.zeros(10, np.float32))
    with pytest.raises(ValueError, match="expects no part"):
        reduction.take(np.zeros(5, np.float32))
    assert reduction.outgoing() == [CollectivePart(1, 0, (0, 5))]
    assert reduction.awaited == CollectivePart(1, 0, (5, 10))
    with pytest.raises(ValueError, match="member 1 of the all-reduce sent a part of 4 entries"):
        reduction.take(np.zeros(4, np.float32))
    np.testing.assert_array_equal(reduction.buffer, np.zeros(10))


def test_a_member_alone_is_done_at_once():
    for name in REGISTRY:
        reduction = Reduction(REGISTRY[name](0, 1, 5), np.ones(5, np.float32))
        assert reduction.outgoing() == []
        assert reduction.awaited is None
