"""The proxies of the chaos harness act as configured and parse the messages."""

import asyncio
import socket
import threading

import pytest

from tests.chaos.process_cast import wait_until
from tests.chaos.proxy import DOWN, UP, Proxy, Switchboard
from tests.chaos.proxy_datagrams import DatagramProxy, Weather
from tests.chaos.proxy_messages import BulkMessages, Hearing, Messages
from tests.nodes import free_port
from thinwire.proto import thinwire_pb2 as pb

HOST = "127.0.1.9"


@pytest.fixture
def board():
    started = Switchboard()
    yield started
    started.close()


@pytest.fixture
def echo():
    """An echo server; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(peer):
        try:
            while data := peer.recv(4096):
                peer.sendall(data)
        except OSError:
            pass
        peer.close()

    def accept():
        try:
            while True:
                peer = listener.accept()[0]
                threading.Thread(target=serve, args=(peer,), daemon=True).start()
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def dial(port, seconds=5.0):
    return socket.create_connection((HOST, port), timeout=seconds)


def test_what_is_said_comes_through(board, echo):
    proxy = Proxy(board, (HOST, echo), ("127.0.0.1", echo))
    with dial(echo) as wire:
        wire.sendall(b"hello")
        assert wire.recv(10) == b"hello"
        assert proxy.reaches_target
    wait_until(lambda: not proxy.reaches_target, 5, "the end of the connection")


def test_a_cut_resets_and_refuses_until_it_is_over(board, echo):
    proxy = Proxy(board, (HOST, echo), ("127.0.0.1", echo))
    with dial(echo) as wire:
        wire.sendall(b"hello")
        assert wire.recv(10) == b"hello"
        proxy.cut(1.0)
        with pytest.raises(ConnectionResetError):
            wire.recv(10)
    with pytest.raises(ConnectionRefusedError):
        dial(echo)

    def mended():
        try:
            dial(echo).close()
        except ConnectionError:
            return False
        return True

    wait_until(mended, 5, "the end of the cut")


def test_what_is_stalled_comes_later_and_what_vanishes_never(board, echo):
    proxy = Proxy(board, (HOST, echo), ("127.0.0.1", echo))
    with dial(echo, 0.15) as wire:
        proxy.stall(1.0, DOWN)
        wire.sendall(b"late")
        with pytest.raises(TimeoutError):
            wire.recv(10)
        wire.settimeout(5)
        assert wire.recv(10) == b"late"
        proxy.vanish(1.0)
        wire.sendall(b"never")
        with pytest.raises(ConnectionResetError):
            wire.recv(10)


def test_answers_vanish_and_what_is_sent_meanwhile_arrives(board, echo):
    said = []
    proxy = Proxy(
        board, (HOST, echo), ("127.0.0.1", echo), listener=lambda way: lambda data: keep(way, data)
    )

    def keep(way, data):
        said.append((way, data))
        return True

    with dial(echo) as wire:
        wire.sendall(b"hello")
        assert wire.recv(10) == b"hello"
        proxy.vanish(0.3, DOWN)
        wire.sendall(b"push")
        with pytest.raises(ConnectionResetError):
            wire.recv(10)
    assert said[2:] == [(UP, b"push"), (DOWN, b"push")], "the server has got it, and answered"
    with dial(echo) as wire:
        wire.sendall(b"push")
        assert wire.recv(10) == b"push"


def test_one_bit_of_what_is_garbled_is_another(board, echo):
    proxy = Proxy(board, (HOST, echo), ("127.0.0.1", echo), seed=3)
    proxy.garble(60.0, 1.0, UP)
    with dial(echo) as wire:
        wire.sendall(bytes(8))
        assert sum(bin(byte).count("1") for byte in wire.recv(8)) == 1
    assert proxy.num_garbled == 1


def test_nobody_behind_a_proxy_is_a_reset(board):
    port = free_port()
    Proxy(board, (HOST, port), ("127.0.0.1", port))
    # The reset may come while the client is still dialling.
    with pytest.raises(ConnectionResetError), dial(port) as wire:
        wire.recv(10)


def framed(message, padding=b""):
    """Return an HTTP/2 DATA frame of stream 1 with one gRPC message."""
    body = message.SerializeToString()
    content = b"\0" + len(body).to_bytes(4, "big") + body
    if padding:
        content = bytes((len(padding),)) + content + padding
    head = len(content).to_bytes(3, "big") + bytes((0, 8 if padding else 0)) + b"\0\0\0\1"
    return head + content


def test_messages_are_found_whatever_pieces_they_come_in():
    said = [pb.ToClient(reply=pb.Reply(step=step, version=9)) for step in (1, 2, 3)]
    other = b"\0\0\3\4\0\0\0\0\0abc"  # SETTINGS
    data = framed(said[0]) + other + framed(said[1], b"\0" * 5) + framed(said[2])
    for size in (1, 7, len(data)):
        messages, found = Messages(DOWN), []
        for start in range(0, len(data), size):
            found += messages.feed(data[start : start + size])
        assert found == said


def test_messages_of_a_bulk_connection_are_found_whatever_pieces_they_come_in():
    said = [pb.ToServer(push=pb.Push(step=step, payload_bytes=5)) for step in (1, 2)]
    piece = (1 << 31 | 5).to_bytes(4, "big") + b"\0\0\0\7\1"
    data = b"n" * 16 + b"p" * 32
    for each in said:
        frame = each.SerializeToString()
        data += len(frame).to_bytes(4, "big") + frame + piece
    for size in (1, 7, len(data)):
        messages, found = BulkMessages(UP), []
        for start in range(0, len(data), size):
            found += messages.feed(data[start : start + size])
        assert found == said


def test_another_port_has_the_same_mishaps(board, echo):
    proxy = Proxy(board, (HOST, free_port()), ("127.0.0.1", free_port()))
    heard = []
    hear = lambda way: lambda data: heard.append(data) or True  # noqa: E731
    for _ in range(2):  # a second Welcome may name it again
        board.soon(proxy.open_beside, echo, hear)
    board.do(asyncio.sleep(0))
    with dial(echo) as wire:
        wire.sendall(b"hello")
        assert wire.recv(10) == b"hello" and heard == [b"hello", b"hello"]
        proxy.cut(0.1)
        with pytest.raises(ConnectionResetError):
            wire.recv(10)
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        dial(echo)


def test_hearing_keeps_apart_what_was_applied_and_what_was_not():
    hearing = Hearing()
    listen = hearing.between(2, 0)
    up, down = listen(UP), listen(DOWN)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert up(preface + framed(pb.ToServer(push=pb.Push(step=7))))
    assert down(framed(pb.ToClient(reply=pb.Reply(step=5, version=11))))
    assert down(framed(pb.ToClient(reply=pb.Reply(version=12))))  # answers a pull
    assert down(framed(pb.ToClient(reply=pb.Reply(step=6, stop=True))))
    assert down(framed(pb.ToClient(refusal=pb.Refusal(step=4))))
    assert hearing.told[2, 0] == {5}
    hearing.ambush = lambda worker, shard, message: message.WhichOneof("body") != "push"
    assert not up(framed(pb.ToServer(push=pb.Push(step=8))))


def test_datagrams_are_doubled_and_overtaken_or_lost(board):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as shard:
        shard.bind(("127.0.0.1", 0))
        shard.settimeout(5)
        port = shard.getsockname()[1]
        proxy = DatagramProxy(board, (HOST, port), ("127.0.0.1", port), Weather(doubles=1.0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as worker:
            worker.sendto(b"a", (HOST, port))
            assert [shard.recv(10), shard.recv(10)] == [b"a", b"a"]
            proxy.weather = Weather(overtaken=1.0)
            for one in (b"b", b"c"):
                worker.sendto(one, (HOST, port))
            assert [shard.recv(10), shard.recv(10)] == [b"c", b"b"]
            proxy.weather = Weather(drops=1.0)
            worker.sendto(b"d", (HOST, port))
            shard.settimeout(0.1)
            with pytest.raises(TimeoutError):
                shard.recv(10)
        proxy.close()
