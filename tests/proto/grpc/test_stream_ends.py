"""How streams end: by either side, by kill -9, by too many; missing ports and hosts."""

import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.proto.echoes import WAIT_SECONDS, connected, echo, serving
from thinwire.ops.types import ConfigurationError
from thinwire.proto import grpc
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits

ROOT = Path(__file__).parents[3]


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


def test_a_call_that_grpc_ends_without_its_metadata_is_given_up(monkeypatch):
    class Call:
        """The state of a gRPC call after its server was stopped before the answer."""

        def is_active(self):
            return False

        def cancel(self):
            return False

        def initial_metadata(self):
            threading.Event().wait()

    class Channel:
        def stream_stream(self, *names, **serializers):
            return lambda requests, metadata: Call()

        def close(self):
            pass

    client = grpc.ClientStream("127.0.0.1:9")
    monkeypatch.setattr(client.peer, "connect", lambda dscp, deadline, given_up: Channel())
    with pytest.raises(grpc.Unreachable, match="it stopped while"):
        client.open(3600.0)


def test_the_handlers_end_closes_the_stream_after_what_was_queued():
    def handler(stream):
        stream.send([b"refused"])

    with serving(handler) as server, connected(server) as client:
        assert client.receive(WAIT_SECONDS) == b"refused"
        for _ in range(2):
            with pytest.raises(grpc.StreamLost, match="ended the stream"):
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
            with pytest.raises(grpc.StreamLost):
                bad.receive(WAIT_SECONDS)
        good.send([b"good"])
        assert good.receive(WAIT_SECONDS) == b"good"


def test_a_message_that_cannot_be_made_is_said_to_the_sender():
    def failing():
        yield b"first"
        raise ValueError("no second")

    with serving(echo) as server, connected(server) as client:
        client.send(failing())
        with pytest.raises(grpc.StreamLost, match="no second"):
            while True:
                client.receive(WAIT_SECONDS)


CLIENT_PROGRAM = """
import sys
from thinwire.proto import grpc as proto_grpc
stream = proto_grpc.ClientStream(sys.argv[1])
stream.open(20)
stream.send([b"alive"])
sys.stdin.read()
"""

SERVER_PROGRAM = """
import sys
from thinwire.proto import grpc as proto_grpc
def echo(stream):
    for data in stream.incoming():
        stream.send([data])
server = proto_grpc.GrpcServer("127.0.0.1", 0, echo)
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
        client = grpc.ClientStream(f"127.0.0.1:{server.stdout.readline().strip()}")
        client.open(WAIT_SECONDS)
        client.send([b"alive"])
        assert client.receive(WAIT_SECONDS) == b"alive"
        server.kill()
        with pytest.raises(grpc.StreamLost, match="UNAVAILABLE"):
            client.receive(WAIT_SECONDS)
        client.close()
        client.close()


def test_a_server_process_that_forgets_to_stop_still_ends():
    with start(SERVER_PROGRAM) as server:
        client = grpc.ClientStream(f"127.0.0.1:{server.stdout.readline().strip()}")
        client.open(WAIT_SECONDS)
        server.stdin.close()
        assert server.wait(WAIT_SECONDS) == 0
        client.close()


def test_stopping_the_server_cuts_open_streams():
    with serving(echo) as server, connected(server) as client:
        server.stop()
        with pytest.raises(grpc.StreamLost):
            client.receive(WAIT_SECONDS)


def test_one_stream_too_many_is_refused_and_its_place_freed():
    guard = ConnectionGuard(limits=Limits(streams=1))
    entered = queue.SimpleQueue()

    def enter(stream):
        entered.put(guard.hello_received(stream))
        echo(stream)

    with serving(enter, guard) as server:
        with connected(server):
            assert entered.get(timeout=WAIT_SECONDS) is None
            second = grpc.ClientStream(f"127.0.0.1:{server.port}")
            with pytest.raises(grpc.Unreachable, match="all 1 streams"):
                second.open(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            third = grpc.ClientStream(f"127.0.0.1:{server.port}")
            try:
                third.open(WAIT_SECONDS)
                break
            except grpc.Unreachable:
                assert time.monotonic() < deadline
        third.close()


def test_a_port_in_use_is_a_clear_error():
    with (
        serving(echo) as server,
        pytest.raises(grpc.PortInUse, match=rf"{server.port}.*in use.*--port") as caught,
    ):
        grpc.GrpcServer("127.0.0.1", server.port, echo)
    assert isinstance(caught.value, ConfigurationError)


def test_nobody_there_is_a_clear_error():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(grpc.Unreachable, match=rf"{address}.*--ip_PS"):
            grpc.ClientStream(address).open(0.3)
