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

from thinwire.proto.bulk.connection import TcpWire
from thinwire.runtime.run.credentials import Credentials

PIECE_BYTES = 256 << 10


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


class TlsRecords:
    """The TLS of one connection, without its socket: bytes go in, bytes come out.

    Args:
        context: See `context_of`.
        server_name: What the other end's certificate must name; None: this is the shard's end.
    """

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()

    @property
    def pending(self) -> bool:
        """Whether bytes were put in that `decrypt` has not returned."""
        with self._lock:
            return bool(self._tls.pending() or self._in.pending)

    def handshake(self) -> bool:
        """Continue TLS's handshake with what was put in; return whether it is complete.

        Raises:
            ssl.SSLError: It has failed.
        """
        with self._lock:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            return True

    def put(self, data: bytes | memoryview) -> None:
        """Put in what came from the socket."""
        with self._lock:
            self._in.write(data)

    def take(self) -> bytes:
        """Return what the socket is to send."""
        with self._lock:
            return self._out.read()

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Return the records that carry these bytes; 256 KiB at most."""
        with self._lock:
            self._tls.write(data)
            return self._out.read()

    def decrypt_into(self, space: memoryview) -> int | None:
        """Return how many bytes were decrypted to `space`; 0 at the end, None: more must come in.

        Raises:
            ssl.SSLError: What came in is no record of this connection.
        """
        with self._lock:
            try:
                return self._tls.read(len(space), space)  # type: ignore[return-value]  # typeshed: bytes
            except ssl.SSLWantReadError:
                return None
            except ssl.SSLZeroReturnError:
                return 0


class TlsWire:
    """A protected connection; see `Wire`.

    Args:
        connected: The socket; it belongs to this object from now on.
        records: Their handshake is complete.
    """

    def __init__(self, connected: socket.socket, records: TlsRecords) -> None:
        self._records = records
        self._space = memoryview(bytearray(PIECE_BYTES))
        self._wire = TcpWire(connected)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """See `Wire.send`."""
        for each in parts:
            part = memoryview(each)
            for first in range(0, len(part), PIECE_BYTES):
                self._wire.send((self._records.encrypt(part[first : first + PIECE_BYTES]),))

    def receive_into(self, space: memoryview) -> int:
        """See `Wire.receive_into`."""
        while (count := self._records.decrypt_into(space)) is None:
            arrived = self._wire.receive_into(self._space)
            if not arrived:
                return 0
            self._records.put(self._space[:arrived])
        return count

    def wait(self, milliseconds: float | None) -> bool:
        """See `Wire.wait`."""
        return self._records.pending or self._wire.wait(milliseconds)

    def shutdown(self, how: int) -> None:
        """See `Wire.shutdown`."""
        self._wire.shutdown(how)

    def close(self) -> None:
        """See `Wire.close`."""
        self._wire.close()
