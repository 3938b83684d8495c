"""Frames over a TCP connection: small ones whole, pieces of payloads from and to their place."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from thinwire.proto.framing import MAX_MESSAGE_BYTES, Frame, Malformed

_HEADER = struct.Struct(">I")
_IS_PIECE = 1 << 31
#: Read by one call where no piece of a payload is expected: little of one is copied.
_READ_BYTES = 16 << 10
_BUFFER_BYTES = 64 << 10
#: More parts than these, and smaller ones on average, are joined: a call takes 1,024 at most.
_MOST_PARTS, _LEAST_PART_BYTES = 64, 16 << 10


class Wire(Protocol):
    """The bytes of a connection; one thread sends, one receives, any may shut down."""

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all bytes; raises OSError."""

    def receive_into(self, space: memoryview) -> int:
        """Wait for bytes and return how many there are now, 0 at the end; raises OSError."""

    def wait(self, milliseconds: float | None) -> bool:
        """Return whether something can be received in this time; None: as long as it takes."""

    def shutdown(self, how: int) -> None:
        """End what is sent, or everything; never raises."""

    def close(self) -> None:
        """Free the descriptor."""


class TcpWire:
    """A connection without protection.

    Args:
        connected: The socket; it belongs to this object from now on.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """See `Wire.send`."""
        missing = sum(map(len, parts)) - self._socket.sendmsg(parts)
        if missing:  # a signal came in between
            self._socket.sendall(b"".join(parts)[-missing:])

    def receive_into(self, space: memoryview) -> int:
        """See `Wire.receive_into`."""
        return self._socket.recv_into(space)

    def wait(self, milliseconds: float | None) -> bool:
        """See `Wire.wait`."""
        return bool(self._poll.poll(milliseconds))

    def shutdown(self, how: int) -> None:
        """See `Wire.shutdown`."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(how)

    def close(self) -> None:
        """See `Wire.close`."""
        self._socket.close()


class ArrivingPiece:
    """The bytes of a payload that have come, and are still in the socket."""

    def __init__(self, connection: BulkConnection) -> None:
        self._connection = connection
        self._num_read = 0

    def __len__(self) -> int:
        """Return how many bytes the last `read_into` found."""
        return self._num_read

    def read_into(self, space: memoryview) -> int:
        """Move what has come to its place; return how many bytes, 0 where the connection ends.

        Args:
            space: Where the rest of the payload belongs; not empty.
        """
        self._num_read = self._connection.read_piece(space)
        return self._num_read


def most_buffer_bytes() -> int:
    """Return what the buffer of one connection has at most: one whole message, or several."""
    return max(_BUFFER_BYTES, _HEADER.size + MAX_MESSAGE_BYTES)


def wire_bytes(frame: Frame) -> int:
    """Return what a frame costs on a connection."""
    return _HEADER.size + (len(frame) if isinstance(frame, bytes) else frame.num_bytes)


class BulkConnection:
    """One end of a connection that carries a stream's frames.

    One thread sends, and one receives; `end` and `abort` are for any thread.

    Attributes:
        num_received: Bytes so far, with headers.

    Args:
        wire: The bytes.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._first = self._last = 0  # what has been read and not taken
        self._lacking = 0  # bytes of a frame that has begun
        self._piece_left = 0
        self._arriving = ArrivingPiece(self)
        self._ended = self._closed = False
        self.num_received = 0

    def send(self, frame: Frame) -> None:
        """Send one frame.

        Raises:
            OSError: The connection has ended.
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
        """Return the next frame, or a sign that more of a payload has come; None: the end.

        Raises:
            TimeoutError: Neither came in this time.
            Malformed: What came is no frame.
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
        """Whether something has come that was not taken (the receiving thread knows best)."""
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
            return True  # whoever reads then finds the end, or waits
        return self._wire.wait(max(0.0, 1000 * (deadline - time.monotonic())))

    def _take(self) -> bytes | None:
        """Return a frame that is there whole; begin a piece."""
        have = self._last - self._first
        if have < _HEADER.size:
            return None
        (word,) = _HEADER.unpack_from(self._buffer, self._first)
        size = word & ~_IS_PIECE
        if size > MAX_MESSAGE_BYTES or (word & _IS_PIECE and not size):
            raise Malformed(f"a frame of {size} bytes; at most {MAX_MESSAGE_BYTES} is allowed")
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
        """See that as many bytes as this fit behind the first that was not taken."""
        kept = self._last - self._first
        wanted = max(_BUFFER_BYTES, size)
        if len(self._buffer) < size or (not kept and len(self._buffer) > wanted):
            old, self._buffer = self._buffer, memoryview(bytearray(wanted))
            self._buffer[:kept] = old[self._first : self._last]
        elif self._first + size > len(self._buffer):
            self._buffer[:kept] = bytes(self._buffer[self._first : self._last])
        else:
            return
        self._first, self._last = 0, kept

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
        """Move what has come of a payload to its place; see `Arriving.read_into`."""
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
        """Send nothing more, give the other end this long to read and to end as well, and close."""
        self._wire.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        rest = memoryview(bytearray(_READ_BYTES))
        while not self._ended and (left := deadline - time.monotonic()) > 0:
            if self._receiving.acquire(timeout=left):
                try:
                    if not self._ended and self._wait(deadline):
                        self._read(rest)  # unread bytes would make the system cut the connection
                finally:
                    self._receiving.release()
        self.abort()

    def finish(self) -> None:
        """Send nothing more."""
        self._wire.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """End both directions now; whoever sends or receives returns."""
        self._wire.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            if not self._closed:
                self._closed = True
                self._wire.close()
