"""A TLS connection on which one thread may send while another thread receives.

Two threads must not use an OpenSSL object at the same time. A thread holds a lock while it encrypts
or decrypts bytes of the connection. A thread holds no lock while it waits for the connection's
socket.
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

#: Largest number of bytes that one call encrypts, and size of the buffer for received TLS records.
PIECE_BYTES = 256 << 10


def context_of(credentials: Credentials, serves: bool) -> ssl.SSLContext:
    """Return the TLS context for a node's credentials, with the settings of its gRPC channels.

    Args:
        credentials: Credentials of the node: a certificate on the shard, a certificate authority on
            a client.
        serves: True for the shard's end, False for the client's end.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    if credentials.authority:
        context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    if credentials.certificate:
        # Python's ssl module reads keys only from files. Only this user can read the temporary
        # file, which is deleted as soon as the key is loaded.
        with tempfile.NamedTemporaryFile() as file:
            file.write(credentials.certificate + b"\n" + credentials.key)
            file.flush()
            os.fchmod(file.fileno(), 0o600)
            context.load_cert_chain(file.name)
    return context


class TlsRecords:
    """TLS state machine of one connection without a socket: its callers send and receive all bytes.

    Args:
        context: TLS context of the node, from `context_of`.
        server_name: Host name that the shard's certificate must have; None at the shard's end.
    """

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()

    @property
    def pending(self) -> bool:
        """True if `put` has passed encrypted bytes that `decrypt_into` has not returned yet."""
        with self._lock:
            return bool(self._tls.pending() or self._in.pending)

    def handshake(self) -> bool:
        """Continue the TLS handshake with received bytes; return True if the handshake is complete.

        Raises:
            ssl.SSLError: The TLS handshake has failed.
        """
        with self._lock:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            return True

    def put(self, data: bytes | memoryview) -> None:
        """Pass encrypted bytes from the socket to the TLS state machine."""
        with self._lock:
            self._in.write(data)

    def take(self) -> bytes:
        """Return the encrypted bytes that the caller must send over the socket."""
        with self._lock:
            return self._out.read()

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Return `data` (256 KiB at most) encrypted as TLS records."""
        with self._lock:
            self._tls.write(data)
            return self._out.read()

    def decrypt_into(self, space: memoryview) -> int | None:
        """Decrypt received bytes into `space`; return the number of decrypted bytes.

        Returns:
            The number of bytes; 0 after the other end closed TLS; None if more bytes are needed.

        Raises:
            ssl.SSLError: The received bytes are not a TLS record of this connection.
        """
        with self._lock:
            try:
                return self._tls.read(len(space), space)  # type: ignore[return-value]  # typeshed: bytes
            except ssl.SSLWantReadError:
                return None
            except ssl.SSLZeroReturnError:
                return 0


class TlsWire(TcpWire):
    """Byte stream of an encrypted TCP connection.

    Args:
        connected: The connected TCP socket, which this object owns and closes.
        records: TLS state machine of the connection, with complete handshake.
    """

    def __init__(self, connected: socket.socket, records: TlsRecords) -> None:
        super().__init__(connected)
        self._records = records
        self._space = memoryview(bytearray(PIECE_BYTES))

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Encrypt all bytes of `parts` and send them over the TCP connection."""
        for data in parts:
            view = memoryview(data)
            for first in range(0, len(view), PIECE_BYTES):
                super().send((self._records.encrypt(view[first : first + PIECE_BYTES]),))

    def receive_into(self, space: memoryview) -> int:
        """Wait for bytes from the peer, decrypt them into `space`, return their number; 0: end."""
        while (count := self._records.decrypt_into(space)) is None:
            arrived = super().receive_into(self._space)
            if not arrived:
                return 0
            self._records.put(self._space[:arrived])
        return count

    def wait(self, milliseconds: float) -> bool:
        """Return True as soon as bytes can be received, False after the time limit."""
        return self._records.pending or super().wait(milliseconds)
