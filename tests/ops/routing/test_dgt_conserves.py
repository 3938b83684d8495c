"""DGT's cutting loses nothing: all parts plus the residual equal the input."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops import routers
from tests.ops.routers import (
    BODIES,
    FLOAT,
    context,
    dense,
    entries_of,
    lost_of,
    shard_of,
    sparse,
    together,
)
from tests.virtual.toy import method
from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.sharding.split import place_tensors, split_packet
from thinwire.ops.types import VALUE_DTYPES, ModelSpec, TensorSpec

SPEC = ModelSpec(
    (TensorSpec("kernel", (9, 9)), TensorSpec("bias", (9,)), TensorSpec("thin", (1, 30)))
)
FEEDBACK = {"dgt_error_feedback": True, "dgt_reception": "drop"}


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=8, deadline=None)
@given(
    k=st.sampled_from([0.0, 0.3, 0.8]),
    channels=st.integers(1, 7),
    seed=st.integers(0, 99),
    scope=st.sampled_from(["tensor", "model"]),
    entries=st.sampled_from([1, 4, 7, 32]),
)
def test_all_parts_together_are_the_codec_s_packet(codec, dtype, k, channels, seed, scope, entries):
    chosen = method(
        "asgd", nb_workers=1, compression_rate=0.3, value_dtype=dtype, overrides={"codec": codec}
    ).codec
    policy = Dgt(dgt_k=k, dgt_channels=channels, dgt_scope=scope, dgt_block_size=4 * entries)
    layouts = place_tensors(SPEC, 2)
    state, codec_state = policy.init(layouts), chosen.init(SPEC, BODIES)
    rng = np.random.default_rng(seed)
    for step in (1, 2):
        gradients = [rng.standard_normal(tensor.size, FLOAT) for tensor in SPEC.tensors]
        gradients[0][:40] = 0
        packet, codec_state = chosen.encode(
            gradients, codec_state, EncodeContext(step, 0.1, rng, BODIES)
        )
        now = context(step)
        state = policy.begin(state, now)
        for shard, blocks in enumerate(split_packet(packet, layouts)):
            sizes = [piece.size for piece in layouts[shard].slices]
            out, state = policy.cut(shard, blocks, state, now)
            for one, other in zip(together(out, sizes), entries_of(blocks, sizes), strict=True):
                assert (one + FLOAT(0)).tobytes() == (other + FLOAT(0)).tobytes()  # -0 is 0
            counted = out.num_reliable + out.num_skipped
            counted += sum(part.blocks.size for part in out.unreliable)
            assert (
                counted == out.num_blocks == sum(policy.num_blocks(block.size) for block in blocks)
            )


def drawn_blocks(rng, sizes, is_dense):
    """One packet's blocks: dense or sparse ones, a slot of a sparse packet may be missing."""
    blocks = []
    for slot, size in enumerate(sizes):
        values = rng.standard_normal(size).astype(FLOAT)
        if is_dense:
            blocks.append(dense(slot, values))
        elif rng.random() < 0.8:
            at = np.flatnonzero(rng.random(size) < 0.4)
            blocks.append(sparse(slot, size, at, values[at]))
    return blocks


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("feedback", [True, False])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    loss=st.sampled_from([0.0, 0.3, 1.0]),
    denseness=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_what_arrives_and_what_is_kept_is_what_was_given(bits, feedback, seed, loss, denseness):
    if not feedback:
        loss = 0.0
    policy = Dgt(dgt_k=0.3, dgt_block_size=16, dgt_low_bits=bits, **(FEEDBACK if feedback else {}))
    sizes = [37, 3, 64]
    rng, layouts = np.random.default_rng(seed), shard_of(*sizes)
    state = policy.init(layouts)
    given_sum, delivered = ([np.zeros(size, float) for size in sizes] for _ in range(2))
    for step in range(6):
        gone = {(slot, number) for slot in range(3) for number in range(16) if rng.random() < loss}
        blocks = drawn_blocks(rng, sizes, rng.random() < denseness)
        out, state = routers.routed(policy, layouts, blocks, state, step=step)
        arrives = lambda slot, number, gone=gone: (slot, number) not in gone  # noqa: E731
        lost = lost_of(out, arrives)
        for slot in range(3):
            given_sum[slot] += entries_of(blocks, sizes)[slot]
            delivered[slot] += together(out, sizes, arrives)[slot]
        state = policy.undelivered(0, lost, state)
    if policy.keeps:
        kept = state["shards"][0]["kept"]
        for slot in range(3):
            total = delivered[slot] + kept["residual"][slot]
            np.testing.assert_allclose(total, given_sum[slot], atol=2e-5)
            assert kept["holds"][slot] or not kept["residual"][slot].any()


