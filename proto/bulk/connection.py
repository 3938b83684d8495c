"""Sends and receives frames over a TCP connection, and reads payloads directly into their
memory.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from thinwire.proto.framing import MAX_MESSAGE_BYTES, Frame, Malformed

_HEADER = struct.Struct(">I")
_IS_PIECE = 1 << 31
#: Number of bytes that one read requests while no payload piece is expected. The value is small
#: because a piece that arrives in the same read has to be copied from the buffer to the payload's
#: memory.
_READ_BYTES = 16 << 10
_BUFFER_BYTES = 64 << 10
#: A frame with more parts than the first value is joined into one part before it is sent, if the
#: parts have fewer bytes on average than the second value. One sendmsg call accepts 1,024 parts.
_MOST_PARTS, _LEAST_PART_BYTES = 64, 16 << 10


class TcpWire:
    """Byte stream of a TCP connection without encryption.

    One thread sends and one thread receives on the byte stream; any thread may call `shutdown`.

    Args:
        connected: The connected TCP socket, which this object owns and closes.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all bytes of `parts` (byte strings) over the TCP connection.

        Raises:
            OSError: The connection has ended before all bytes were sent.
        """
        missing = sum(map(len, parts)) - self._socket.sendmsg(parts)
        if missing:  # A signal interrupted sendmsg after a part of the bytes was sent.
            self._socket.sendall(b"".join(parts)[-missing:])

    def receive_into(self, space: memoryview) -> int:
        """Wait for received bytes, write them to `space`, return their number; 0 if the peer has
        ended.

        Raises:
            OSError: The bulk connection has failed.
        """
        return self._socket.recv_into(space)

    def wait(self, milliseconds: float) -> bool:
        """Return True as soon as bytes can be received, False after the time limit."""
        return bool(self._poll.poll(milliseconds))

    def shutdown(self, how: int) -> None:
        """Shut down sending, or both directions, of the TCP connection (`socket.SHUT_*`). No
        errors.
        """
        with contextlib.suppress(OSError):  # The peer has already closed the TCP connection.
            self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket of the TCP connection."""
        self._socket.close()


class ArrivingPiece:
    """A payload piece of which some bytes are still in the socket's receive buffer."""

    def __init__(self, connection: BulkConnection) -> None:
        self._connection = connection
        self._num_read = 0

    def __len__(self) -> int:
        """Return the number of payload bytes that the last call of `read_into` read."""
        return self._num_read

    def read_into(self, space: memoryview) -> int:
        """Read the received payload bytes into `space`; return their number, 0 if the peer has
        ended.

        Args:
            space: Writable memory for the missing bytes of the payload; not empty.
        """
        self._num_read = self._connection.read_piece(space)
        return self._num_read


def wire_bytes(frame: Frame) -> int:
    """Return the number of bytes of a frame on a bulk connection, including its header."""
    return _HEADER.size + (len(frame) if isinstance(frame, bytes) else frame.num_bytes)


