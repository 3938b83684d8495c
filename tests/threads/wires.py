"""Wires between a client and a shard, over loopback, that tests cut, reconnect and slow down."""

from __future__ import annotations

import contextlib
import socket
import threading

_PIECE_BYTES = 8 << 10


class Wire:
    """Forwards TCP connections to an address; a client dials `address` instead.

    A cut wire forwards nothing and closes nothing: connections stay open, as if a router
    between two machines had died.
    """

    def __init__(self, target: str, bytes_per_second: float = 0.0) -> None:
        """Begin to forward; 0 is no limit."""
        self.target, self.bytes_per_second = target, bytes_per_second
        self._whole, self._ended = threading.Event(), threading.Event()
        self._whole.set()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """Let all bytes pass, including the waiting bytes."""
        self._whole.set()

    def reset(self) -> None:
        """End all connections at once."""
        with self._lock:
            gone, self._sockets = self._sockets, set()
        for each in gone:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        """End for good."""
        self._ended.set()
        self._listener.close()
        self.mend()
        self.reset()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._whole.wait()
            host, _, port = self.target.rpartition(":")
            try:
                server = socket.create_connection((host, int(port)), 5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            if self.bytes_per_second:  # otherwise the system's buffers take it all immediately
                for each in (client, server):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _PIECE_BYTES)
            with self._lock:
                self._sockets |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._whole.wait()
                if self.bytes_per_second:
                    self._ended.wait(len(data) / self.bytes_per_second)
                sink.sendall(data)
        self._whole.wait()
        with self._lock:
            self._sockets -= {source, sink}
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
