"""A PS that restarts under another address is found by its name, which is resolved again."""

import socket
import struct
import threading

import pytest

from thinwire.proto.grpc import ClientStream, GrpcServer

NAME = "ps-0.ps.test"


class NameServer:
    """Answers every query for an IPv4 address with `address`."""

    def __init__(self, address):
        self.address, self.num_queries = address, 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self):
        address = self._socket.getsockname()
        self._socket.sendto(b"", address)  # the end
        self._thread.join()
        self._socket.close()

    def _answer(self):
        while True:
            query, sender = self._socket.recvfrom(512)
            if not query:
                return
            end = query.index(b"\0", 12) + 5  # fields of the question: name, type, class
            is_a = query[end - 4 : end - 2] == b"\0\1"
            self.num_queries += is_a
            answer = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 600, 4)  # valid for 10 minutes
            answer += socket.inet_aton(self.address)
            header = query[:2] + struct.pack("!HHHHH", 0x8180, 1, int(is_a), 0, 0)
            self._socket.sendto(header + query[12:end] + answer * is_a, sender)


@pytest.fixture
def names():
    started = NameServer("127.0.0.2")
    yield started
    started.close()


def listening(address, port, seen):
    def handle(stream):
        seen.append(address)
        for _ in stream.incoming():  # until the client ends it, after it was accepted
            pass

    return GrpcServer(address, port, handle)


def dial(names, port):
    stream = ClientStream(f"dns://127.0.0.1:{names.port}/{NAME}:{port}")
    stream.open(10.0)
    stream.close()


def test_each_attempt_resolves_the_name_anew(names):
    seen = []
    first = listening("127.0.0.2", 0, seen)
    dial(names, first.port)
    first.stop(0.0)
    names.address = "127.0.0.3"
    second = listening("127.0.0.3", first.port, seen)
    dial(names, second.port)
    second.stop(0.0)
    assert seen == ["127.0.0.2", "127.0.0.3"]
    assert names.num_queries == 2
