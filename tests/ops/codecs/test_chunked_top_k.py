"""Chunked top-k with decayed error feedback and few-bit values equals a numpy reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.packets import decoded
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import FEW_BITS, VALUE_DTYPES, ConfigurationError, ModelSpec, TensorSpec

BODIES = load_kernels("numpy")
SPEC = ModelSpec(
    (TensorSpec("kernel", (30, 10)), TensorSpec("bias", (7,)), TensorSpec("none", (0,)))
)
EVERY_DTYPE = [*VALUE_DTYPES, *FEW_BITS]


def build(name="chunked_topk", **choices):
    return build_codec(name, dict(**choices))


def context(number=0, keep=None):
    return EncodeContext(number, 0.1, np.random.default_rng(number), BODIES, keep=keep)


def updates(number):
    rng = np.random.default_rng(number)
    return [rng.standard_normal(tensor.size, np.float32) for tensor in SPEC.tensors]


def dense_of(packet):
    """Decode a packet to one array for each tensor."""
    found = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
    for block in packet.blocks:
        where, values = decoded(block)
        found[block.slot][where] = values
    return found


def kept_of(tensor, k, chunk):
    """SparseLoCo's top-k of each chunk, spelt out."""
    kept = np.zeros_like(tensor)
    for start in range(0, tensor.size, chunk):
        piece = tensor[start : start + chunk]
        count = -(-k * piece.size // chunk)
        places = np.argsort(-np.abs(piece), kind="stable")[:count] + start
        kept[places] = tensor[places]
    return kept


@pytest.mark.parametrize(("chunk", "k"), [(64, 3), (7, 7), (4096, 64), (1, 1)])
def test_float32_values_are_the_largest_of_each_chunk(chunk, k):
    codec = build(chunk=chunk, chunk_k=k)
    packet, _ = codec.encode(updates(1), codec.init(SPEC, BODIES), context())
    for found, tensor in zip(dense_of(packet), updates(1), strict=True):
        np.testing.assert_array_equal(found, kept_of(tensor, k, chunk))
    assert [block.indices is None for block in packet.blocks].count(True) == (k == chunk) * len(
        packet.blocks
    )


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_error_feedback_is_the_equation_bit_for_bit(dtype, decay):
    """e <- b e + D;  q = decoded packet;  e <- e - q, in float32."""
    codec = build(chunk=64, chunk_k=5, value_dtype=dtype, error_feedback=True, error_decay=decay)
    plain = build(chunk=64, chunk_k=5, value_dtype=dtype)
    state = codec.init(SPEC, BODIES)
    error = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
    for number in range(12):
        packet, state = codec.encode(updates(number), state, context(number))
        for each, update in zip(error, updates(number), strict=True):
            each *= np.float32(decay)
            each += update
        expected = dense_of(plain.encode(error, {}, context(number))[0])
        for sent, wanted in zip(dense_of(packet), expected, strict=True):
            np.testing.assert_array_equal(sent, wanted)
        for each, sent, kept in zip(error, expected, state["residual"], strict=True):
            each -= sent
            np.testing.assert_array_equal(kept, each)


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(EVERY_DTYPE),
    decay=st.sampled_from([1.0, 0.95, 0.5, 0.0]),
    chunk=st.integers(1, 70),
    kept=st.floats(0.01, 1.0),
    lost=st.sets(st.integers(0, 9)),
)
def test_nothing_is_lost_but_what_decays(dtype, decay, chunk, kept, lost):
    """Delivered + residual = sum of the updates, each update decayed once per step since.

    A push that does not arrive goes back into the residual.
    """
    codec = build(
        chunk=chunk,
        chunk_k=max(1, int(kept * chunk)),
        value_dtype=dtype,
        error_feedback=True,
        error_decay=decay,
    )
    state = codec.init(SPEC, BODIES)
    expected = [np.zeros(tensor.size) for tensor in SPEC.tensors]
    for number in range(10):
        packet, state = codec.encode(updates(number), state, context(number))
        sent = [np.zeros(tensor.size) for tensor in SPEC.tensors]
        if number in lost:
            state = codec.undelivered(packet, state)
        else:
            sent = dense_of(packet)
        for each, update, gone in zip(expected, updates(number), sent, strict=True):
            each *= decay
            each += update.astype(np.float64) - gone
        for each, residual in zip(expected, state["residual"], strict=True):
            np.testing.assert_allclose(residual, each, rtol=0, atol=2e-4)


def test_sign_with_error_feedback_is_the_scaled_sign():
    """EF-signSGD: p = e + g; sent mean|p| sign(p); e = p - sent, each chunk as a layer."""
    codec = build("dense", value_dtype="sign", error_feedback=True)
    state, error = codec.init(SPEC, BODIES), np.zeros(300)
    for number in range(20):
        packet, state = codec.encode(updates(number), state, context(number))
        wanted = error + updates(number)[0]
        sent = dense_of(packet)[0]
        np.testing.assert_allclose(sent, np.sign(wanted) * np.abs(wanted).mean(), rtol=0.01)
        error = wanted - sent
        np.testing.assert_allclose(state["residual"][0], error, atol=1e-4)


def test_everything_travels_where_it_is_asked_for():
    codec = build(chunk=64, chunk_k=5, value_dtype="int4", error_feedback=True)
    packet, _ = codec.encode(updates(1), codec.init(SPEC, BODIES), context(keep=1.0))
    assert [block.indices for block in packet.blocks] == [None] * 3
    assert packet.blocks[0].values.chunk == 64


def test_the_fraction_of_entries_stands_for_k():
    assert build().kept_fraction == 0.01 and build(chunk_k=64).kept_fraction == 64 / 4096
    packet, _ = build(compression_rate=0.1, chunk=50).encode(updates(1), {}, context())
    assert [block.indices.size for block in packet.blocks] == [30, 1]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"chunk": 0}, "--chunk=0: expected 1 or more"),
        ({"chunk": 8, "chunk_k": 9}, "--chunk_k=9: expected 1 to 8"),
        ({"chunk_k": 0}, "--chunk_k=0: expected 1"),
        ({"error_feedback": True, "error_decay": 1.5}, "--error_decay=1.5: expected 0 to 1"),
        ({"error_decay": 0.9}, "--error_decay=0.9 without --error_feedback"),
        ({"error_feedback": True, "error_ahead": 2}, "--error_ahead=2: expected 0 to 1"),
        ({"error_ahead": 0.5}, "--error_ahead=0.5 without --error_feedback"),
    ],
)
def test_illegal_choices_are_refused(choices, message):
    with pytest.raises(ConfigurationError, match=message):
        build(**choices)


def test_few_bits_are_refused_where_there_are_no_chunks():
    with pytest.raises(ConfigurationError, match="--value_dtype=int2.*float32"):
        build("powersgd", value_dtype="int2")
