"""Generate traffic for bench/transport/netns.sh, and measure the rate of each class of service.

``python -m bench.transport.netns blast HOST PORT MBPS CLASS`` sends datagrams until it is killed,
``sink PORT`` drops them, ``serve PORT`` measures the rate of TCP streams, and
``probe HOST PORT SINK_PORT MBPS`` prints the rate that a TCP stream of each class reaches.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

_PACKET_BYTES = 1472  # UDP payload; 1,500 with headers
_WIRE_BYTES = 1500
_PROBE_SECONDS = 4.0
_CONNECT_SECONDS = 20.0
_DURATION = struct.Struct("<d")


def tos_of(priority: int) -> int:
    """Return the TOS byte of a class of service: CS7 for class 0, 0 for class 7."""
    return (7 - priority) << 5


def _marked(kind: int, priority: int) -> socket.socket:
    marked = socket.socket(socket.AF_INET, kind)
    marked.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos_of(priority))
    return marked


def blast(host: str, port: int, mbps: float, priority: int, seconds: float | None = None) -> int:
    """Send datagrams at a constant rate on the wire; return the number of datagrams.

    Args:
        host: Address of the sink.
        port: Port of the sink.
        mbps: Rate in megabits per second, with IP and UDP headers.
        priority: Class of service, 0 to 7.
        seconds: Duration in seconds; None sends until the process is killed.
    """
    data = bytes(_PACKET_BYTES)
    rate = mbps * 1e6 / 8 / _WIRE_BYTES
    with _marked(socket.SOCK_DGRAM, priority) as sender:
        sender.connect((host, port))
        started, num_sent = time.monotonic(), 0
        while seconds is None or time.monotonic() - started < seconds:
            due = int((time.monotonic() - started) * rate)
            while num_sent < due:
                with contextlib.suppress(OSError):  # drop it: the queue is full, or no sink listens
                    sender.send(data)
                num_sent += 1
            time.sleep(1e-3)
    return num_sent


def sink(port: int) -> None:
    """Receive and drop datagrams until the process is killed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("", port))
        buffer = bytearray(65536)
        while True:
            receiver.recv_into(buffer)


def serve(port: int) -> None:
    """Answer each TCP stream with the rate of its data, until the process is killed."""
    with socket.create_server(("", port)) as server:
        while True:
            stream, _ = server.accept()
            threading.Thread(target=_count, args=(stream,), daemon=True).start()


def _count(stream: socket.socket) -> None:
    with stream:
        num_bytes, started = 0, time.monotonic()
        while data := stream.recv(1 << 16):
            num_bytes += len(data)
        stream.sendall(_DURATION.pack(num_bytes * 8e-6 / (time.monotonic() - started)))


def reached(host: str, port: int, priority: int, seconds: float = _PROBE_SECONDS) -> float:
    """Return the rate of a TCP stream of a class, in megabits of payload per second."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            stream = _marked(socket.SOCK_STREAM, priority)
            stream.connect((host, port))
            break
        except OSError:
            stream.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    data = bytes(1 << 14)
    with stream:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
        return float(_DURATION.unpack(stream.recv(_DURATION.size, socket.MSG_WAITALL))[0])


def probe(host: str, port: int, sink_port: int, mbps: float) -> None:
    """Print the rate of a stream of each class, alone and together with datagrams of class 2."""
    sys.stdout.write("class  Mbit/s  with class 2 at half the rate\n")
    for priority in (0, 1, 3, 5, 7):
        alone = reached(host, port, priority)
        other = threading.Thread(
            target=blast, args=(host, sink_port, mbps / 2, 2, _PROBE_SECONDS + 1), daemon=True
        )
        other.start()
        shared = reached(host, port, priority)
        other.join()
        sys.stdout.write(f"{priority:5d} {alone:7.1f} {shared:7.1f}\n")
        sys.stdout.flush()


_COMMANDS: dict[str, tuple[Callable[..., object], tuple[type, ...]]] = {
    "blast": (blast, (str, int, float, int)),
    "sink": (sink, (int,)),
    "serve": (serve, (int,)),
    "probe": (probe, (str, int, int, float)),
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    name, *values = arguments or ("",)
    if name not in _COMMANDS or len(values) != len(_COMMANDS[name][1]):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    command, types = _COMMANDS[name]
    command(*(convert(value) for convert, value in zip(types, values, strict=True)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
