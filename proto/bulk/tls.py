"""A connection through TLS that one thread may send on while another one receives.

OpenSSL's objects are not for two threads at a time, so a lock is held while bytes are encrypted or
decrypted, and never while the socket waits.
"""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Sequence

from thinwire.ops.run.credentials import Credentials
from thinwire.proto.bulk.connection import TcpWire

_PIECE_BYTES = 256 << 10


def context_of(credentials: Credentials, serves: bool) -> ssl.SSLContext:
    """Return what a node's credentials are to TLS; the same as for its gRPC channels.

    Args:
        credentials: With a certificate, where the node serves, else with an authority.
        serves: Whether it is the shard's end.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    if credentials.authority:
        context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    if credentials.certificate:
        # ssl reads keys from files alone; this one is nobody else's, and soon nobody's.
        with tempfile.NamedTemporaryFile() as file:
            file.write(credentials.certificate + b"\n" + credentials.key)
            file.flush()
            os.fchmod(file.fileno(), 0o600)
            context.load_cert_chain(file.name)
    return context


class TlsWire:
    """A protected connection; see `Wire`.

    Args:
        connected: The socket, with a time-out for the handshake.
        context: See `context_of`.
        server_name: What the other end's certificate must name; None: this is the shard's end.

    Raises:
        OSError: The handshake fails; also ssl.SSLError, which is one.
    """

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, server_name: str | None
    ) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()
        self._space = memoryview(bytearray(_PIECE_BYTES))
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                connected.sendall(self._out.read())
                if not (data := connected.recv(_PIECE_BYTES)):
                    raise ConnectionResetError("the connection ended in TLS's handshake") from None
                self._in.write(data)
            else:
                break
        if self._out.pending:
            connected.sendall(self._out.read())
        self._wire = TcpWire(connected)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """See `Wire.send`."""
        for each in parts:
            part = memoryview(each)
            for first in range(0, len(part), _PIECE_BYTES):
                with self._lock:
                    self._tls.write(part[first : first + _PIECE_BYTES])
                    coded = self._out.read()
                self._wire.send((coded,))

    def receive_into(self, space: memoryview) -> int:
        """See `Wire.receive_into`."""
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(space), space)  # type: ignore[return-value]  # typeshed: bytes
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return 0
            count = self._wire.receive_into(self._space)
            if not count:
                return 0
            with self._lock:
                self._in.write(self._space[:count])

    def wait(self, milliseconds: float | None) -> bool:
        """See `Wire.wait`."""
        with self._lock:
            if self._tls.pending() or self._in.pending:
                return True
        return self._wire.wait(milliseconds)

    def shutdown(self, how: int) -> None:
        """See `Wire.shutdown`."""
        self._wire.shutdown(how)

    def close(self) -> None:
        """See `Wire.close`."""
        self._wire.close()