def test_a_lost_range_goes_into_the_next_dense_gradient_before_its_contribution():
    policy = Dgt(dgt_k=0.5, dgt_channels=1, dgt_block_size=16, **FEEDBACK)
    layouts = shard_of(12)
    out, state = routers.routed(policy, layouts, [dense(0, routers.blocks_of(3, 1, 2))])
    assert out.unreliable == ()  # n = 3, R = 2
    policy = Dgt(dgt_k=0.2, dgt_channels=1, dgt_block_size=16, **FEEDBACK)
    out, state = routers.routed(policy, layouts, [dense(0, routers.blocks_of(3, 2, 2))])
    assert out.unreliable[0].blocks.tolist() == [1]
    state = policy.undelivered(0, lost_of(out, lambda slot, number: False), state)
    gradient = dense(0, routers.blocks_of(3, 2, 2))
    out, state = routers.routed(policy, layouts, [gradient], state)
    assert out.unreliable[0].blocks.tolist() == [0]  # 4 on average by now
    np.testing.assert_array_equal(together(out, [12])[0], routers.blocks_of(3, 4, 2))
    np.testing.assert_array_equal(gradient.values.data, routers.blocks_of(3, 2, 2))


def test_lost_positions_are_named_by_the_next_sparse_packet_even_alone():
    policy = Dgt(dgt_k=0.0, dgt_channels=1, dgt_block_size=16, **FEEDBACK)
    layouts = shard_of(24, 24)
    blocks = [sparse(0, 24, [1, 6, 7, 22], [1, 2, 3, 4])]
    out, state = routers.routed(policy, layouts, blocks)
    state = policy.undelivered(0, lost_of(out, lambda slot, number: number != 1), state)
    out, state = routers.routed(policy, layouts, [sparse(0, 24, [6, 9], [10, 20])], state)
    assert out.unreliable[0].indices.tolist() == [6, 7, 9]
    assert out.unreliable[0].data.tolist() == [12, 3, 20]
    state = policy.undelivered(0, lost_of(out, lambda slot, number: number == 2), state)
    out, state = routers.routed(policy, layouts, [], state)  # the codec has nothing to send
    assert out.unreliable[0].indices.tolist() == [6, 7]
    state = policy.undelivered(0, (), state)
    out, state = routers.routed(policy, layouts, [], state)
    assert out.reliable == out.unreliable == ()


def test_what_is_merely_rounded_does_not_make_sparse_packets_denser():
    policy = Dgt(dgt_k=0.0, dgt_block_size=16, dgt_low_bits=4)
    layouts, rng = shard_of(64), np.random.default_rng(1)
    state = policy.init(layouts)
    for step in range(5):
        at = np.sort(rng.permutation(64)[:12])
        blocks = [sparse(0, 64, at, rng.standard_normal(12))]
        out, state = routers.routed(policy, layouts, blocks, state, step=step)
        state = policy.undelivered(0, (), state)
        assert all(part.indices.size == 12 for part in out.unreliable)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("bits", [32, 4])
def test_a_refused_push_is_taken_back(bits, is_dense):
    policy = Dgt(dgt_k=0.2, dgt_block_size=16, dgt_low_bits=bits, **FEEDBACK)
    sizes = [60, 44]
    layouts, rng = shard_of(*sizes), np.random.default_rng(2)
    state = policy.init(layouts)
    for step in range(4):
        blocks = drawn_blocks(rng, sizes, is_dense)
        out, state = routers.routed(policy, layouts, blocks, state, step=step)
        state = policy.undelivered(0, lost_of(out, lambda slot, number: number % 2), state)
    kept = state["shards"][0]["kept"]
    before = [residual.copy() for residual in kept["residual"]], [at.copy() for at in kept["owed"]]
    assert any(residual.any() for residual in before[0])
    for _ in range(2):
        _, state = routers.routed(policy, layouts, drawn_blocks(rng, sizes, is_dense), state)
        state = policy.undelivered(0, None, state)
        kept = state["shards"][0]["kept"]
        assert routers.same_bits(before, (kept["residual"], kept["owed"]))


def test_few_bits_come_with_what_decodes_them():
    policy = Dgt(dgt_k=0.0, dgt_channels=2, dgt_block_size=16, dgt_low_bits=8)
    values = np.concatenate([[1, 1, 1, 1], [0, 1, 2, 4], [9, 9, 9, 9]])
    out, state = routers.routed(policy, shard_of(12), [dense(0, values)])
    (part,) = out.unreliable
    assert part.encoding.name == "UINT8" and part.data.dtype == np.uint8
    np.testing.assert_array_equal(part.lows[:2], [1, 0])
    np.testing.assert_array_equal(part.scales[:2], np.array([0, 4 / 256], FLOAT))
    np.testing.assert_array_equal(part.data[:8], [0, 0, 0, 0, 0, 64, 128, 255])
    errors = state["shards"][0]["kept"]["residual"][0]
    np.testing.assert_allclose(errors, [0] * 4 + [-1 / 128] * 3 + [1 / 128] + [0] * 4, atol=1e-6)


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_a_codec_s_scale_reaches_the_shard(dtype):
    block = dense(0, np.arange(1, 13), dtype)
    values = dataclasses.replace(block.values, scale=block.values.scale * 0.5)
    block = dataclasses.replace(block, values=values)
    out, _ = routers.routed(Dgt(dgt_k=0.0, dgt_block_size=16), shard_of(12), [block])
    np.testing.assert_array_equal(together(out, [12])[0], entries_of([block], [12])[0])
    np.testing.assert_allclose(together(out, [12])[0], np.arange(1, 13) / 2, atol=0.05)
