"""Sets of positions and their encoded bytes, for tests of the wire format."""

import numpy as np

from thinwire.ops.wire.blocks import IndexCoding, _encode_as, decode_block

POSITIONS = [0, 1, 5, 6, 300, 301, 999]  # below 1000; a run at the start, one gap above 255
# coding -> (parameter, index bytes) of POSITIONS. Never changes: old bytes must decode for ever.
GOLDEN = {
    IndexCoding.BITMAP: (0, "63" + "00" * 36 + "30" + "00" * 86 + "80"),
    IndexCoding.RICE: (6, "0f0310003000259003"),
    IndexCoding.DEFLATED_GAPS: (0, "63606066f8cff05f6d17032303100000"),
    IndexCoding.UINT32: (0, "000000000100000005000000060000002c0100002d010000e7030000"),
}


def encode_positions(coding, indices, size):
    """The coding that is used, its parameter and the bytes."""
    return _encode_as(coding, indices, size, searches=False)


def decode_positions(coding, parameter, data, count, size):
    """Positions [count] of coded bytes, without values."""
    values = memoryview(bytes(count))
    return decode_block(
        0, count, coding, parameter, memoryview(data), "int8", 1.0, values, size
    ).indices


def uniform(size, count, seed=0):
    """Random positions below `size`, in the given number, ascending."""
    return np.sort(np.random.default_rng(seed).choice(size, count, replace=False))
