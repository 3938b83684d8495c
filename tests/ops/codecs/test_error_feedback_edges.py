"""Edge cases of residuals and momenta: zeros, ties, NaN, rejected pushes, changed rates."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.residuals import (
    BODIES,
    OTHERS,
    SPEC,
    build,
    context,
    dense,
    drive,
    flat,
    gradients,
    top,
)
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.codecs.dense import Dense
from thinwire.ops.codecs.error_feedback import MomentumCorrection
from thinwire.ops.codecs.packets import decoded
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.types import Kind
from thinwire.ops.wire.blocks import IndexChooser, decode_block


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("below", [0, 50])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), scale=st.sampled_from([1.0, 1e-20, 1e20]))
def test_as_many_are_sent_as_asked_for(name, below, seed, scale):
    codec = build(name, dense_below=below)
    rng = np.random.default_rng(seed)
    given = [
        np.float32(scale) * rng.standard_normal(tensor.size, np.float32) for tensor in SPEC.tensors
    ]
    packet, _ = codec.encode(given, codec.init(SPEC, BODIES), context())
    sizes = [block.values.data.size for block in packet.blocks]
    assert sizes == ([40, 1, 30] if below else [40, 1, 3])
    assert [block.slot for block in packet.blocks] == [0, 1, 2]
    assert [block.indices is None for block in packet.blocks] == [False, bool(below), bool(below)]


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_comes_of_zeros_and_ties_go_to_the_lowest(name):
    codec = build(name)
    zeros = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
    packet, state = codec.encode(zeros, codec.init(SPEC, BODIES), context())
    assert (packet.blocks, packet.kind) == ((), Kind.DELTA)
    ones = [np.ones(tensor.size, np.float32) for tensor in SPEC.tensors]
    packet, state = codec.encode(ones, state, context())
    np.testing.assert_array_equal(packet.blocks[0].indices, range(40))
    few = [value.copy() for value in zeros]
    few[2][29] = 1
    packet, _ = codec.encode(few, codec.init(SPEC, BODIES), context())
    assert [(block.slot, block.indices.tolist()) for block in packet.blocks] == [(2, [29])]


def arrays_of(state):
    """Copies of every array of a state, in order."""
    if isinstance(state, dict):
        return [copy for value in state.values() for copy in arrays_of(value)]
    if isinstance(state, list):
        return [copy for value in state for copy in arrays_of(value)]
    return [np.copy(state)]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_touches_no_buffer(name, bad, clip):
    codec = build(name, **({"dgc_clip_norm": clip} if name == "dgc" else {}))
    _, state = drive(codec, 3)
    before = arrays_of(state)
    spoilt = gradients(4)
    spoilt[2][7] = bad
    with pytest.raises(NonFiniteUpdate, match="tensor 2"):
        codec.encode(spoilt, state, context())
    for one, other in zip(before, arrays_of(state), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_was_refused_is_sent_later(name, dtype):
    momenta = {"dgs": {"dgs_momentum": 0.5}, "dgc": {"dgc_momentum": 0.0}}.get(name, {})
    codec = build(name, value_dtype=dtype, **momenta)
    _, state = drive(codec, 5)
    before = np.concatenate(codec_residual(state)).copy()
    zeros = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
    packet, state = codec.encode(zeros, state, context())
    state = codec.undelivered(packet, state)
    np.testing.assert_allclose(np.concatenate(codec_residual(state)), before, atol=1e-6)


def codec_residual(state):
    while "residual" not in state:
        state = state["inner"]
    return state["residual"]


def test_a_change_of_the_rate():
    """The residual of dgs and gd contains its steps' rates; dgc's residual gets the new rate."""
    for name, old in (("gd", 0.1), ("dgs", 0.1), ("dgc", 0.01)):
        momenta = {"dgc_momentum": 0.0} if name == "dgc" else {}
        codec = build(name, **momenta)
        first, state = codec.encode(gradients(1), codec.init(SPEC, BODIES), context(rate=0.1))
        zeros = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
        second, _ = codec.encode(zeros, state, context(rate=0.01))
        rest = np.where(dense(first) == 0, flat(1), 0)
        if name == "dgs":
            rest += 0.7 * np.where(dense(first) == 0, 0, flat(1))
        expected = -old * rest * top(rest)
        np.testing.assert_allclose(dense(second), expected, rtol=1e-5)


@pytest.mark.parametrize("name", CODECS)
def test_factors_are_those_of_the_tensors(name):
    """A wrapper may leave the multiplying to the codec that it is around."""
    from thinwire.ops.codecs.packets import encode_multiplied

    codec = build(name, **({"warmup_epochs": 2} if name == "topk" else {}))
    doubled = [2 * tensor for tensor in gradients(1)]
    expected, _ = codec.encode(doubled, codec.init(SPEC, BODIES), context())
    given = context(factors=(2.0,) * 3)
    packet, _ = encode_multiplied(codec, gradients(1), codec.init(SPEC, BODIES), given)
    np.testing.assert_allclose(dense(packet), dense(expected), rtol=1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_a_packet_is_not_changed_by_what_follows(name):
    """Its values may be views of the tensors, but not of a buffer of the codec."""
    codec = build(name, compression_rate=1.0)
    state = codec.init(SPEC, BODIES)
    given = gradients(1)
    packet, state = codec.encode(given, state, context())
    before = dense(packet)
    codec.encode(gradients(2), state, context(2))
    np.testing.assert_array_equal(dense(packet), before)
    for tensor, untouched in zip(given, gradients(1), strict=True):
        np.testing.assert_array_equal(tensor, untouched)


def test_clipping_by_tensor():
    codec = build("dgc", compression_rate=1.0, dgc_clip_norm=2.0, dgc_clip_scope="tensor")
    packet, _ = codec.encode(gradients(1), codec.init(SPEC, BODIES), context())
    for block, tensor in zip(packet.blocks, gradients(1), strict=True):
        expected = -0.1 * tensor * min(1, 1.0 / np.linalg.norm(tensor))
        np.testing.assert_allclose(BODIES.dequantise(block.values), expected, rtol=1e-5)
    huge = [tensor * np.float32(1e25) for tensor in gradients(1)]
    packet, _ = codec.encode(huge, codec.init(SPEC, BODIES), context())
    assert np.linalg.norm(dense(packet)[:400]) == pytest.approx(0.1, rel=1e-4)


def test_policies_say_what_they_are_made_of():
    from thinwire.ops.policy import describe

    told = describe(build("dgs", dense_below=5))
    assert told["inner"] == "ErrorFeedback" and told["ErrorFeedback.inner"] == "DenseBelow"
    assert told["DenseBelow.entries"] == 5 and told["TopK.compression_rate"] == 0.1
    assert all(not dataclasses.is_dataclass(value) for value in told.values())


def test_a_gradient_that_is_not_finite_lets_nothing_decay():
    codec = build("chunked_topk", error_feedback=True, error_decay=0.5, warmup_epochs=None)
    _, state = drive(codec, 3)
    before = np.concatenate(state["residual"])
    spoilt = [tensor * np.float32(math.nan) for tensor in gradients(4)]
    with pytest.raises(NonFiniteUpdate):
        codec.encode(spoilt, state, context())
    np.testing.assert_array_equal(np.concatenate(state["residual"]), before)


def test_masking_clears_the_velocity_and_not_what_is_on_its_way():
    codec = MomentumCorrection(Dense(), momentum=0.5)
    packet, state = codec.encode(gradients(1), codec.init(SPEC, BODIES), context())
    np.testing.assert_array_equal(dense(packet), np.concatenate(gradients(1)))
    assert not np.concatenate(state["velocity"]).any()


@pytest.mark.parametrize("name", ["gd", "dgs"])
def test_all_that_is_kept_back_can_be_sent_within_the_warm_up(name):
    momenta = {"dgs_momentum": 0.0} if name == "dgs" else {}
    codec = build(name, compression_rate=0.01, warmup_epochs=1, **momenta)  # a tenth, at first
    sent, state = drive(codec, 3, epoch=0.5)
    zeros = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
    packet, state = codec.encode(zeros, state, context(epoch=0.5, keep=1.0))
    expected = -0.1 * sum(flat(number) for number in (1, 2, 3))
    np.testing.assert_allclose(sent.sum(axis=0) + dense(packet), expected, atol=1e-6)
    assert not np.concatenate(codec_residual(state["inner"])).any()


def test_at_a_rate_of_0_nothing_arrives():
    """On the wire a scale of 0 is one that is not given, and counts as 1."""
    codec = build("dgc")
    packet, _ = codec.encode(gradients(1), codec.init(SPEC, BODIES), context(rate=0.0))
    assert packet.blocks
    for block in map(IndexChooser().encode, packet.blocks):
        arrived = decode_block(
            block.slot,
            block.count,
            block.coding,
            block.coding_parameter,
            memoryview(block.index_bytes),
            block.value_dtype,
            block.scale,
            memoryview(block.value_bytes),
            SPEC.tensors[block.slot].size,
            block.value_coding,
        )
        assert np.abs(decoded(arrived)[1]).max() < 1e-30
