"""Streams over loopback: echo, order, losses on both sides, many at once, rates, health."""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from absl import logging
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ops.types import ConfigurationError, Link
from proto import channel_grpc
from proto.channel_emulated import EmulatedSender, LinkModel

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 20.0


def echo(stream):
    for data in stream.incoming():
        stream.send((data,))


@contextlib.contextmanager
def serving(handler, max_streams=4):
    server = channel_grpc.serve("127.0.0.1", 0, handler, max_streams)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def connected(server, link=None):
    stream = channel_grpc.ClientStream(f"127.0.0.1:{server.port}", link)
    try:
        stream.open(WAIT_SECONDS)
        yield stream
    finally:
        stream.close()


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
        assert client.send_seconds > 0


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
        stream = next(item for item in seen if isinstance(item, channel_grpc.ServerStream))
        assert len({item for item in seen if isinstance(item, threading.Thread)}) == 2
        assert stream.bytes_sent == 0


def test_silence_is_no_progress_and_the_stream_goes_on():
    with serving(echo) as server, connected(server) as client:
        with pytest.raises(channel_grpc.NoProgress, match="sent nothing"):
            client.receive(0.01)
        client.send([b"x"])
        assert client.receive(WAIT_SECONDS) == b"x"


def test_a_close_that_was_interrupted_is_not_waited_for_by_the_next(monkeypatch):
    with serving(echo) as server, connected(server) as client:
        closed, close = [], client._channel.close

        def interrupted():
            closed.append(close())
            raise KeyboardInterrupt

        monkeypatch.setattr(client._channel, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.close(0.0)
        client.close(0.0)
        assert closed == [None]


def test_the_handlers_end_closes_the_stream_after_what_was_queued():
    def handler(stream):
        stream.send([b"refused"])

    with serving(handler) as server, connected(server) as client:
        assert client.receive(WAIT_SECONDS) == b"refused"
        for _ in range(2):
            with pytest.raises(channel_grpc.StreamLost, match="ended the stream"):
                client.receive(WAIT_SECONDS)


def test_an_error_in_the_handler_ends_one_stream_only():
    def handler(stream):
        for data in stream.incoming():
            if data == b"bad":
                raise KeyError("boom")
            stream.send([data])

    with serving(handler) as server, connected(server) as good:
        with connected(server) as bad:
            bad.send([b"bad"])
            with pytest.raises(channel_grpc.StreamLost):
                bad.receive(WAIT_SECONDS)
        good.send([b"good"])
        assert good.receive(WAIT_SECONDS) == b"good"


def test_a_message_that_cannot_be_made_is_said_to_the_sender():
    def failing():
        yield b"first"
        raise ValueError("no second")

    with serving(echo) as server, connected(server) as client:
        client.send(failing())
        with pytest.raises(channel_grpc.StreamLost, match="no second"):
            while True:
                client.receive(WAIT_SECONDS)


CLIENT_PROGRAM = """
import sys
from proto import channel_grpc
stream = channel_grpc.ClientStream(sys.argv[1])
stream.open(20)
stream.send([b"alive"])
sys.stdin.read()
"""

SERVER_PROGRAM = """
import sys
from proto import channel_grpc
def echo(stream):
    for data in stream.incoming():
        stream.send([data])
server = channel_grpc.serve("127.0.0.1", 0, echo, 4)
sys.stdout.write(f"{server.port}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_client_is_noticed():
    events = queue.SimpleQueue()

    def handler(stream):
        for data in stream.incoming():
            events.put(data)
        stream.send([b"into the void"])
        events.put("ended")

    with serving(handler) as server:
        with start(CLIENT_PROGRAM, f"127.0.0.1:{server.port}") as client:
            assert events.get(timeout=WAIT_SECONDS) == b"alive"
            client.kill()
        assert events.get(timeout=WAIT_SECONDS) == "ended"


def test_a_killed_server_is_noticed():
    with start(SERVER_PROGRAM) as server:
        client = channel_grpc.ClientStream(f"127.0.0.1:{server.stdout.readline().strip()}")
        client.open(WAIT_SECONDS)
        client.send([b"alive"])
        assert client.receive(WAIT_SECONDS) == b"alive"
        server.kill()
        with pytest.raises(channel_grpc.StreamLost, match="UNAVAILABLE"):
            client.receive(WAIT_SECONDS)
        client.close()
        client.close()


def test_a_server_process_that_forgets_to_stop_still_ends():
    with start(SERVER_PROGRAM) as server:
        client = channel_grpc.ClientStream(f"127.0.0.1:{server.stdout.readline().strip()}")
        client.open(WAIT_SECONDS)
        server.stdin.close()
        assert server.wait(WAIT_SECONDS) == 0
        client.close()


def test_stopping_the_server_cuts_open_streams():
    with serving(echo) as server, connected(server) as client:
        server.stop()
        with pytest.raises(channel_grpc.StreamLost):
            client.receive(WAIT_SECONDS)


def test_64_streams_at_once():
    with serving(echo, max_streams=64) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(64)]
        for number, client in enumerate(clients):
            client.send([b"%d" % number])
        for number, client in enumerate(clients):
            assert client.receive(WAIT_SECONDS) == b"%d" % number


def test_one_stream_too_many_is_told_so_and_room_is_given_back():
    with serving(echo, max_streams=1) as server:
        with connected(server):
            second = channel_grpc.ClientStream(f"127.0.0.1:{server.port}")
            with pytest.raises(channel_grpc.Unreachable, match="all 1 streams"):
                second.open(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            third = channel_grpc.ClientStream(f"127.0.0.1:{server.port}")
            try:
                third.open(WAIT_SECONDS)
                break
            except channel_grpc.Unreachable:
                assert time.monotonic() < deadline
        third.close()


def test_a_port_in_use_is_a_clear_error():
    with (
        serving(echo) as server,
        pytest.raises(channel_grpc.PortInUse, match=rf"{server.port}.*in use.*--port") as caught,
    ):
        channel_grpc.serve("127.0.0.1", server.port, echo, 1)
    assert isinstance(caught.value, ConfigurationError)


def test_nobody_there_is_a_clear_error():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(channel_grpc.Unreachable, match=rf"{address}.*--ip_PS"):
            channel_grpc.ClientStream(address).open(0.3)


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
            if received == 20 * 250_000:
                stream.send([b"all"])
                stream.send(frames[:10])

    up = EmulatedSender(LinkModel(link))
    with serving(handler) as server, connected(server, up) as client:
        start_at = time.monotonic()
        client.send(frames)
        assert client.receive(WAIT_SECONDS) == b"all"
        up_seconds = time.monotonic() - start_at
        start_at = time.monotonic()
        for _ in range(10):
            client.receive(WAIT_SECONDS)
        down_seconds = time.monotonic() - start_at
    assert 40 / up_seconds == pytest.approx(mbps, rel=0.05)
    assert 20 / down_seconds == pytest.approx(mbps / 2, rel=0.05)


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
    assert channel_grpc.is_loopback(address) is loopback


def test_binding_beyond_this_machine_needs_insecure(monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda *words: warnings.append(words))
    channel_grpc.check_bind("127.0.0.1", insecure=False)
    channel_grpc.check_bind("127.0.0.1", insecure=True)
    assert not warnings
    with pytest.raises(ConfigurationError, match="--insecure"):
        channel_grpc.check_bind("0.0.0.0", insecure=False)
    channel_grpc.check_bind("0.0.0.0", insecure=True)
    assert len(warnings) == 1
