"""Measures round-trip time and rate of the TCP link between a serving and a measuring host.

``python -I - serve PORT SECONDS < link_probe.py`` listens on all addresses of a host and then
writes ``thinwire-probe {"port": ...}``. ``python -I - measure HOST PORT < link_probe.py`` writes
``thinwire-probe`` and a JSON object: ``round_trip_seconds`` (median for one echoed byte) and
``mbps`` (rate of a one-second transfer, until its acknowledgment). ``python -I - clock`` writes
the host's clock as ``seconds`` since the epoch.

`link_probe.py` imports only the standard library, because it runs before the launcher knows the
host's packages.
"""

import json
import socket
import sys
import threading
import time

_ECHOES, _BULK_SECONDS, _PATIENCE_SECONDS = 10, 1.0, 5.0
_PIECE = bytes(1 << 16)
_ECHO, _BULK = b"e", b"b"


def _report(**values: object) -> None:
    sys.stdout.write(f"thinwire-probe {json.dumps(values)}\n")
    sys.stdout.flush()


def _answer(client: socket.socket) -> None:
    """Serve one client of a link measurement: echo single bytes; acknowledge long transfers."""
    with client:
        client.settimeout(_PATIENCE_SECONDS)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if client.recv(1) == _ECHO:
            while byte := client.recv(1):
                client.sendall(byte)
            return
        while client.recv(1 << 16):
            pass
        client.sendall(b"!")


def serve(port: int, seconds: float) -> None:
    """Serve clients that measure the TCP link to this host, until a time limit.

    Args:
        port: TCP port to listen on; 0 for any free port.
        seconds: Time after which the server stops, in seconds.
    """
    with socket.create_server(("", port)) as server:
        _report(port=server.getsockname()[1])
        deadline = time.monotonic() + seconds
        while (remaining_seconds := deadline - time.monotonic()) > 0:
            server.settimeout(remaining_seconds)
            try:
                client, _ = server.accept()
            except TimeoutError:
                return
            threading.Thread(target=_answer, args=(client,), daemon=True).start()


def measure(host: str, port: int) -> "tuple[float, float]":
    """Measure the link to a serving host; return round-trip time (seconds) and rate (Mbit/s)."""
    seconds = []
    with socket.create_connection((host, port), _PATIENCE_SECONDS) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(_ECHO)
        for _ in range(_ECHOES):
            began = time.perf_counter()
            link.sendall(b"?")
            link.recv(1)
            seconds.append(time.perf_counter() - began)
    with socket.create_connection((host, port), _PATIENCE_SECONDS) as link:
        link.settimeout(4 * _PATIENCE_SECONDS)
        link.sendall(_BULK)
        began, sent = time.perf_counter(), 0
        while time.perf_counter() - began < _BULK_SECONDS:
            sent += link.send(_PIECE)
        link.shutdown(socket.SHUT_WR)
        link.recv(1)
        took = time.perf_counter() - began
    return sorted(seconds)[_ECHOES // 2], 8e-6 * sent / took


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "measure":
        found = measure(sys.argv[2], int(sys.argv[3]))
        _report(round_trip_seconds=found[0], mbps=found[1])
    else:
        _report(seconds=time.time())
