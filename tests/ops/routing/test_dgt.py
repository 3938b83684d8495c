"""DGT's sender: contributions, k, ranks, channels and reliable parts, computed by hand."""

import numpy as np
import pytest

from tests.ops import routers
from tests.ops.routers import (
    FLOAT,
    blocks_of,
    channels_of,
    dense,
    routed,
    shard_of,
    together,
)
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.dgt_partition import at_random, channels_by_rank, num_first
from thinwire.ops.types import ConfigurationError, RangedBlock

SMALL = {"dgt_block_size": 16}  # four entries


# -- the fraction k -----------------------------------------------------------------------------


def ks(policy, *losses):
    state, found = policy.init(shard_of(9)), []
    for loss in losses:
        state = policy.begin(state, routers.context(loss=loss))
        found.append(state["k"])
    return found


ADAPTIVE = {"dgt_k": 0.8, "dgt_k_min": 0.2, "dgt_adaptive_k": True}


def test_k_follows_the_loss():
    found = ks(Dgt(**ADAPTIVE), 2.3, 1.15, 0.23, 2.6)
    assert found == pytest.approx([0.8, 0.40, 0.20, 0.8 * 2.6 / 2.3])
    assert ks(Dgt(**ADAPTIVE), 2.3, 23.0)[-1] == 1.0  # never more than all
    assert ks(Dgt(dgt_k=0.7), 2.3, 1.0) == [0.7, 0.7]


@pytest.mark.parametrize("nothing", [None, float("nan"), float("inf")])
def test_k_stays_where_there_is_no_loss(nothing):
    assert ks(Dgt(**ADAPTIVE), nothing, 2.0, 1.0, nothing) == pytest.approx([0.8, 0.8, 0.4, 0.4])


def test_the_first_loss_that_is_not_zero_is_the_measure():
    assert ks(Dgt(**ADAPTIVE), 0.0, 2.0, 1.0) == pytest.approx([0.8, 0.8, 0.4])
    assert ks(Dgt(**ADAPTIVE), -1.0, 2.0, 1.0) == [0.8, 0.8, 0.8]


def test_a_smoothed_loss():
    policy = Dgt(**ADAPTIVE, dgt_loss_ema=0.5)
    assert ks(policy, 2.0, 1.0, 1.0) == pytest.approx([0.8, 0.8 * 0.75, 0.8 * 0.625])


def test_one_k_for_all_shards_of_an_exchange():
    layouts = shard_of(40) * 2
    policy = Dgt(**ADAPTIVE, **SMALL)
    state, now = policy.init(layouts), None
    for loss in (2.0, 1.0):
        now = routers.context(loss=loss)
        state = policy.begin(state, now)
        parts = [policy.cut(shard, (dense(0, np.ones(40)),), state, now)[0] for shard in (0, 1)]
    assert [part.k for part in parts] == pytest.approx([0.4, 0.4])


# -- ranks and channels -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "channels", "k", "wanted"),
    [
        (10, 3, 0.8, "000000001E"),
        (10, 3, 0.5, "000001123E"),
        (10, 7, 0.2, "001234567E"),
        (11, 3, 0.0, "1111222333E"),
        (5, 7, 0.5, "0001E"),
        (10, 3, 1.0, "000000000E"),
        (1, 3, 0.0, "E"),
    ],
)
def test_channels_by_hand(n, channels, k, wanted):
    assert "".join(map(str, channels_by_rank(n - 1, 1, k, channels))) + "E" == wanted


@pytest.mark.parametrize(
    ("n", "k", "first"), [(5, 0.5, 3), (90, 0.35, 32), (7, 0.8, 6), (8, 0.8, 6), (1, 0.5, 1)]
)
def test_the_first_ranks_are_rounded_half_up_in_float32(n, k, first):
    assert num_first(n, k) == first


def channels_by_walking(n, k, num_channels):
    """Walk from rank to rank; a channel ends where its exact share of the ranks is used up."""
    first = int(np.floor(float(FLOAT(k) * FLOAT(n)) + 0.5))
    behind_first, channel, found = n - 1 - first, 1, []
    for position in range(n - 1):
        behind = position - first
        while behind * num_channels >= channel * behind_first > 0:
            channel += 1
        found.append(channel if behind >= 0 else 0)
    return found


@pytest.mark.parametrize("k", [0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0])
def test_the_closed_form_equals_the_walk(k):
    for n in range(1, 200):
        for num_channels in (1, 2, 3, 5, 7):
            found = channels_by_rank(n - 1, 1, k, num_channels)
            assert found.tolist() == channels_by_walking(n, k, num_channels)


def test_the_forced_come_first_at_random_too():
    forced = np.array([0, 0, 0, 0, 0, 1], bool)
    order = at_random((1, 2), forced)
    assert order[0] == 5 and sorted(order) == list(range(6))
    np.testing.assert_array_equal(order, at_random((1, 2), forced))
    assert channels_by_rank(6, 1, 0.0, 2, num_forced=2).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_tensor_is_cut_by_rank():
    values = blocks_of(5, 1, 9, 2, 8, 3, 7, 4, 6, 0.5)
    out, _ = routed(Dgt(dgt_k=0.5, **SMALL), shard_of(40), [dense(0, values)])
    #                                    9 8 7 6 5 reliable; 4 3 on 1, 2 on 2, 1 on 3; the end
    assert channels_of(out, 0, 10) == [0, 3, 0, 2, 0, 1, 0, 1, 0, 0]
    (part,) = out.unreliable
    assert part.blocks.tolist() == [7, 5, 3, 1] and part.channels.tolist() == [1, 1, 2, 3]
    (block,) = out.reliable
    assert isinstance(block, RangedBlock) and (block.size, block.block_entries) == (40, 4)
    np.testing.assert_array_equal(block.values.data, blocks_of(5, 9, 8, 7, 6, 0.5))
    assert (out.num_blocks, out.num_reliable, out.num_skipped, out.num_dropped) == (10, 6, 0, 0)
    np.testing.assert_array_equal(together(out, [40])[0], values)


