"""Every codec wrapper works around every codec and around every other wrapper."""

import copy
import functools
import itertools

import numpy as np
import pytest

from tests.ops import residuals
from tests.ops.test_conformance import bits
from thinwire.ops.codecs.base import EncodeContext, NonFiniteUpdate
from thinwire.ops.codecs.dense import Dense, RandomK
from thinwire.ops.codecs.error_feedback import ErrorFeedback, MomentumCorrection, residuals_of
from thinwire.ops.codecs.power_sgd import PowerSgd
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.codecs.top_k import TopK
from thinwire.ops.codecs.wrappers import Clip, DenseBelow, Descend, RateAtSend, WarmUp
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import Kind, ModelSpec, TensorSpec

BODIES = load_kernels("numpy")
SHAPES = {"kernel": (12, 10), "one": (1,), "bias": (30,), "cube": (3, 3, 2, 6), "scalar": ()}
SPEC = ModelSpec(tuple(TensorSpec(path, shape) for path, shape in SHAPES.items()))
gradients = functools.partial(residuals.gradients, spec=SPEC)
SMALL = 35  # below it: one, bias, scalar

BASES = {
    "dense": Dense("int8"),
    "topk": TopK(0.1),
    "topk-int8": TopK(0.1, "int8"),
    "topk-carried": TopK(0.1, "bfloat16", "carried"),
    "random_k": RandomK(0.1, "int8"),
    "powersgd": PowerSgd(2, "bfloat16"),
}
WRAPPERS = {
    "feedback": ErrorFeedback,
    "carry": lambda inner: ErrorFeedback(inner, 0.7),
    "momentum": MomentumCorrection,
    "nesterov": lambda inner: MomentumCorrection(inner, 0.9, nesterov=True),
    "clip": lambda inner: Clip(inner, 2.0),
    "warm_up": lambda inner: WarmUp(inner, 0.1, 3),
    "dense_below": lambda inner: DenseBelow(inner, SMALL),
    "descend": Descend,
    "rate_at_send": RateAtSend,
}
ONE_SIGN = {"descend", "rate_at_send"}  # one of them makes changes of weights
PAIRS = [
    pair
    for pair in [*((name,) for name in WRAPPERS), *itertools.product(WRAPPERS, repeat=2)]
    if sum(name in ONE_SIGN for name in pair) < 2
    if "dense_below" not in pair[:-1]  # it is directly around the codec
]


def wrapped(base, names):
    codec = BASES[base]
    for name in reversed(names):
        codec = WRAPPERS[name](codec)
    return codec


def context(number):
    rng = np.random.default_rng([7, number])
    return EncodeContext(number, 0.1, rng, BODIES, epoch=number * 0.7)


def drive(codec, state, numbers):
    sent = []
    for number in numbers:
        packet, state = codec.encode(gradients(number), state, context(number))
        assert [block.slot for block in packet.blocks] == sorted(b.slot for b in packet.blocks)
        sent.append(residuals.dense(packet, SPEC))
    return np.array(sent), state


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_any_wrapper_goes_around_any_codec_and_wrapper(base, names):
    codec = wrapped(base, names)
    sent, state = drive(codec, codec.init(SPEC, BODIES), range(1, 4))
    assert np.isfinite(sent).all() and sent.any()
    assert codec.kind is (Kind.DELTA if ONE_SIGN.intersection(names) else Kind.GRADIENT)

    zeros = [np.zeros_like(gradient) for gradient in gradients(1)]
    packet, state = codec.encode(zeros, state, context(4))
    state = codec.undelivered(packet, state)

    spoilt, before = gradients(5), bits(copy.deepcopy(state))
    spoilt[2][3] = np.nan
    with pytest.raises(NonFiniteUpdate):
        codec.encode(spoilt, state, context(5))
    assert bits(state) == before

    saved = copy.deepcopy(state)
    once, _ = drive(codec, state, range(6, 8))
    again, _ = drive(codec, saved, range(6, 8))
    np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("outer", [(), ("warm_up",)])
@pytest.mark.parametrize("inner", [(), ("dense_below",)])
def test_feedback_anywhere_keeps_what_is_not_sent(base, outer, inner):
    codec = wrapped(base, (*outer, "feedback", *inner))
    sent, state = drive(codec, codec.init(SPEC, BODIES), range(1, 31))
    while "residual" not in state:
        state = state["inner"]
    given = sum(np.concatenate(gradients(number)).astype(float) for number in range(1, 31))
    kept = np.concatenate(state["residual"])
    np.testing.assert_allclose(sent.sum(0, dtype=float) + kept, given, rtol=0, atol=1e-4)


@pytest.mark.parametrize("base", ["topk", "random_k", "powersgd"])
@pytest.mark.parametrize(
    "around", [("feedback",), ("momentum", "feedback"), ("descend", "carry"), ("clip",)]
)
def test_dense_below_sends_small_tensors_whole(base, around):
    codec = wrapped(base, (*around, "dense_below"))
    sent, _ = drive(codec, codec.init(SPEC, BODIES), range(1, 6))
    starts = SPEC.offsets
    small = [slot for slot, tensor in enumerate(SPEC.tensors) if tensor.size < SMALL]
    assert len(small) == 3
    for slot in small:
        # With int8 some codes are 0.
        assert (sent[:, starts[slot] : starts[slot + 1]] != 0).mean() > 0.9


def test_small_matrices_of_powersgd_travel_whole():
    codec = build_codec("powersgd", dict(dense_below=115))
    packet, _ = codec.encode(gradients(1), codec.init(SPEC, BODIES), context(1))
    assert [type(block).__name__ for block in packet.blocks] == [
        "LowRankBlock",
        "Block",
        "Block",
        "Block",
        "Block",
    ]


@pytest.mark.parametrize(
    "around",
    [("feedback",), ("feedback", "dense_below"), ("warm_up", "carry")],
)
def test_what_is_kept_back_is_found_whatever_goes_around_it(around):
    codec = wrapped("topk", around)
    _, state = drive(codec, codec.init(SPEC, BODIES), range(1, 4))
    inner = state
    while "residual" not in inner:
        inner = inner["inner"]
    found = residuals_of(codec, state)
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(inner["residual"]))
    without = wrapped("topk", ("dense_below",))
    assert residuals_of(without, without.init(SPEC, BODIES)) == []
