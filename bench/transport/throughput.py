"""Compare the transport with its limits: raw loopback TCP for bulk, a bare gRPC stream for 1 KB.

All servers run in one process. The contenders of a row run alternately, so that a disturbance of
the machine affects all of them. The figures are medians.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np

from bench.table import Row, quartiles, render
from bench.transport.far_end import LARGEST_BYTES, SMALL_BYTES, limit, receive
from thinwire.proto import framing
from thinwire.proto import grpc as proto_grpc
from thinwire.proto import thinwire_pb2 as pb
from thinwire.runtime.malloc import keep_freed_memory

BULK_SIZES = (4_800_000, 40_000_000, 400_000_000)
_BULK_ROUNDS = {4_800_000: 15, 40_000_000: 12, 400_000_000: 4}
_BULK_CALLS = {4_800_000: 5, 40_000_000: 1, 400_000_000: 1}  # calls in a row, as in training
_SMALL_ROUNDS = 20
_SMALL_EXCHANGES = 100
_TIMEOUT_SECONDS = 30.0
_BARE_STREAM = " against a bare gRPC stream"
_OVER_GRPC = " against ours over gRPC"
_EXCHANGE = "1 KB exchange"
_EXCHANGE_RAW = "1 KB exchange against raw TCP"
#: Bulk: minimum share of the limit's speed. Exchange: maximum multiple of the peer's time.
_GOALS = {
    "push 4.8 MB": 0.6,
    "pull 4.8 MB": 0.6,
    "push 40 MB": 0.7,
    "pull 40 MB": 0.7,
    "push 400 MB": 0.7,
    "pull 400 MB": 0.7,
    _EXCHANGE: 1.5,
}
_BARE_METHOD = "/bench/Bare"


class RawClient:
    """The limit: a raw TCP client with sendall and recv_into on reused buffers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = memoryview(bytearray(LARGEST_BYTES))

    def _order(self, what: bytes, size: int) -> bytes:
        return what + size.to_bytes(8, "little")

    def push(self, size: int) -> None:
        """Send `size` bytes, and wait for one byte."""
        self._socket.sendall(self._order(b">", size))
        self._socket.sendall(self._data[:size])
        self._socket.recv(1)

    def pull(self, size: int) -> None:
        """Request `size` bytes and receive them."""
        self._socket.sendall(self._order(b"<", size))
        receive(self._socket, self._data[:size])

    def exchange(self) -> None:
        """Send 1 KB and receive 1 KB."""
        self._socket.sendall(self._order(b"=", SMALL_BYTES) + self._data[:SMALL_BYTES])
        receive(self._socket, self._data[:SMALL_BYTES])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class BareClient:
    """A client of a gRPC stream without any Thinwire code."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        requests = iter(self._outgoing.get, None)
        self._call = self._channel.stream_stream(_BARE_METHOD)(requests)
        self._data = bytes(SMALL_BYTES)
        self._chunks = {
            size: [
                bytes(min(framing.MAX_MESSAGE_BYTES, size - start))
                for start in range(0, size, framing.MAX_MESSAGE_BYTES)
            ]
            for size in BULK_SIZES
        }

    def push(self, size: int) -> None:
        """Send prepared messages of 1 MiB and wait for an answer, which is gRPC's best case."""
        for chunk in self._chunks[size]:
            self._outgoing.put(chunk)
        next(self._call)

    def exchange(self) -> None:
        """Send 1 KB and receive 1 KB."""
        self._outgoing.put(self._data)
        next(self._call)

    def close(self) -> None:
        """Close the stream."""
        self._outgoing.put(None)
        self._channel.close()


