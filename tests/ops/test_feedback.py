"""Residuals and momenta against the equations of their papers, in ten lines of numpy each."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import codecs, kernels
from ops.base_codecs import decoded
from ops.codec_checks import NonFiniteUpdate
from ops.types import VALUE_DTYPES, EncodeContext, Kind, ModelSpec, TensorSpec

BODIES = kernels.load("numpy")
SPEC = ModelSpec((TensorSpec("w", (40, 10)), TensorSpec("one", (1,)), TensorSpec("b", (30,))))
KEPT = (40, 1, 3)  # of each tensor at a rate of 0.1
OTHERS = ("gd", "dgc", "dgs")


def context(number=1, rate=0.1, **fields):
    return EncodeContext(number, rate, np.random.default_rng([7, number]), BODIES, **fields)


def gradients(number):
    rng = np.random.default_rng([3, number])
    return [rng.standard_normal(tensor.size, np.float32) for tensor in SPEC.tensors]


def build(name, **choices):
    warms_up = codecs.REGISTRY[name].base.sends_fraction
    choices = {"compression_rate": 0.1, "warmup_epochs": 0 if warms_up else None} | choices
    return codecs.build(name, codecs.CodecChoices(**choices), nb_workers=4)


def dense(packet):
    """A packet's values [all entries], 0 where nothing is sent."""
    flat = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
    for block in packet.blocks:
        where, values = decoded(block)
        flat[block.slot][where] = values
    return np.concatenate(flat)


def drive(codec, steps, **fields):
    """What is sent in each step, and the state at the end."""
    state, sent = codec.init(SPEC, BODIES), []
    for number in range(1, steps + 1):
        packet, state = codec.encode(gradients(number), state, context(number, **fields))
        sent.append(dense(packet))
    return np.array(sent), state


def top(values, kept=KEPT):
    """The mask of the largest of each tensor; ties to the lowest index, zeros never."""
    mask, start = np.zeros(len(values), bool), 0
    for tensor, count in zip(SPEC.tensors, kept, strict=True):
        part = np.abs(values[start : start + tensor.size])
        order = np.argsort(-part, kind="stable")[:count]
        mask[start + order[part[order] > 0]] = True
        start += tensor.size
    return mask


def flat(number):
    return np.concatenate(gradients(number)).astype(float)


def momentum_paper(steps, m, eta):
    """SAMomentum as the paper prints it."""
    u, sent = np.zeros(SPEC.num_parameters), []
    for number in range(1, steps + 1):
        u = m * u + eta * flat(number)
        mask = top(u)
        sent.append(-u * mask)
        u = np.where(mask, u, u / m)
    return np.array(sent)


def gradient_dropping(steps, eta):
    v, sent = np.zeros(SPEC.num_parameters), []
    for number in range(1, steps + 1):
        v += eta * flat(number)
        mask = top(v)
        sent.append(-v * mask)
        v *= 1 - mask
    return np.array(sent)


def deep(steps, m, eta, nesterov=False, masking=True, clip=None, kept=lambda step: KEPT):
    u, v, sent = np.zeros((2, SPEC.num_parameters)), np.zeros(SPEC.num_parameters), []
    u = u[0]
    for number in range(1, steps + 1):
        h = flat(number)
        if clip:
            h *= min(1.0, clip / np.linalg.norm(h))
        u = m * (u + h) if nesterov else m * u + h
        v = v + u + h if nesterov else v + u
        mask = top(v, kept(number))
        sent.append(-eta * v * mask)
        v = v * (1 - mask)
        u = u * (1 - mask) if masking else u
    return np.array(sent)


def test_dgs_is_the_momentum_of_the_paper_over_300_steps():
    sent, _ = drive(build("dgs", dgs_momentum=0.7), 300)
    np.testing.assert_allclose(sent, momentum_paper(300, 0.7, 0.1), rtol=0, atol=1e-6)


