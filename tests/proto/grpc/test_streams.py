"""Streams over loopback: echo, order, counts, concurrency, rates, health, bind address."""

import contextlib
import queue
import threading
import time

import grpc
import pytest
from absl import logging
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.proto.echoes import WAIT_SECONDS, connected, echo, serving
from tests.waiting import wait_until
from thinwire.ops.types import ConfigurationError, Link
from thinwire.proto import grpc as proto_grpc
from thinwire.proto.emulation.link import EmulatedSender, LinkModel


def test_frames_come_back_in_order_and_are_counted():
    streams = queue.SimpleQueue()

    def handler(stream):
        streams.put(stream)
        echo(stream)

    sent = [bytes([number]) * size for number, size in enumerate((0, 1, 1024, 16_379, 1 << 20))]
    with serving(handler) as server, connected(server) as client:
        client.send(sent)
        assert [client.receive(WAIT_SECONDS) for _ in sent] == sent
        # 5 a message, 9 for each started 16 KiB: 1, 1, 1, 1 and 65 frames.
        expected = sum(map(len, sent)) + 5 * 5 + 9 * 69
        there = streams.get()
        assert client.bytes_sent == client.bytes_received == expected
        assert there.bytes_received == there.bytes_sent == expected
        assert there.peer.startswith("ipv4:127.0.0.1:")
        wait_until(lambda: client.send_seconds > 0)  # the echo may come before it is counted


def test_what_does_not_count_is_not_counted_and_functions_run_in_the_sending_thread():
    ran_in = queue.SimpleQueue()

    def handler(stream):
        for data in stream.incoming():

            def make(data=data):
                ran_in.put(threading.current_thread())
                return [data, b"end"]

            ran_in.put(threading.current_thread())
            stream.send(make, counted=False)
            ran_in.put(stream)

    with serving(handler) as server, connected(server) as client:
        client.send(lambda: [b"there"], counted=False)
        assert client.receive(WAIT_SECONDS) == b"there"
        assert client.receive(WAIT_SECONDS) == b"end"
        assert client.bytes_sent == 0
        seen = [ran_in.get(timeout=WAIT_SECONDS) for _ in range(3)]
        stream = next(item for item in seen if isinstance(item, proto_grpc.ServerStream))
        assert len({item for item in seen if isinstance(item, threading.Thread)}) == 2
        assert stream.bytes_sent == 0


def test_silence_is_no_progress_and_the_stream_goes_on():
    with serving(echo) as server, connected(server) as client:
        with pytest.raises(proto_grpc.NoProgress, match="sent nothing"):
            client.receive(0.01)
        client.send([b"x"])
        assert client.receive(WAIT_SECONDS) == b"x"


def test_64_streams_at_once():
    with serving(echo) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(64)]
        for number, client in enumerate(clients):
            client.send([b"%d" % number])
        for number, client in enumerate(clients):
            assert client.receive(WAIT_SECONDS) == b"%d" % number


def test_health():
    with (
        serving(echo) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for serving_now in (None, True, False):  # None: as it starts
            if serving_now is not None:
                server.set_serving(serving_now)
            for service in ("", "thinwire.v1.ParameterServer"):
                status = stub.Check(health_pb2.HealthCheckRequest(service=service)).status
                assert status == (1 if serving_now else 2)


def test_the_emulated_rate_is_kept_in_both_directions():
    mbps = 40
    link = Link(mbps=mbps, delay_ms=2)
    frames = [bytes(250_000)] * 20  # 40 megabit

    def handler(stream):
        stream.pace(link, share=0.5, seed=1)
        received = 0
        for data in stream.incoming():
            received += len(data)
            if received % (20 * 250_000) == 0:
                stream.send([b"all"])
                stream.send(frames[:10])

    def rates(client):
        start_at = time.monotonic()
        client.send(frames)
        assert client.receive(WAIT_SECONDS) == b"all"
        up_seconds = time.monotonic() - start_at
        start_at = time.monotonic()
        for _ in range(10):
            client.receive(WAIT_SECONDS)
        return 40 / up_seconds, 20 / (time.monotonic() - start_at)

    up, down = EmulatedSender(LinkModel(link)), 0.5 * mbps
    best = (0.0, 0.0)
    with serving(handler) as server, connected(server, up) as client:
        for _ in range(5):  # a busy machine only makes it slower
            best = tuple(map(max, best, rates(client)))
            if best[0] > 0.95 * mbps and best[1] > 0.95 * down:
                break
    assert best == (pytest.approx(mbps, rel=0.05), pytest.approx(down, rel=0.05))


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.4", False),
        ("ps.example", False),
        ("127.example", False),
    ],
)
def test_loopback(address, loopback):
    assert proto_grpc.is_loopback(address) is loopback


def test_binding_beyond_this_machine_needs_insecure(monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda *words: warnings.append(words))
    proto_grpc.check_bind("127.0.0.1", insecure=False)
    proto_grpc.check_bind("127.0.0.1", insecure=True)
    assert not warnings
    with pytest.raises(ConfigurationError, match="--insecure"):
        proto_grpc.check_bind("0.0.0.0", insecure=False)
    proto_grpc.check_bind("0.0.0.0", insecure=True)
    assert len(warnings) == 1
