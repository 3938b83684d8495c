"""Large buffers are reused as soon as no reference is left, and not earlier."""

import numpy as np

from thinwire.ops.buffers import LEAST_BYTES, buffer


def address(array):
    return array.ctypes.data


def test_a_large_buffer_is_used_again_when_its_last_view_is_gone():
    size = LEAST_BYTES + 12345
    first = buffer(size)
    view = np.frombuffer(first.data[64:1024], "<f4")
    where = address(first)
    del first
    assert address(buffer(size)) != where
    del view
    found = {address(each) for each in [buffer(size), buffer(size + 1)]}
    assert where in found


def test_buffers_are_aligned_and_of_the_size_asked_for():
    for size in (1, 1000, LEAST_BYTES, 3 * LEAST_BYTES + 7):
        found = buffer(size)
        assert found.size == size
        assert address(found) % 64 == 0
        assert found.flags.writeable