def test_ranks_go_by_the_average_not_by_the_present_alone():
    policy, layouts = Dgt(dgt_k=0.25, dgt_alpha=0.9, dgt_channels=1, **SMALL), shard_of(12)
    state = None
    for magnitudes, reliable in (((5, 1, 1), 0), ((1, 2, 1), 0), ((0.1, 9, 1), 1)):
        out, state = routed(policy, layouts, [dense(0, blocks_of(*magnitudes))], state)
        assert channels_of(out, 0, 3)[reliable] == 0
        assert channels_of(out, 0, 3)[1 - reliable] == 1


def test_a_short_last_block_is_reliable_and_averaged_over_what_it_has():
    policy = Dgt(dgt_k=0.0, **SMALL)
    out, state = routed(policy, shard_of(10), [dense(0, np.full(10, 2.0))])
    assert channels_of(out, 0, 3) == [1, 2, 0]
    np.testing.assert_allclose(state["shards"][0]["averages"][0], [1.4, 1.4, 1.4], rtol=1e-6)


def test_each_tensor_by_itself_or_all_together():
    small, large = np.full(20, 1.0), np.full(20, 100.0)
    blocks = [dense(0, small), dense(1, large), dense(2, [7.0])]
    alone, _ = routed(Dgt(dgt_k=0.5, **SMALL), shard_of(20, 20, 1), blocks)
    assert channels_of(alone, 0, 5) == channels_of(alone, 1, 5) == [0, 0, 0, 1, 0]
    both, _ = routed(Dgt(dgt_k=0.5, dgt_scope="model", **SMALL), shard_of(20, 20, 1), blocks)
    # 11 blocks, R = 6. 3 blocks are ends, and R does not count one end: 4 remain for the ranks.
    assert channels_of(both, 1, 5) == [0, 0, 0, 0, 0]
    assert channels_of(both, 0, 5) == [1, 1, 2, 3, 0]
    assert (both.num_blocks, both.num_reliable) == (11, 7)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"dgt_channels": 8}, "dgt_channels=8: expected 0 to 7"),
        ({"dgt_block_size": 0}, "dgt_block_size=0: expected 4"),
        ({"dgt_block_size": 10}, "multiple of 4"),
        ({"dgt_k": 1.1}, "expected 0 to 1"),
        ({"dgt_low_bits": 2}, "32, 16, 8 or 4"),
        ({"dgt_error_feedback": True}, "Set --dgt_reception=drop"),
        ({"dgt_send_drop": True, "dgt_low_bits": 8}, "leave out"),
    ],
)
def test_impossible_values_are_refused(choices, words):
    with pytest.raises(ConfigurationError, match=words):
        Dgt(**choices)


@pytest.mark.parametrize(
    ("name", "least", "most", "step"),
    [
        ("dgt_channels", 0, 7, 1),
        ("dgt_block_size", 4, 2**31 - 4, 4),
        ("dgt_max_late", 0, 2**31 - 1, 1),
        ("dgt_wait_ms", 0, 3_600_000, 1),
        ("dgt_k", 0, 1, 0.001),
        ("dgt_k_min", 0, 1, 0.001),
        ("dgt_alpha", 0, 1, 0.001),
        ("dgt_late_decay", 0, 1, 0.001),
        ("dgt_loss_ema", 0, 0.9999, 0.0001),
    ],
)
def test_bounds_are_legal_and_the_next_values_are_not(name, least, most, step):
    for value in (least, most):
        assert getattr(Dgt(**{name: value}), name) == value
    for value in (least - step, most + step):
        with pytest.raises(ConfigurationError, match=f"--{name}="):
            Dgt(**{name: value})


def test_nothing_late_is_sent_where_it_would_be_dropped():
    assert Dgt(dgt_max_late=3).max_late == 3
    assert Dgt(dgt_max_late=3, dgt_reception="drop").max_late == 0


def method(**choices):
    return compose(Choices.of(method="dgt", nb_workers=2, **choices))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"dgt_low_bits": 8}, "--dgt_low_bits=8"),
        ({"dgt_error_feedback": True, "dgt_reception": "drop"}, "--dgt_error_feedback"),
    ],
)
def test_values_are_coded_in_few_bits_once(choices, words):
    with pytest.raises(ConfigurationError, match=f"--value_dtype=int8 with {words}"):
        method(value_dtype="int8", **choices)


def test_settings_of_another_router_are_refused():
    with pytest.raises(ConfigurationError, match="--dgt_k=0.5 is for --router=dgt"):
        compose(Choices.of(method="bsp", nb_workers=2, dgt_k=0.5))
    assert method(dgt_k=0.5).router == Dgt(dgt_k=0.5)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"dgt_channels": 0}, "--dgt_channels=0"),
        ({"dgt_k": 1.0}, "--dgt_k=1"),
        ({"dgt_enable_block": False}, "DGT has no effect"),
        ({"dgt_k_min": 0.5}, "k never changes"),
        ({"dgt_loss_ema": 0.5}, "does not follow"),
        ({"overrides": {"codec": "powersgd"}}, "factors"),
    ],
)
def test_choices_without_effect_are_warned_of(choices, words):
    assert any(words in text for text in method(**choices).warnings)
    assert not any(words in text for text in method().warnings)
