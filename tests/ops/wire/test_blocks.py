"""Blocks survive encoding, have fixed bytes, and use the smallest coding."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.coded_positions import GOLDEN, POSITIONS, decode_positions, encode_positions, uniform
from thinwire.ops.types import Block, CodedValues
from thinwire.ops.wire import index_codings
from thinwire.ops.wire.blocks import IndexChooser, IndexCoding, decode_block
from thinwire.proto import thinwire_pb2 as pb


def block_of(indices, size, slot=0, dtype="<f4"):
    count = size if indices is None else len(indices)
    values = np.arange(count).astype(dtype)
    return Block(slot, size, indices, CodedValues("float32", values))


def decode(coded, size):
    return decode_block(
        coded.slot,
        coded.count,
        int(coded.coding),
        coded.coding_parameter,
        memoryview(coded.index_bytes),
        coded.value_dtype,
        coded.scale,
        memoryview(bytes(coded.value_bytes)),
        size,
    )


def entropy_bytes(size, count):
    nats = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return nats / math.log(2) / 8


def clustered(size, count, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.repeat(rng.gamma(0.15, 1, size // 100), 100)
    columns = np.tile(rng.gamma(0.3, 1, 100), size // 100)
    return np.sort(np.argsort(-rows * columns * rng.random(rows.size))[:count])


def test_numbers_are_those_of_the_proto():
    ours = {f"INDEX_CODING_{coding.name}": int(coding) for coding in IndexCoding}
    assert ours == dict(pb.IndexCoding.items())


@pytest.mark.parametrize("coding", GOLDEN, ids=lambda coding: coding.name)
def test_golden_bytes(coding):
    parameter, golden = GOLDEN[coding]
    if coding is not IndexCoding.DEFLATED_GAPS:  # another zlib may deflate otherwise
        coded = encode_positions(coding, np.array(POSITIONS), 1000)
        assert (coded[0], coded[1], coded[2].hex()) == (coding, parameter, golden)
    decoded = decode_positions(coding, parameter, bytes.fromhex(golden), len(POSITIONS), 1000)
    assert decoded.dtype == np.int64
    np.testing.assert_array_equal(decoded, POSITIONS)


@settings(max_examples=200, deadline=None)
@given(
    positions=st.sets(st.integers(0, 5000), min_size=1),
    spare=st.integers(0, 300),
    coding=st.sampled_from(list(GOLDEN)),
)
def test_every_coding_round_trips(positions, spare, coding):
    indices = np.array(sorted(positions))
    size = int(indices[-1]) + 1 + spare
    _, parameter, data = encode_positions(coding, indices, size)
    np.testing.assert_array_equal(
        decode_positions(coding, parameter, data, indices.size, size), indices
    )


@settings(max_examples=50, deadline=None)
@given(gaps=st.lists(st.integers(1, 1 << 33), min_size=1, max_size=30))
def test_huge_tensors_round_trip(gaps):
    indices = np.cumsum(gaps)
    size = int(indices[-1]) + 1
    coded = IndexChooser().encode(block_of(indices, size))
    np.testing.assert_array_equal(
        decode_positions(coded.coding, coded.coding_parameter, coded.index_bytes, len(gaps), size),
        indices,
    )


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8"]),
    positions=st.sets(st.integers(0, 99)),
    dense=st.booleans(),
    scale=st.floats(2.0**-100, 2.0**100, width=32),
)
def test_blocks_round_trip(dtype, positions, dense, scale):
    indices = None if dense else np.array(sorted(positions), np.int64)
    count = 100 if dense else indices.size
    numpy_dtype = {"float32": "f4", "bfloat16": "u2", "float16": "f2", "int8": "i1"}[dtype]
    values = CodedValues(dtype, np.arange(count).astype(numpy_dtype), scale)
    decoded = decode(IndexChooser().encode(Block(3, 100, indices, values)), 100)
    assert (decoded.slot, decoded.size, decoded.values.dtype) == (3, 100, dtype)
    assert decoded.values.scale == scale
    assert decoded.values.data.dtype == values.data.dtype and decoded.values.data.flags.aligned
    np.testing.assert_array_equal(decoded.values.data, values.data)
    if count == 100:  # every entry: the same set in fewer bytes
        assert decoded.indices is None
    else:
        np.testing.assert_array_equal(decoded.indices, indices)


def test_values_are_not_copied():
    block = block_of(None, 50)
    coded = IndexChooser().encode(block)
    assert coded.index_bytes == b"" and coded.value_bytes.format == "B"
    assert np.shares_memory(np.frombuffer(coded.value_bytes, np.uint8), block.values.data)
    payload = bytes(coded.value_bytes)
    decoded = decode_block(0, 50, 0, 0, memoryview(b""), "float32", 1.0, memoryview(payload), 50)
    assert np.shares_memory(decoded.values.data, np.frombuffer(payload, np.uint8))


@pytest.mark.parametrize("rate", [0.01, 0.001])
def test_uniform_positions_cost_at_most_a_tenth_more_than_their_entropy(rate):
    size = 1_200_000
    count = int(rate * size)
    coded = IndexChooser().encode(block_of(uniform(size, count), size))
    assert len(coded.index_bytes) <= 1.02 * entropy_bytes(size, count)


def test_clustered_positions_cost_less_than_the_entropy_of_uniform_ones():
    coded = IndexChooser().encode(block_of(clustered(400_000, 4000), 400_000))
    assert coded.coding is IndexCoding.DEFLATED_GAPS
    assert len(coded.index_bytes) <= 0.8 * entropy_bytes(400_000, 4000)


@pytest.mark.parametrize("size", [1, 8, 9, 2000])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 0.5, 0.95])
def test_the_smallest_coding_is_taken(size, density):
    indices = uniform(size, int(density * size))
    coded = IndexChooser().encode(block_of(indices, size))
    if not indices.size:
        assert coded.index_bytes == b"" and decode(coded, size).indices.size == 0
        return
    sizes = [len(encode_positions(coding, indices, size)[2]) for coding in GOLDEN]
    assert len(coded.index_bytes) == min(sizes)


@pytest.mark.parametrize(("share", "pays"), [(0.0, False), (0.1, False), (0.9, True)], ids=str)
def test_repeated_gaps_are_looked_for_where_that_saves_a_fiftieth_of_the_block(share, pays):
    """A share of the gaps repeats, at the end: the sample sees all parts."""
    gaps = np.diff(uniform(400_000, 40_000))
    first = round((1 - share) * gaps.size)
    gaps[first:] = np.resize(gaps[:50], gaps.size - first)
    indices = np.cumsum(gaps)
    size = int(indices[-1]) + 1
    block, chooser = block_of(indices, size), IndexChooser()
    assert chooser.encode(block).coding is IndexCoding.DEFLATED_GAPS
    assert bool(chooser.state["0.searches"]) is pays
    fast, slow = (
        len(index_codings.encode_deflated_gaps(indices, searches)) for searches in (False, True)
    )
    assert (fast - slow >= 0.02 * (4 * indices.size + fast)) is pays
    estimate = index_codings.estimated_deflated_bytes(indices, searches=False)
    assert abs(estimate / fast - 1) < 0.1


def test_the_chooser_remembers_and_tries_again():
    chooser = IndexChooser(interval=3)
    even, lumpy = block_of(uniform(90_000, 900), 90_000), block_of(clustered(90_000, 900), 90_000)
    other_slot = block_of(clustered(90_000, 900), 90_000, slot=1)
    assert chooser.encode(even).coding is IndexCoding.RICE
    assert chooser.encode(lumpy).coding is IndexCoding.RICE
    assert chooser.encode(other_slot).coding is IndexCoding.DEFLATED_GAPS
    assert all(type(value) is int for value in chooser.state.values())
    resumed = IndexChooser(interval=3, state=chooser.state)
    for each in (chooser, resumed):
        assert each.encode(lumpy).coding is IndexCoding.RICE
        assert each.encode(lumpy).coding is IndexCoding.DEFLATED_GAPS
    assert chooser.state == resumed.state


def test_what_spans_slots_is_remembered_apart_from_its_first_slot():
    chooser, size = IndexChooser(), 90_000
    assert chooser.encode(block_of(uniform(size, 900), size)).coding is IndexCoding.RICE
    clustering = block_of(clustered(size, 900), size)
    spanning = dataclasses.replace(clustering, slots=2)
    assert chooser.encode(clustering).coding is IndexCoding.RICE
    assert chooser.encode(spanning).coding is IndexCoding.DEFLATED_GAPS
    assert chooser.encode(clustering).coding is IndexCoding.RICE
