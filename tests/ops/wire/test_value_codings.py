"""Values with compressed exponents keep their bits; hostile bytes raise WireError."""

import math
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from thinwire.ops.types import Block, CodedValues
from thinwire.ops.wire import value_codings
from thinwire.ops.wire.blocks import IndexChooser, IndexCoding, decode_block
from thinwire.ops.wire.index_codings import WireError
from thinwire.ops.wire.value_codings import ValueCoding, decode_exponents, encode_exponents
from thinwire.proto import thinwire_pb2 as pb

#: 1, -2, 0.5 and the largest float32, never changed: old bytes must decode for ever.
GOLDEN = "000000010000000000feffff" + "ab6fa8fb0700"


def decode(coded, size, **changes):
    arguments = {
        "slot": coded.slot,
        "count": coded.count,
        "coding": int(coded.coding),
        "coding_parameter": coded.coding_parameter,
        "index_bytes": memoryview(coded.index_bytes),
        "value_dtype": coded.value_dtype,
        "scale": coded.scale,
        "value_bytes": memoryview(coded.value_bytes),
        "size": size,
        "value_coding": int(coded.value_coding),
    }
    return decode_block(**arguments | changes)


def largest_of(count, size=100_000, seed=0):
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    where = np.sort(np.argsort(-np.abs(values))[:count])
    return Block(3, size, where, CodedValues("float32", values[where]))


def test_numbers_are_those_of_the_proto():
    ours = {f"VALUE_CODING_{coding.name}": int(coding) for coding in ValueCoding}
    assert ours == dict(pb.ValueCoding.items())


def test_bytes_are_as_ever():
    values = np.array([1, -2, 0.5, np.finfo(np.float32).max], np.float32)
    assert encode_exponents(values).hex()[:24] == GOLDEN[:24]  # the rest is zlib's to choose
    plain = decode_exponents(memoryview(bytes.fromhex(GOLDEN)), 4, 4)
    assert np.frombuffer(plain, "<f4").tolist() == values.tolist()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([np.uint32, np.uint16]), st.integers(1, 200), st.data())
def test_any_bits_come_back(dtype, count, data):
    bits = data.draw(arrays_of.arrays(dtype, count))
    coded = encode_exponents(bits)
    plain = decode_exponents(memoryview(coded), count, bits.itemsize)
    np.testing.assert_array_equal(np.frombuffer(plain, dtype), bits)


def test_the_largest_of_many_take_a_sixth_less():
    block = largest_of(1000)
    coded = IndexChooser().encode(block)
    assert coded.value_coding is ValueCoding.EXPONENTS
    assert len(coded.value_bytes) < 0.83 * 4000
    np.testing.assert_array_equal(decode(coded, block.size).values.data, block.values.data)


def test_bfloat16_takes_a_third_less():
    block = largest_of(1000)
    bits = (block.values.data.view(np.uint32) >> 16).astype(np.uint16)
    rounded = Block(3, block.size, block.indices, CodedValues("bfloat16", bits))
    coded = IndexChooser().encode(rounded)
    assert len(coded.value_bytes) < 0.67 * 2000
    np.testing.assert_array_equal(decode(coded, block.size).values.data, bits)


def test_what_does_not_pay_is_not_done():
    block = largest_of(1000)
    noise = np.random.default_rng(1).integers(0, 2**32, 1000, np.uint32).view(np.float32)
    codes = CodedValues("int8", np.zeros(1000, np.int8), 0.5)
    for values in (CodedValues("float32", noise), codes):
        other = Block(3, block.size, block.indices, values)
        assert IndexChooser().encode(other).value_coding is ValueCoding.PLAIN
    few = largest_of(value_codings.LEAST_VALUES - 1)
    dense = Block(3, 1000, None, block.values)
    for other in (few, dense):
        assert IndexChooser().encode(other).value_coding is ValueCoding.PLAIN


def test_the_choice_is_kept_and_tried_again():
    block = largest_of(1000)
    noise = np.random.default_rng(1).integers(0, 2**32, 1000, np.uint32).view(np.float32)
    noisy = Block(3, block.size, block.indices, CodedValues("float32", noise))
    chooser = IndexChooser(interval=3)
    seen = [chooser.encode(each).value_coding for each in (noisy, block, block, block, noisy)]
    plain, coded = ValueCoding.PLAIN, ValueCoding.EXPONENTS
    assert seen == [plain, plain, plain, coded, plain]
    resumed = IndexChooser(interval=3, state=chooser.state)
    assert resumed.encode(block).value_coding is coded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_coding": 2}, "value coding 2"),
        ({"coding": int(IndexCoding.DENSE)}, "index coding 0"),
        ({"coding": int(IndexCoding.LOW_RANK)}, "index coding 6"),
        ({"coding": int(IndexCoding.RANGES)}, "index coding 7"),
        ({"size": 999}, "for 999"),
        ({"value_dtype": "int8"}, "values of 1 bytes"),
        ({"value_dtype": "bfloat16"}, "inflate"),
        ({"count": 0}, "0 values"),
        ({"count": -5}, "-5 values"),
        ({"count": 1001}, "inflate"),
        ({"count": 2000}, "2000 values"),
        ({"value_bytes": memoryview(b"")}, "0 bytes"),
        ({"scale": math.nan}, "scale.* nan"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(WireError, match=message):
        decode(IndexChooser().encode(largest_of(1000)), **{"size": 100_000} | changes)


def test_mutated_bytes_end_in_wire_error_or_as_many_values():
    rng = np.random.default_rng(4)
    coded = encode_exponents(largest_of(600).values.data)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        spoilt = bytearray(coded)
        for at in rng.integers(0, len(spoilt), rng.integers(1, 4)):
            spoilt[at] = rng.integers(0, 256)
        spoilt = spoilt[: len(spoilt) - int(rng.integers(0, 3))]
        try:
            outcomes[len(decode_exponents(memoryview(spoilt), 600, 4)) == 2400] += 1
        except WireError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 100


def test_a_decompression_bomb_is_not_unpacked():
    deflater = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    bomb = bytes(3000) + deflater.compress(bytes(100_000_000)) + deflater.flush()
    tracemalloc.start()
    with pytest.raises(WireError, match="1000 values"):
        decode_exponents(memoryview(bomb), 1000, 4)
    with pytest.raises(WireError):
        decode_exponents(memoryview(b"\0"), 1 << 40, 4)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