class BulkConnection:
    """One end of a bulk (TCP) connection that carries the frames of a gRPC stream.

    One thread sends and one thread receives on a bulk connection. Any thread may call a bulk
    connection's methods `end` and `abort`.

    Attributes:
        num_received: Number of bytes received so far over the connection, including frame headers.

    Args:
        wire: Byte stream (plain or TLS) that carries the frames.
    """

    def __init__(self, wire: TcpWire) -> None:
        self._wire = wire
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        # Invariant: buffer[first:last] holds bytes read from the socket but not yet returned.
        self._first = self._last = 0
        # Number of missing bytes of the frame at the start of the receive buffer.
        self._lacking = 0
        # Number of bytes of the current payload piece that are not returned yet.
        self._piece_left = 0
        self._arriving = ArrivingPiece(self)
        self._ended = self._closed = False
        self.num_received = 0

    def send(self, frame: Frame) -> None:
        """Send one frame over the bulk connection.

        Raises:
            OSError: The bulk connection has ended before the frame was sent.
        """
        if isinstance(frame, bytes):
            parts: Sequence[bytes | memoryview] = (_HEADER.pack(len(frame)), frame)
        else:
            size = frame.num_bytes
            parts = frame.parts
            if len(parts) > _MOST_PARTS and size < _LEAST_PART_BYTES * len(parts):
                parts = (b"".join(parts),)
            parts = (_HEADER.pack(_IS_PIECE | size), *parts)
        with self._sending:
            if self._closed:
                raise OSError("the connection is closed")
            for first in range(0, len(parts), _MOST_PARTS):
                self._wire.send(parts[first : first + _MOST_PARTS])

    def receive(self, seconds: float = math.inf) -> bytes | ArrivingPiece | None:
        """Return the connection's next frame, or an `ArrivingPiece` if payload bytes have arrived.

        Args:
            seconds: Longest wait for a frame or payload bytes, in seconds.

        Returns:
            The frame or the piece; None at the end of the connection.

        Raises:
            TimeoutError: No complete frame and no payload byte arrived within the time limit.
            Malformed: The header of the received frame announces no legal length.
        """
        deadline = time.monotonic() + seconds
        with self._receiving:
            while not self._ended:
                if self._piece_left:
                    if self._first == self._last and not self._wait(deadline):
                        raise TimeoutError
                    return self._arriving
                if (frame := self._take()) is not None:
                    return frame
                if not self._piece_left:
                    if not self._wait(deadline):
                        raise TimeoutError
                    self._fill()
            return None

    @property
    def readable(self) -> bool:
        """True if `receive` would find bytes; False while another thread calls `receive`."""
        if self._last > self._first:
            return True
        if not self._receiving.acquire(blocking=False):
            return False
        try:
            return not self._closed and self._wire.wait(0.0)
        finally:
            self._receiving.release()

    def _wait(self, deadline: float) -> bool:
        if self._closed or deadline == math.inf:
            # The next read from the connection returns the end of the stream, or blocks.
            return True
        return self._wire.wait(max(0.0, 1000 * (deadline - time.monotonic())))

    def _take(self) -> bytes | None:
        """Return the next whole frame in the receive buffer, or begin to read a piece of a
        payload.
        """
        have = self._last - self._first
        if have < _HEADER.size:
            return None
        (word,) = _HEADER.unpack_from(self._buffer, self._first)
        size = word & ~_IS_PIECE
        if size > MAX_MESSAGE_BYTES or (word & _IS_PIECE and not size):
            raise Malformed(
                f"a frame of {size} bytes on a bulk connection is not valid; expected at most "
                f"{MAX_MESSAGE_BYTES} bytes, and at least 1 byte in a piece of a payload"
            )
        begin = self._first + _HEADER.size
        if word & _IS_PIECE:
            self._first, self._piece_left = begin, size
            self.num_received += _HEADER.size
            return None
        self._reserve(_HEADER.size + size)
        self._lacking = max(0, _HEADER.size + size - have)
        if self._lacking:
            return None
        begin = self._first + _HEADER.size
        frame = bytes(self._buffer[begin : begin + size])
        self._first = begin + size
        self.num_received += _HEADER.size + size
        return frame

    def _reserve(self, size: int) -> None:
        """Make the receive buffer large enough for `size` bytes that `receive` has not returned
        yet.
        """
        num_unread = self._last - self._first
        new_size = max(_BUFFER_BYTES, size)
        if len(self._buffer) < size or (not num_unread and len(self._buffer) > new_size):
            old, self._buffer = self._buffer, memoryview(bytearray(new_size))
            self._buffer[:num_unread] = old[self._first : self._last]
        elif self._first + size > len(self._buffer):
            self._buffer[:num_unread] = bytes(self._buffer[self._first : self._last])
        else:
            return
        self._first, self._last = 0, num_unread

    def _fill(self) -> None:
        if self._first == self._last:
            self._first = self._last = 0
        self._reserve(self._last - self._first + 1)
        space = self._buffer[self._last : self._last + max(_READ_BYTES, self._lacking)]
        self._last += self._read(space)

    def _read(self, space: memoryview) -> int:
        try:
            count = 0 if self._closed else self._wire.receive_into(space)
        except OSError:
            count = 0
        self._ended = count == 0
        return count

    def read_piece(self, space: memoryview) -> int:
        """Read the received bytes of the current payload piece into `space`; return their number.

        Args:
            space: Writable memory for the missing bytes of the payload; not empty.
        """
        with self._receiving:
            size = min(len(space), self._piece_left)
            if have := min(size, self._last - self._first):
                space[:have] = self._buffer[self._first : self._first + have]
                self._first += have
            else:
                have = self._read(space[:size])
            self._piece_left -= have
            self.num_received += have
            return have

    def end(self, seconds: float) -> None:
        """Shut down sending, wait until the peer also shuts down sending, and close the connection.

        Args:
            seconds: Longest wait until the peer closes the connection, in seconds.
        """
        self._wire.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        discarded = memoryview(bytearray(_READ_BYTES))
        while not self._ended and (seconds_left := deadline - time.monotonic()) > 0:
            if self._receiving.acquire(timeout=seconds_left):
                try:
                    # Read and discard all bytes before the socket is closed. A socket that is
                    # closed with unread bytes resets the connection, and the peer would lose the
                    # last bytes sent to it.
                    if not self._ended and self._wait(deadline):
                        self._read(discarded)
                finally:
                    self._receiving.release()
        self.abort()

    def finish(self) -> None:
        """Shut down sending on the bulk connection; receiving continues."""
        self._wire.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Shut down both directions of the bulk connection and close its socket. After `abort`,
        sends and receives that are blocked on the bulk connection return.
        """
        # The socket is shut down before the locks are taken, because the shutdown ends the calls of
        # threads that hold the locks. The descriptor is closed under both locks, so no thread uses
        # a reused descriptor.
        self._wire.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            if not self._closed:
                self._closed = True
                self._wire.close()