def test_without_momentum_dgs_is_gradient_dropping():
    sent, state = drive(build("gd"), 100)
    again, other = drive(build("dgs", dgs_momentum=0.0), 100)
    np.testing.assert_array_equal(sent, again)
    np.testing.assert_array_equal(
        np.concatenate(state["inner"]["residual"]), np.concatenate(other["inner"]["residual"])
    )
    np.testing.assert_allclose(sent, gradient_dropping(100, 0.1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("clip", [0.0, 5.0])
def test_dgc_against_numpy(nesterov, masking, clip):
    codec = build(
        "dgc", dgc_momentum=0.9, dgc_nesterov=nesterov, dgc_masking=masking, dgc_clip_norm=clip
    )
    expected = deep(40, 0.9, 0.1, nesterov, masking, clip / 2)  # / sqrt(4 workers)
    np.testing.assert_allclose(drive(codec, 40)[0], expected, rtol=0, atol=2e-5)


def test_dgc_warms_up():
    codec = build("dgc", warmup_epochs=4, compression_rate=0.001)
    state, fractions = codec.init(SPEC, BODIES), []
    for epoch in (0, 1.9, 2, 3, 4, 50):
        packet, state = codec.encode(gradients(1), state, context(epoch=epoch))
        fractions.append(packet.blocks[0].indices.size / 400)
    expected = [0.001 ** (exponent / 5) for exponent in (1, 2, 3, 4)]
    np.testing.assert_allclose(fractions[:4], expected, atol=1 / 400)
    assert fractions[4:] == [1 / 400, 1 / 400], "one entry at least"
    assert codecs.build("dgc", codecs.CodecChoices()).epochs == 4


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_what_is_sent_is_what_came_in(dtype, momentum):
    """Per entry: s_i = m s_{i-1} + eta * (gradients since), rounding errors included."""
    codec = build("dgs", dgs_momentum=momentum, value_dtype=dtype)
    sent, state = drive(codec, 60)
    given = -0.1 * np.array([flat(number) for number in range(1, 61)])
    kept = np.concatenate(state["inner"]["residual"])
    # What is left is what came in, less what of each sending has left for good.
    np.testing.assert_allclose(kept, given.sum(0) - (1 - momentum) * sent.sum(0), atol=2e-5)
    if dtype != "float32":
        return
    for entry in range(0, SPEC.num_parameters, 7):
        last, since = 0.0, 0.0
        for came, went in zip(given[:, entry], sent[:, entry], strict=True):
            since += came
            if went:
                assert went == pytest.approx(momentum * last + since, rel=1e-4, abs=1e-6)
                last, since = went, 0.0


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("name", ["dense", "topk", "random_k"])
def test_error_feedback_around_any_codec_loses_nothing(name, dtype):
    if (name, dtype) == ("dense", "float32"):
        return
    codec = build(name, error_feedback=True, value_dtype=dtype)
    sent, state = drive(codec, 50)
    assert codec.kind is Kind.GRADIENT
    given = sum(flat(number) for number in range(1, 51))
    np.testing.assert_allclose(
        sent.sum(0) + np.concatenate(state["residual"]), given, rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("name", OTHERS)
def test_everything_sent_without_momentum_is_sgd(name):
    momenta = {"dgs": {"dgs_momentum": 0.0}, "dgc": {"dgc_momentum": 0.0}}.get(name, {})
    sent, _ = drive(build(name, compression_rate=1.0, **momenta), 5)
    expected = [-0.1 * flat(number) for number in range(1, 6)]
    np.testing.assert_allclose(sent, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("selection", ["sampled", "carried"])
@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_selections_lose_nothing_either(name, scope, selection):
    codec = build(name, selection=selection, threshold_scope=scope)
    sent, state = drive(codec, 20)
    assert 20 * 30 < (sent != 0).sum() < 20 * 70
    if name != "dgc":
        momentum = 0.7 if name == "dgs" else 0.0
        given = -0.1 * sum(flat(number) for number in range(1, 21))
        kept = np.concatenate(state["inner"]["residual"])
        np.testing.assert_allclose(kept, given - (1 - momentum) * sent.sum(0), atol=2e-5)


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
    """What dgs and gd hold back holds the rates of its steps; dgc's backlog gets the new rate."""
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


def test_the_ratio_follows_the_rate():
    codec = codecs.build(
        "dgs", codecs.CodecChoices(compression_rate=0.1, ratio_schedule="lr"), learning_rate=0.2
    )
    for rate, count in ((0.2, 40), (0.1, 20), (0.002, 1)):
        packet, _ = codec.encode(gradients(1), codec.init(SPEC, BODIES), context(rate=rate))
        assert packet.blocks[0].indices.size == count


@pytest.mark.parametrize("name", codecs.REGISTRY)
def test_factors_are_those_of_the_tensors(name):
    """A wrapper may leave the multiplying to the codec that it is around."""
    from ops.base_codecs import encode_multiplied

    codec = build(name, **({"warmup_epochs": 2} if name == "topk" else {}))
    doubled = [2 * tensor for tensor in gradients(1)]
    expected, _ = codec.encode(doubled, codec.init(SPEC, BODIES), context())
    given = context(factors=(2.0,) * 3)
    packet, _ = encode_multiplied(codec, gradients(1), codec.init(SPEC, BODIES), given)
    np.testing.assert_allclose(dense(packet), dense(expected), rtol=1e-6)


@pytest.mark.parametrize("name", codecs.REGISTRY)
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
    from ops.types import describe

    told = describe(build("dgs", dense_below=5))
    assert told["inner"] == "ErrorFeedback" and told["ErrorFeedback.inner"] == "DenseBelow"
    assert told["DenseBelow.entries"] == 5 and told["TopK.compression_rate"] == 0.1
    assert all(not dataclasses.is_dataclass(value) for value in told.values())
