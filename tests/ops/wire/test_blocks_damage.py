"""Damaged and hostile blocks raise WireError without large allocations."""

import math

import numpy as np
import pytest

from tests.ops.coded_positions import GOLDEN, decode_positions, encode_positions, uniform
from thinwire.ops.wire import index_codings
from thinwire.ops.wire.blocks import decode_block
from thinwire.ops.wire.index_codings import WireError

GOOD = dict(count=2, coding=4, coding_parameter=0, value_dtype="int8", scale=1.0, size=4)
GOOD |= dict(index_bytes=b"\1\0\0\0\3\0\0\0", value_bytes=b"ab")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 3}, "3 values of int8 in 2 bytes"),
        ({"count": -1, "value_bytes": b""}, "-1 values"),
        ({"size": 1}, "for 1 entries"),
        ({"size": 3}, "below 3"),
        ({"value_dtype": "int5"}, "'int5'"),
        ({"scale": 0.0}, "scale.* 0.0"),
        ({"scale": math.nan}, "scale.* nan"),
        ({"scale": math.inf}, "scale.* inf"),
        ({"coding": 7, "coding_parameter": 1}, "no parameter"),
        ({"coding": 8}, "coding 8 is unknown"),
        ({"coding": 0}, "dense block of 2 values"),
        ({"coding": 0, "size": 2}, "8 index bytes"),
        ({"coding_parameter": 1}, "no parameter"),
        ({"index_bytes": b"\1\0\0\0"}, "4 bytes of uint32"),
        ({"index_bytes": b"\3\0\0\0\1\0\0\0"}, "ascending"),
        ({"index_bytes": b"\1\0\0\0\1\0\0\0"}, "unique"),
        ({"coding": 1}, "bitmap of 8 bytes"),
        ({"coding": 1, "index_bytes": b"\7"}, "3 bits set"),
        ({"coding": 1, "index_bytes": b"\x41"}, "below 4"),
        ({"coding": 2, "coding_parameter": 25}, "25 low bits"),
        ({"coding": 2}, "cannot hold"),
        ({"coding": 2, "index_bytes": b""}, "cannot hold"),
        ({"coding": 2, "index_bytes": b"\1"}, "1 ones"),
        ({"coding": 5}, "index coding 5 is unknown"),
        ({"coding": 3}, "inflate"),
        ({"coding": 3, "index_bytes": b""}, "does not end"),
        ({"count": 0, "value_bytes": b""}, "index bytes for no values"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    arguments = {"slot": 0} | GOOD | changes
    for name in ("index_bytes", "value_bytes"):
        arguments[name] = memoryview(arguments[name])
    with pytest.raises(WireError, match=message):
        decode_block(**arguments)


def test_a_decompression_bomb_is_not_unpacked():
    import tracemalloc
    import zlib

    deflater = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    bomb = deflater.compress(bytes(100_000_000)) + deflater.flush()
    tracemalloc.start()
    with pytest.raises(WireError, match="does not end"):
        index_codings.decode_deflated_gaps(memoryview(bomb), 1000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_large_claim_allocates_nothing():
    import tracemalloc

    tracemalloc.start()
    for coding in range(8):
        for count in (1, 1 << 40):
            with pytest.raises(WireError):
                decode_block(
                    0, count, coding, 0, memoryview(b"\0"), "int8", 1.0, memoryview(b"a"), 1 << 40
                )
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_mutated_bytes_end_in_wire_error_or_legal_positions():
    rng = np.random.default_rng(2)
    size = 3000
    originals = [
        (int(coding), *encode_positions(coding, indices, size)[1:], indices.size)
        for coding in GOLDEN
        for indices in (uniform(size, 60), uniform(size, 700), np.array([2999]))
    ]
    refused = 0
    for number in range(10_000):
        coding, parameter, data, count = originals[number % len(originals)]
        mutated = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            mutated[rng.integers(len(mutated))] ^= 1 << rng.integers(8)
        if number % 5 == 0:
            mutated = mutated[: rng.integers(len(mutated) + 1)]
        if number % 7 == 0:
            mutated += rng.bytes(3)
        if number % 11 == 0:
            parameter = int(rng.integers(0, 40))
        if number % 13 == 0:
            coding = int(rng.integers(0, 8))
        try:
            indices = decode_positions(coding, parameter, bytes(mutated), count, size)
        except WireError:
            refused += 1
            continue
        assert indices.size == count and indices[0] >= 0 and indices[-1] < size
        assert (np.diff(indices) > 0).all()
    assert refused > 5000
