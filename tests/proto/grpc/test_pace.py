"""The size of a payload's pieces follows the measured rate of a slow wire."""

import queue
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.threads.wires import Wire
from thinwire.proto import grpc
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, frames
from thinwire.proto.grpc.common import ChunkPace


def test_pieces_double_on_a_fast_network():
    pace, sizes = ChunkPace(), []
    for _ in range(48):
        sizes.append(pace.num_bytes)
        pace.record(pace.num_bytes + 8, 1e-3)
    assert sizes[:40:8] == [32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10]
    assert sizes[40] == sizes[-1] == MAX_CHUNK_BYTES
    assert sum(sizes[:40]) > 7 << 20  # more than buffers take


def test_pieces_fall_to_what_passes_in_half_a_second():
    pace = ChunkPace()
    for _ in range(8):
        pace.record(pace.num_bytes, 0.01)
    pace.record(64 << 10, 1.0)
    assert pace.num_bytes == 32 << 10
    pace.record(100, 30.0)  # a little message that waited behind others
    assert pace.num_bytes == MIN_CHUNK_BYTES


def test_little_messages_say_nothing_of_the_rate():
    pace = ChunkPace()
    for _ in range(100):
        pace.record(50, 1e-5)
    assert pace.num_bytes == 32 << 10


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 100))))
def test_the_bounds_hold(notes):
    pace = ChunkPace()
    for num_bytes, seconds in notes:
        pace.record(num_bytes, seconds)
        assert MIN_CHUNK_BYTES <= pace.num_bytes <= MAX_CHUNK_BYTES


@pytest.mark.timeout(120)
def test_a_push_over_a_slow_wire_keeps_showing_life():
    """0.8 MB at 200 kB/s: pieces of 1 MiB would mean silence for four seconds."""
    arrived = queue.SimpleQueue()

    def listen(stream):
        for data in stream.incoming():
            arrived.put((time.monotonic(), len(data)))

    server = grpc.GrpcServer("127.0.0.1", 0, listen)
    wire = Wire(f"127.0.0.1:{server.port}", bytes_per_second=200e3)
    client = grpc.ClientStream(wire.address)
    try:
        client.open(20.0)
        message, payload = pb.ToServer(push=pb.Push(step=1)), bytes(800_000)
        began = time.monotonic()
        client.send(frames(message, [payload], lambda: client.chunks.num_bytes))
        total, sizes = 0, []
        while total < len(payload):
            _, size = arrived.get(timeout=60)
            total += size
            sizes.append(size)
        assert time.monotonic() - began > 3.0
        assert max(sizes) <= 140_000  # no piece is under way for a second
    finally:
        client.close()
        wire.close()
        server.stop()
