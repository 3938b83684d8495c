"""Runs hold datagrams in order of arrival, and only datagrams that may be joined."""

from hypothesis import given
from hypothesis import strategies as st

from thinwire.proto.udp.receiver import DatagramRun

MOST_BYTES = 4096


@st.composite
def received(draw):
    """The result of one call: (bytes, size of each datagram in them)."""
    size = draw(st.sampled_from([1, 7, 16, 100, 101]))
    length = draw(st.integers(1, 20 * size))
    mark = draw(st.integers(0, 255))
    return bytes((mark + place) % 256 for place in range(length)), min(size, length)


@given(st.lists(received(), max_size=40))
def test_cut_by_their_sizes_runs_are_the_datagrams_that_came(pieces):
    run, out = DatagramRun(MOST_BYTES), []

    def hand_over():
        data = bytes(run.data)
        out.extend(data[at : at + run.size] for at in range(0, len(data), run.size))

    for data, size in pieces:
        run.free_space[: len(data)] = data
        if not run.fits(len(data), size):
            hand_over()
            run.restart(len(data))
        run.add(len(data), size)
        if len(run) >= MOST_BYTES:
            hand_over()
            run.restart()
    if len(run):
        hand_over()
    expected = [data[at : at + size] for data, size in pieces for at in range(0, len(data), size)]
    assert out == expected


def test_equal_ones_make_one_run_and_a_shorter_one_ends_it():
    run = DatagramRun(MOST_BYTES)
    run.add(300, 100)
    assert run.fits(100, 100) and run.fits(200, 100) and run.fits(99, 99)
    assert not run.fits(198, 99) and not run.fits(101, 101)
    run.add(99, 99)
    assert not run.fits(100, 100) and (len(run), run.size) == (399, 100)


def test_there_is_always_space_for_one_call():
    run = DatagramRun(MOST_BYTES)
    run.add(MOST_BYTES - 1, 1)
    assert len(run.free_space) == 1 << 16
