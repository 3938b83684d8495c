"""Cuts messages into frames of at most 1 MiB, and reassembles messages from frames.

A frame is exactly the protobuf bytes of one envelope: ToServer, ToClient, ToPeer or FromPeer.
The module `framing` encodes and decodes frames with payload bytes without protobuf's runtime, which
would copy the payload bytes once more on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from thinwire.ops.buffers import PIECE_BYTES, buffer, put_away
from thinwire.ops.frozen import FrozenArray
from thinwire.ops.types import Link
from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Largest size of a frame, in bytes.
MAX_MESSAGE_BYTES = 1 << 20
#: Largest payload that is always sent inside the frame of its header, in bytes.
INLINE_BYTES = 64 << 10
#: Largest payload that is sent inside the frame of its header if a chunk may have the same size, in
#: bytes. Up to this size, two more copies cost less than one more message.
MOST_INLINE_BYTES = 256 << 10

# Field 3 of each envelope message (such as ToServer) is push, reply, part or holding.
_BULK_TAG = b"\x1a"
_BULK_BODIES = ("push", "reply", "part", "holding")
_CHUNK_TAG = b"\x22"  # Field 4 of each envelope message (such as ToServer) is chunk.
_DATA_TAG = 0x0A  # Encoded tag of the field data, field 1 of the message Chunk.
_PAYLOAD_TAG = b"\x6a"  # Field 13 of each message with payload bytes is payload.
_CHUNK_OVERHEAD = 8  # A chunk's header has two tags of one byte and two lengths of three bytes.
_NO_BYTES = memoryview(b"")
#: Largest and smallest number of payload bytes of one chunk.
MAX_CHUNK_BYTES = MAX_MESSAGE_BYTES - _CHUNK_OVERHEAD
MIN_CHUNK_BYTES = 16 << 10

BytesLike = bytes | bytearray | memoryview
#: Part of a payload: bytes, or an array that may change while the payload is sent.
Piece = BytesLike | FrozenArray
Envelope = pb.ToServer | pb.ToClient | peers.ToPeer | peers.FromPeer
Bulk = pb.Push | pb.Reply | peers.Part | peers.Holding
#: Messages whose payload always follows as chunks. The messages Offer and Slots are rare.
Chunked = pb.Offer | pb.Slots
Message = TypeVar("Message", pb.ToServer, pb.ToClient, peers.ToPeer, peers.FromPeer)


class Malformed(Exception):
    """Error: the received bytes are not a message, or are a message that the receiver must
    refuse.
    """


class Chunk:
    """A frame that carries the next piece of a message's payload. The parts of a payload frame are
    joined only when the frame is encoded.

    Attributes:
        parts: Views of the bytes of the payload, in order.
        num_bytes: Total number of payload bytes of all parts.
    """

    __slots__ = ("_head", "num_bytes", "parts")

    def __init__(self, parts: list[memoryview], num_bytes: int) -> None:
        self.parts, self.num_bytes = parts, num_bytes
        length = _varint(num_bytes)
        outer = _varint(1 + len(length) + num_bytes)
        self._head = b"".join((_CHUNK_TAG, outer, bytes((_DATA_TAG,)), length))

    def __len__(self) -> int:
        """Return the size of the encoded frame with the payload bytes, in bytes."""
        return len(self._head) + self.num_bytes

    def __bytes__(self) -> bytes:
        """Return the encoded frame with a copy of all its payload bytes."""
        return b"".join((self._head, *self.parts))


class Arriving(Protocol):
    """Received bytes of a message's payload that are not copied into the payload's memory yet."""

    def __len__(self) -> int:
        """Return the number of payload bytes that the last `read_into` call read."""

    def read_into(self, space: memoryview) -> int:
        """Read the available payload bytes into `space`; return their number."""


Frame = bytes | Chunk


def frame(message: Envelope) -> bytes:
    """Return the single frame that carries a message without a payload.

    Raises:
        ValueError: The message to frame is larger than MAX_MESSAGE_BYTES.
    """
    data = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a {message.WhichOneof('body')} message of {len(data)} bytes does not fit into one "
            f"frame of {MAX_MESSAGE_BYTES} bytes: shorten its lists or its document"
        )
    return data


def chunk_bytes_for(link: Link) -> int:
    """Return how many payload bytes a chunk (frame of a payload) should carry over a link.

    The receiver of a payload notices progress only after a whole chunk (piece of the payload) has
    arrived. A chunk (piece) of a payload has the size that passes the link in half a second, much
    less than a lease, but at least 16 KiB.
    """
    if link.mbps <= 0:
        return MAX_CHUNK_BYTES
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, int(link.mbps * 1e6 / 8 / 2)))


def frames(
    message: Envelope,
    pieces: Sequence[Piece],
    chunk_bytes: int | Callable[[], int] = MAX_CHUNK_BYTES,
) -> Iterator[Frame]:
    """Return the frames of a message with its payload.

    The function `frames` sets the field ``payload_bytes`` of the message's body. The function
    `frames` makes frames one by one while the caller iterates over its result. The memory of the
    payload's ``pieces`` must not change until the last frame is made, and the memory of a `Chunk`
    must not change until the chunk is joined or sent.

    Args:
        message: Message whose body has an unset ``payload`` field, or whose payload always follows
            as chunks.
        pieces: Parts of the message's payload in order. Only a FrozenArray may change during the
            iteration.
        chunk_bytes: Most payload bytes of one chunk, or a function that is called before each chunk
            and returns that number.

    Raises:
        ValueError: The header does not fit into one frame, or the message has no payload.
    """
    name = message.WhichOneof("body")
    body: Any = getattr(message, name or "", None)
    is_bulk = name in _BULK_BODIES
    if not (is_bulk or isinstance(body, Chunked)):
        raise ValueError(
            f"only messages {', '.join(_BULK_BODIES)}, offer and slots have a payload; the body "
            f"of this message is {name}"
        )
    arrays = (piece if isinstance(piece, FrozenArray) else memoryview(piece) for piece in pieces)
    body.payload_bytes = sum(array.nbytes for array in arrays)
    size = chunk_bytes if callable(chunk_bytes) else lambda: chunk_bytes
    if is_bulk and 0 < body.payload_bytes <= max(INLINE_BYTES, min(MOST_INLINE_BYTES, size())):
        header = body.SerializeToString()
        tail = _PAYLOAD_TAG + _varint(body.payload_bytes)
        length = _varint(len(header) + len(tail) + body.payload_bytes)
        whole = b"".join((_BULK_TAG, length, header, tail, *_views(pieces)))
        if len(whole) <= MAX_MESSAGE_BYTES:
            return iter((whole,))
    return _header_and_chunks(frame(message), _views(pieces), size)


def _views(pieces: Sequence[Piece]) -> Iterator[memoryview]:
    for piece in pieces:
        if isinstance(piece, FrozenArray):
            yield from piece.pieces()
        elif len(piece):
            yield memoryview(piece).cast("B")


def _header_and_chunks(
    header: bytes, views: Iterator[memoryview], size: Callable[[], int]
) -> Iterator[Frame]:
    yield header
    parts: list[memoryview] = []
    space = whole = min(size(), MAX_CHUNK_BYTES)
    for view in views:
        position = 0
        while position < len(view):
            part = view[position : position + space]
            parts.append(part)
            position += len(part)
            space -= len(part)
            if space == 0:
                yield Chunk(parts, whole)
                parts, space = [], (whole := min(size(), MAX_CHUNK_BYTES))
    if parts:
        yield Chunk(parts, whole - space)


def unknown_field_numbers(message: ProtobufMessage) -> list[int]:
    """Return the numbers of a message's fields that this protocol version does not have,
    ascending.
    """
    unknown = UnknownFieldSet(message)
    return sorted({unknown[index].field_number for index in range(len(unknown))})


class MessageAssembler(Generic[Message]):
    """Reassembles messages and their payloads from the frames of one stream.

    Args:
        message_type: Envelope of the received messages: ToServer on a server, ToClient on a client.
        limit: Function called with the header of a message, before memory is allocated for the
            payload. It returns the largest legal payload of the message, in bytes, or raises
            Malformed.
        space: Function that returns the memory for a chunked payload of the given number of bytes,
            as `buffer` does.
    """

    def __init__(
        self,
        message_type: type[Message],
        limit: Callable[[Message], int],
        space: Callable[[int], NDArray[Any]] = buffer,
    ) -> None:
        self._message_type: type[Message] = message_type
        self._limit: Callable[[Message], int] = limit
        self._space: Callable[[int], NDArray[Any]] = space
        self._header: Message | None = None
        self._buffer = _NO_BYTES
        self._filled = 0

    def feed(self, data: bytes | Arriving) -> tuple[Message, memoryview] | None:
        """Process one received frame of a gRPC stream, or the received part of a payload piece.

        Returns:
            (message, payload), or None while chunks are missing. The payload is empty if the
            message has none. The caller owns the payload.

        Raises:
            Malformed: The frame is wrong, or is not allowed at this point of the stream. The stream
                is unusable after this error.
        """
        if not isinstance(data, bytes):
            return self._read(data)
        if len(data) > MAX_MESSAGE_BYTES:
            raise Malformed(f"a frame has {len(data)} bytes; expected at most {MAX_MESSAGE_BYTES}")
        bulk = _chunk_data(data)
        if bulk is not None:
            return self._continue(bulk)
        try:
            message = self._message_type.FromString(data)
        except DecodeError as error:
            raise Malformed(f"a frame of {len(data)} bytes does not parse: {error}") from error
        name = message.WhichOneof("body")
        if name is None:
            numbers = unknown_field_numbers(message)
            raise Malformed(
                f"a received frame of {len(data)} bytes contains no known message (its fields are "
                f"{numbers}); does the other node run another Thinwire version?"
            )
        # A valid chunk whose encoding differs from the encoding by the class `Chunk`.
        if name == "chunk":
            return self._continue(memoryview(message.chunk.data))
        if self._header is not None:
            raise Malformed(f"{name} arrived in the middle of another message's payload")
        if name in _BULK_BODIES:
            return self._begin(message, getattr(message, name))
        if isinstance(body := getattr(message, name), Chunked):
            return self._expect(message, body.payload_bytes)
        return message, memoryview(b"")

    def _begin(self, message: Message, body: Bulk) -> tuple[Message, memoryview] | None:
        payload = body.payload  # Each access to the protobuf field copies the payload.
        if not payload:
            return self._expect(message, body.payload_bytes)
        self._check_limit(message, body.payload_bytes)
        if len(payload) != body.payload_bytes:
            raise Malformed(
                f"payload_bytes is {body.payload_bytes}, but the payload has {len(payload)} bytes"
            )
        return message, memoryview(payload)

    def _check_limit(self, message: Message, size: int) -> None:
        allowed = self._limit(message)
        if size > allowed:
            raise Malformed(f"a message has a payload of {size} bytes; expected at most {allowed}")

    def _expect(self, message: Message, size: int) -> tuple[Message, memoryview] | None:
        """Allocate the memory of a chunked payload and wait for its chunks."""
        self._check_limit(message, size)
        if size == 0:
            return message, memoryview(b"")
        self._header = message
        # The memory is aligned for TensorFlow's import without a copy.
        self._buffer = self._space(size).data
        self._filled = 0
        return None

    def _continue(self, bulk: memoryview) -> tuple[Message, memoryview] | None:
        if self._header is None:
            raise Malformed("a chunk of a payload arrived without a header before it")
        end = self._filled + len(bulk)
        if len(bulk) == 0 or end > len(self._buffer):
            raise Malformed(
                f"a chunk of {len(bulk)} bytes where {len(self._buffer) - self._filled} are missing"
            )
        self._buffer[self._filled : end] = bulk
        return self._filled_to(end)

    def _read(self, arriving: Arriving) -> tuple[Message, memoryview] | None:
        if self._header is None:
            raise Malformed("a chunk of a payload arrived without a header before it")
        return self._filled_to(self._filled + arriving.read_into(self._buffer[self._filled :]))

    def _filled_to(self, end: int) -> tuple[Message, memoryview] | None:
        # A large payload leaves this process' memory in steps of at least PIECE_BYTES. Earlier
        # calls have handled all bytes before the position `done`.
        done = self._filled // PIECE_BYTES * PIECE_BYTES
        self._filled = end
        if end - done >= PIECE_BYTES:
            put_away(self._buffer[done:end])
        if self._header is None or end < len(self._buffer):
            return None
        result = self._header, self._buffer
        self._header, self._buffer = None, _NO_BYTES
        return result


def _varint(value: int) -> bytes:
    """Return a non-negative integer as protobuf's variable-length integer."""
    coded = bytearray()
    while value > 0x7F:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    coded.append(value)
    return bytes(coded)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Read a variable-length integer of up to 4 bytes; return (value, next position), or (-1,
    position) without one.
    """
    value = 0
    for count, byte in enumerate(data[position : position + 4]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return -1, position


def _chunk_data(data: bytes) -> memoryview | None:
    """Return the payload bytes of a frame that `Chunk` encoded; None for any other frame."""
    if data[:1] != _CHUNK_TAG:
        return None
    length, position = _read_varint(data, 1)
    if position + length != len(data) or data[position : position + 1] != b"\x0a":
        return None
    length, position = _read_varint(data, position + 1)
    if length < 0 or position + length != len(data):
        return None
    return memoryview(data)[position:]
