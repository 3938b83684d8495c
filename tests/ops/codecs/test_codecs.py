"""Codecs send and reject the right values and change nothing else."""

import dataclasses
import math

import numpy as np
import pytest

from thinwire.ops.codecs.base import EncodeContext, NonFiniteUpdate, TouchedRows, kept_entries
from thinwire.ops.codecs.dense import Dense, RandomK
from thinwire.ops.codecs.packets import decoded
from thinwire.ops.codecs.registry import CODECS, build_codec
from thinwire.ops.codecs.top_k import TopK
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import (
    VALUE_DTYPES,
    ConfigurationError,
    Kind,
    LowRankBlock,
    ModelSpec,
    TensorSpec,
)

BODIES = load_kernels("numpy")
SPEC = ModelSpec((TensorSpec("kernel", (50, 20)), TensorSpec("bias", (7,))))
RATE = 0.1
PLAIN = [name for name, row in CODECS.items() if row.wrap is None]
EVERY = [(name, dtype) for name in CODECS for dtype in VALUE_DTYPES]


def build(name, **choices):
    return build_codec(name, dict(**choices))


def context(seed=0):
    return EncodeContext(1, RATE, np.random.default_rng(seed), BODIES)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(tensor.size, np.float32) for tensor in SPEC.tensors]


def encode(codec, values, seed=0):
    state = codec.init(SPEC, BODIES)
    return codec.encode(values, state, context(seed))[0]


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_every_codec_sends_what_the_tensors_hold(name, dtype):
    codec = build(name, value_dtype=dtype)
    given = tensors()
    packet = encode(codec, given)
    assert packet.kind is codec.kind
    assert [block.slot for block in packet.blocks] == [0, 1]
    for block, tensor, untouched in zip(packet.blocks, given, tensors(), strict=True):
        np.testing.assert_array_equal(tensor, untouched)
        where, values = decoded(block)
        assert block.size == tensor.size and np.isfinite(values).all()
        if isinstance(block, LowRankBlock):
            assert np.linalg.norm(tensor - values) < np.linalg.norm(tensor)
            continue
        expected = tensor[where] * (-RATE if codec.kind is Kind.DELTA else 1)
        np.testing.assert_allclose(values, expected, rtol=0.01, atol=0.02)
    again = encode(codec, given)
    for one, other in zip(packet.blocks, again.blocks, strict=True):
        np.testing.assert_array_equal(one.values.data, other.values.data)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_codecs_keep_nothing_back(name):
    codec = build(name)
    packet, state = codec.encode(tensors(), codec.init(SPEC, BODIES), context())
    assert codec.undelivered(packet, state) is state
    assert not any(value.any() for value in state.values())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_tensors_are_refused(name, bad):
    given = tensors()
    given[1][3] = bad
    with pytest.raises(NonFiniteUpdate, match="tensor 1"):
        encode(build(name), given)


@pytest.mark.parametrize("name", ["topk", "random_k"])
@pytest.mark.parametrize("rate", [0.0, -0.1, math.nan])
def test_rates_that_keep_nothing_are_refused(name, rate):
    with pytest.raises(ConfigurationError, match="--compression_rate=.*above 0"):
        build(name, compression_rate=rate)


@pytest.mark.parametrize("name", CODECS)
def test_unknown_value_dtypes_are_refused(name):
    with pytest.raises(ConfigurationError, match="--value_dtype=int5.*bfloat16"):
        build(name, value_dtype="int5")


@pytest.mark.parametrize(
    ("rate", "size", "kept"),
    [(0.29, 100, 29), (0.01, 99, 1), (0.01, 401_408, 4014), (0.5, 7, 3), (1e-9, 10, 1)],
)
def test_kept_entries(rate, size, kept):
    assert kept_entries(rate, size) == kept


def test_topk_takes_the_largest_of_each_tensor():
    packet = encode(TopK(0.02), tensors())
    for block, tensor, count in zip(packet.blocks, tensors(), (20, 1), strict=True):
        expected = np.sort(np.argsort(-np.abs(tensor), kind="stable")[:count])
        np.testing.assert_array_equal(block.indices, expected)
        np.testing.assert_array_equal(block.values.data, tensor[expected])


def test_zeros_are_never_sent():
    given = [np.zeros(1000, np.float32), np.array([0, 0, 5, 0, 0, 0, -1], np.float32)]
    packet = encode(TopK(0.9), given)
    (block,) = packet.blocks
    assert block.slot == 1
    np.testing.assert_array_equal(block.indices, [2, 6])


@pytest.mark.parametrize("name", ["topk", "random_k"])
@pytest.mark.parametrize("rate", [1.0, 2.5])
def test_a_rate_of_one_or_more_is_dense(name, rate):
    packet = encode(build(name, compression_rate=rate), tensors())
    assert [block.indices for block in packet.blocks] == [None, None]


def test_random_k_draws_from_the_context_and_does_not_rescale():
    given = tensors()
    packet = encode(RandomK(0.1), given)
    other = encode(RandomK(0.1), given, seed=1)
    block = packet.blocks[0]
    assert block.indices.size == 100
    np.testing.assert_array_equal(block.values.data, given[0][block.indices])
    assert not np.array_equal(block.indices, other.blocks[0].indices)


def test_dense_float32_is_not_copied():
    given = tensors()
    packet = encode(Dense(), given)
    assert packet.blocks[0].values.data is given[0]


@pytest.mark.parametrize("slot", [0, 1])
def test_tensors_behind_one_of_few_touched_rows_stay_in_their_place(slot):
    values, rows = tensors(), np.array([1, 5])
    width = 20 if slot == 0 else 1
    touched = {slot: TouchedRows(rows, width)}
    for row in set(range(SPEC.tensors[slot].shape[0])) - set(rows.tolist()):
        values[slot][row * width : (row + 1) * width] = 0
    given = dataclasses.replace(context(), touched=touched)
    packet, _ = Dense().encode(values, {}, given)
    assert [block.slot for block in packet.blocks] == [0, 1]
    assert [block.indices is None for block in packet.blocks] == [slot == 1, slot == 0]
    for block, expected in zip(packet.blocks, values, strict=True):
        found = np.zeros_like(expected)
        where, coded = decoded(block)
        found[where] = coded
        np.testing.assert_array_equal(found, expected)
