"""DGT's sender: sparse or partial packets, and random or fixed block order as a control."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops import routers
from tests.ops.routers import (
    FLOAT,
    blocks_of,
    channels_of,
    dense,
    routed,
    shard_of,
    sparse,
    together,
)
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.types import LowRankBlock

SMALL = {"dgt_block_size": 16}  # four entries


# -- edge cases ---------------------------------------------------------------------------------


def test_small_and_empty_tensors_are_reliable_as_they_are():
    blocks = [dense(0, []), dense(1, [1.0]), dense(2, np.ones(4))]
    out, _ = routed(Dgt(dgt_k=0.0, **SMALL), shard_of(0, 1, 4), blocks)
    assert all(one is other for one, other in zip(out.reliable, blocks, strict=True))
    assert (out.unreliable, out.num_blocks, out.num_reliable) == ((), 2, 2)


def test_zeros_leave_the_end_alone():
    out, _ = routed(Dgt(dgt_k=0.3, **SMALL), shard_of(40), [dense(0, np.zeros(40))])
    assert channels_of(out, 0, 10) == [None] * 9 + [0]
    assert out.unreliable == () and (out.num_skipped, out.num_reliable) == (9, 1)
    assert not together(out, [40])[0].any()


def test_only_present_zeros_are_left_out_and_ranks_count_what_is_left():
    policy = Dgt(dgt_k=0.5, dgt_channels=1, **SMALL)
    full, state = routed(policy, shard_of(40), [dense(0, blocks_of(*range(10, 0, -1)))])
    assert full.num_skipped == 0
    values = blocks_of(10, 0, 8, 0, 6, 0, 4, 0, 2, 0)
    out, state = routed(policy, shard_of(40), [dense(0, values)], state)
    # n = 6 with the end, R = 3: the average of a block that was not zero does not send it.
    assert channels_of(out, 0, 10) == [0, None, 0, None, 0, None, 1, None, 1, 0]
    kept = Dgt(dgt_k=0.5, dgt_channels=1, dgt_clear_zero=False, **SMALL)
    out, _ = routed(kept, shard_of(40), [dense(0, values)])
    assert None not in channels_of(out, 0, 10) and out.num_skipped == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_reliable_and_first(bad):
    policy = Dgt(dgt_k=0.0, **SMALL)
    values = blocks_of(4, 3, 2, 1)
    _, state = routed(policy, shard_of(16), [dense(0, values)])
    before = state["shards"][0]["averages"][0].copy()
    values[9] = bad
    out, state = routed(policy, shard_of(16), [dense(0, values)], state)
    assert channels_of(out, 0, 4) == [1, 2, 0, 0] and out.num_nonfinite == 1
    after = state["shards"][0]["averages"][0]
    assert after[2] == before[2] and np.isfinite(after).all() and after[1] != before[1]
    np.testing.assert_array_equal(together(out, [16])[0], values)


ALL_RELIABLE = [{"dgt_channels": 0}, {"dgt_k": 1.0}, {"dgt_enable_block": False}]


@pytest.mark.parametrize("choices", ALL_RELIABLE)
def test_where_all_is_reliable_the_same_objects_come_back(choices):
    policy = Dgt(**{"dgt_k": 0.5} | SMALL | choices)
    blocks = (dense(0, np.zeros(40)), sparse(1, 40, [3, 30], [1, 2], "int8"))
    out, state = routed(policy, shard_of(40, 40), blocks)
    assert out.reliable is blocks and out.unreliable == ()
    assert not policy.uses_datagrams and policy.delivers_all
    assert policy.undelivered(0, None, state) == state
    plain, _ = routed(Reliable(), shard_of(40, 40), blocks)
    assert plain.reliable is blocks


def test_an_adaptive_k_of_one_gives_the_same_objects_and_goes_on_averaging():
    policy = Dgt(dgt_k=1.0, dgt_adaptive_k=True, **SMALL)
    blocks = (dense(0, blocks_of(3, 2, 1)), sparse(1, 40, [3, 30], [1, 2]))
    out, state = routed(policy, shard_of(12, 40), blocks, loss=2.0)
    assert all(one is other for one, other in zip(out.reliable, blocks, strict=True))
    out, _ = routed(policy, shard_of(12, 40), blocks, state, loss=0.4)
    assert out.unreliable


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("drops", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    k=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999, 1.0]),
    heights=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    scope=st.sampled_from(["tensor", "model"]),
    present=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_what_is_counted_is_what_travels_at_each_k(clears, drops, k, heights, scope, present, seed):
    """Blocks that are skipped are not sent, and all others are: of dense and of sparse packets."""
    policy = Dgt(
        dgt_k=k,
        dgt_adaptive_k=True,
        dgt_clear_zero=clears,
        dgt_send_drop=drops,
        dgt_scope=scope,
        **SMALL,
    )
    values = blocks_of(*heights)
    at = np.flatnonzero(np.random.default_rng(seed).random(values.size) < present)
    blocks = [dense(0, values), sparse(1, values.size, at, values[at])]
    out, _ = routed(policy, shard_of(values.size, values.size), blocks)
    parts = {part.slot: part for part in out.unreliable}
    num_unreliable = sum(part.blocks.size for part in parts.values())
    total = out.num_reliable + out.num_skipped + out.num_dropped + num_unreliable
    assert total == out.num_blocks == 2 * len(heights)
    assert drops or not out.num_dropped
    reliable = {block.slot: block for block in out.reliable}
    num_sent = reliable[0].values.data.size + 4 * (parts[0].blocks.size if 0 in parts else 0)
    is_zero = [not height for height in heights[:-1]]  # the end is always sent
    has_none = [not np.any((at // 4) == number) for number in range(len(heights) - 1)]
    is_left_out = [none or (zero and clears) for none, zero in zip(has_none, is_zero, strict=True)]
    num_skipped_dense = sum(is_zero) if clears else 0
    assert out.num_skipped == num_skipped_dense + sum(is_left_out)
    if not drops:
        assert num_sent == values.size - 4 * num_skipped_dense
        low = parts[1].blocks if 1 in parts else []
        on_channels = {int(number) for number in np.asarray(low)}
        sent = [int(each) // 4 for each in reliable[1].indices]
        assert not on_channels & set(sent)
        assert not (on_channels | set(sent)) & {n for n, out_ in enumerate(is_left_out) if out_}
        num_present = sum(int(np.sum(at // 4 == number)) for number in on_channels)
        left_out = sum(int(np.sum(at // 4 == n)) for n, out_ in enumerate(is_left_out) if out_)
        assert len(sent) + num_present == at.size - left_out


def test_a_product_of_factors_travels_whole():
    left, right = dense(0, np.ones(40)).values, dense(0, np.ones(40)).values
    block = LowRankBlock(0, 1600, None, left, right, 1, 0)
    out, _ = routed(Dgt(dgt_k=0.0, **SMALL), shard_of(1600), [block])
    assert out.reliable[0] is block and out.unreliable == ()
    assert (out.num_blocks, out.num_reliable) == (400, 400)


# -- sparse blocks ------------------------------------------------------------------------------


def test_a_sparse_packet_is_blocked_by_range():
    policy = Dgt(dgt_k=0.4, dgt_channels=2, **SMALL)
    at, values = [0, 1, 5, 12, 13, 14, 17], [1, -1, 3, 0.5, 0.5, 0.5, 9]
    out, state = routed(policy, shard_of(24), [sparse(0, 24, at, values)])
    np.testing.assert_allclose(
        state["shards"][0]["averages"][0], 0.7 * np.array([2, 3, 0, 1.5, 9, 0]) / 4, rtol=1e-6
    )
    # Blocks 2 and 5 have no entries, 5 is the end all the same: n = 5, R = 2.
    (part,) = out.unreliable
    assert part.blocks.tolist() == [0, 3] and part.channels.tolist() == [1, 2]
    assert part.indices.tolist() == at and part.data.tolist() == values
    (block,) = out.reliable
    assert block.indices.tolist() == [5, 17] and block.values.data.tolist() == [3, 9]
    assert (out.num_blocks, out.num_skipped, out.num_reliable) == (6, 1, 3)


def test_a_sparse_packet_without_an_entry_in_the_end_still_has_a_reliable_block():
    policy = Dgt(dgt_k=0.0, **SMALL)
    out, _ = routed(policy, shard_of(24), [sparse(0, 24, [2], [1])])
    assert [(block.slot, block.indices.size) for block in out.reliable] == [(0, 0)]
    assert out.unreliable[0].blocks.tolist() == [0]


def test_averages_of_what_a_packet_leaves_out_decay():
    policy = Dgt(dgt_k=0.5, dgt_alpha=0.5, **SMALL)
    _, state = routed(policy, shard_of(12, 12), [dense(0, np.ones(12)), dense(1, np.ones(12))])
    _, state = routed(policy, shard_of(12, 12), [sparse(0, 12, [1], [4])], state)
    averages = state["shards"][0]["averages"]
    np.testing.assert_array_equal(averages[0], np.array([0.75, 0.25, 0.25], FLOAT))
    np.testing.assert_array_equal(averages[1], np.full(3, 0.25, FLOAT))


# -- controls -----------------------------------------------------------------------------------


def test_dropping_at_the_sender_leaves_the_reliable_part_alone():
    blocks = [dense(0, blocks_of(*range(10, 0, -1)))]
    kept, _ = routed(Dgt(dgt_k=0.5, **SMALL), shard_of(40), blocks)
    policy = Dgt(dgt_k=0.5, dgt_send_drop=True, **SMALL)
    out, _ = routed(policy, shard_of(40), blocks)
    assert out.unreliable == () and policy.uses_datagrams and not policy.delivers_all
    assert (out.num_dropped, out.num_reliable) == (4, 6)
    assert routers.same_bits(out.reliable, kept.reliable)


def drawn_blocks(policy, **about):
    blocks = [dense(0, np.ones(400)), dense(1, np.ones(400))]
    out, _ = routed(policy, shard_of(400, 400), blocks, **about)
    return [part.blocks.tolist() for part in out.unreliable]


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_a_random_order_is_drawn_from_seed_worker_tensor_and_step(scope):
    policy = Dgt(dgt_k=0.5, dgt_random="1", dgt_scope=scope, **SMALL)
    first = drawn_blocks(policy)
    assert first == drawn_blocks(policy)
    assert first[0] != first[1]
    for other in ({"step": 2}, {"seed": 6}, {"worker": 2}):
        assert drawn_blocks(policy, **other) != first


def test_the_fixed_order_never_changes():
    policy = Dgt(dgt_k=0.5, dgt_random="fixed", **SMALL)
    first = drawn_blocks(policy)
    assert first[0] == first[1] != list(range(50, 99))
    assert drawn_blocks(policy, step=2, seed=6, worker=3) == first


def test_a_router_without_datagrams_counts_no_blocks():
    blocks = (dense(0, [1.0]),)
    out, _ = routed(Reliable(), shard_of(1), blocks)
    assert out.reliable == blocks and out.unreliable == ()
    counts = (out.num_blocks, out.num_skipped, out.num_reliable, out.num_dropped)
    assert (*counts, out.num_nonfinite) == (0, 0, 0, 0, 0)
