"""Residuals and momenta equal the papers' equations, written as ten lines of numpy each."""

import numpy as np
import pytest

from tests.ops.residuals import (
    BODIES,
    KEPT,
    OTHERS,
    SPEC,
    build,
    context,
    drive,
    flat,
    gradients,
    top,
)
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.types import VALUE_DTYPES, Kind


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
    assert build_codec("dgc", dict()).epochs == 4


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_what_is_sent_is_what_came_in(dtype, momentum):
    """Per entry: s_i = m s_{i-1} + eta * (gradients since), rounding errors included."""
    codec = build("dgs", dgs_momentum=momentum, value_dtype=dtype)
    sent, state = drive(codec, 60)
    given = -0.1 * np.array([flat(number) for number in range(1, 61)])
    kept = np.concatenate(state["inner"]["residual"])
    # The residual is the sum of the inputs minus the sum of the applied updates.
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


@pytest.mark.parametrize("name", OTHERS)
def test_a_carried_threshold_loses_nothing_either(name):
    codec = build(name, selection="carried")
    sent, state = drive(codec, 20)
    assert 20 * 30 < (sent != 0).sum() < 20 * 70
    if name != "dgc":
        momentum = 0.7 if name == "dgs" else 0.0
        given = -0.1 * sum(flat(number) for number in range(1, 21))
        kept = np.concatenate(state["inner"]["residual"])
        np.testing.assert_allclose(kept, given - (1 - momentum) * sent.sum(0), atol=2e-5)