class StackClient:
    """Thinwire's messages and stream as a worker uses them.

    Args:
        port: Port of the server.
        switches: True to move the stream to a bulk connection; False stays on gRPC.
    """

    def __init__(self, port: int, switches: bool = True) -> None:
        self._stream = proto_grpc.ClientStream(f"127.0.0.1:{port}")
        self._stream.open(_TIMEOUT_SECONDS)
        self._assembler = framing.MessageAssembler(pb.ToClient, limit)
        welcome = self._receive().welcome
        if switches:
            self._stream.switch(welcome.bulk)
            if not self._stream.wait_until_moved(_TIMEOUT_SECONDS):
                raise RuntimeError(f"no bulk connection to port {welcome.bulk.port} on loopback")
        self._data = np.random.default_rng(1).integers(0, 255, LARGEST_BYTES, dtype=np.uint8)
        self._step = 0

    def push(self, size: int) -> None:
        """Send a push with a payload of `size` bytes, and wait for the reply."""
        self._step += 1
        message = pb.ToServer()
        push = message.push
        push.step, push.samples, push.local_steps = self._step, 64, 1
        push.blocks.add(count=size // 4)
        self._stream.send(framing.frames(message, [self._data[:size].data]))
        self._receive()

    def pull(self, size: int) -> None:
        """Request a reply with a payload of `size` bytes, and receive it."""
        message = pb.ToServer()
        message.pull.base_version = size
        self._stream.send((framing.frame(message),))
        self._receive()

    def exchange(self) -> None:
        """Send a push and receive its reply, with 1 KB of payload each."""
        self.push(SMALL_BYTES)

    def _receive(self) -> pb.ToClient:
        feed, receive = self._assembler.feed, self._stream.receive
        while (complete := feed(receive(_TIMEOUT_SECONDS))) is None:
            pass
        return complete[0]

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()


@contextlib.contextmanager
def clients() -> Iterator[tuple[RawClient, BareClient, StackClient, StackClient]]:
    """Start the server process and connect one client of each kind."""
    command = [sys.executable, "-m", "bench.transport.far_end"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        if server.stdout is None or server.stdin is None:
            raise RuntimeError("the server process has no pipes")
        ports = json.loads(server.stdout.readline())
        with contextlib.ExitStack() as stack:
            stack.callback(server.stdin.close)
            raw = RawClient(ports["raw"])
            stack.callback(raw.close)
            bare = BareClient(ports["bare"])
            stack.callback(bare.close)
            real, over_grpc = (StackClient(ports["stack"], switches) for switches in (True, False))
            stack.callback(real.close)
            stack.callback(over_grpc.close)
            yield raw, bare, real, over_grpc


def _turns(calls: Sequence[Callable[[], None]], rounds: int, repeat: int) -> list[list[float]]:
    """Return for each contender the seconds of one call in every round.

    The contenders alternate with ``repeat`` calls each; the first round is an uncounted warm-up.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, spent in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            if number:
                spent.append((time.perf_counter() - start) / repeat)
    return seconds


def measure() -> dict[str, tuple[list[float], list[float]]]:
    """Return {work: (Thinwire's seconds, the limit's or peer's seconds)} with all rounds."""
    keep_freed_memory()
    result = {}
    with clients() as (raw, bare, real, over_grpc):
        for size in BULK_SIZES:
            calls = [
                functools.partial(call, size)
                for end in (real, raw, over_grpc)
                for call in (end.push, end.pull)
            ]
            calls.append(functools.partial(bare.push, size))
            push, pull, raw_push, raw_pull, grpc_push, grpc_pull, bare_push = _turns(
                calls, _BULK_ROUNDS[size], _BULK_CALLS[size]
            )
            name = f"{size / 1e6:g} MB"
            result[f"push {name}"] = push, raw_push
            result[f"push {name}{_BARE_STREAM}"] = push, bare_push
            result[f"push {name}{_OVER_GRPC}"] = push, grpc_push
            result[f"pull {name}"] = pull, raw_pull
            result[f"pull {name}{_OVER_GRPC}"] = pull, grpc_pull
        exchanges = (real.exchange, bare.exchange, raw.exchange, over_grpc.exchange)
        ours, peer, limit, ours_over_grpc = _turns(exchanges, _SMALL_ROUNDS, _SMALL_EXCHANGES)
        result[_EXCHANGE] = ours, peer
        result[_EXCHANGE_RAW] = ours, limit
        result[f"{_EXCHANGE}{_OVER_GRPC}"] = ours, ours_over_grpc
    return result


def rows() -> list[Row]:
    """Measure all contenders, and return the rows of the table."""
    result = []
    for work, (all_ours, all_others) in measure().items():
        exchange = work.startswith(_EXCHANGE)
        ours, other = statistics.median(all_ours), statistics.median(all_others)
        pairs = zip(all_ours, all_others, strict=True)
        ratios = [
            our_seconds / other_seconds if exchange else other_seconds / our_seconds
            for our_seconds, other_seconds in pairs
        ]
        goal = _GOALS.get(work)
        result.append(
            Row(
                work=work,
                value=ours * (1e6 if exchange else 1e3),
                unit="us" if exchange else "ms",
                limit=other * (1e6 if exchange else 1e3),
                ratio=ours / other if exchange else other / ours,
                goal=goal,
                better="lower" if exchange else "higher",
                note="" if goal is not None else "for comparison",
                spread=quartiles(ratios),
            )
        )
    return result


if __name__ == "__main__":
    sys.stdout.write(render(rows()))
