"""Cuts messages into frames of at most 1 MiB and puts them together again.

A frame is exactly the protobuf bytes of one envelope: ToServer, ToClient, ToPeer or FromPeer.
Frames with bulk bytes are encoded and decoded by hand: protobuf's runtime would copy those bytes
once more on each side.
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

#: No frame is larger than this.
MAX_MESSAGE_BYTES = 1 << 20
#: A payload up to this size travels inside its header's frame.
INLINE_BYTES = 64 << 10
#: And up to this one where a chunk may be as large: a message less is worth two copies more.
MOST_INLINE_BYTES = 256 << 10

_BULK_TAG = b"\x1a"  # field 3 of every envelope: push, reply, part, holding
_BULK_BODIES = ("push", "reply", "part", "holding")
_CHUNK_TAG = b"\x22"  # field 4 of every envelope: chunk
_DATA_TAG = 0x0A  # Chunk.data, field 1
_PAYLOAD_TAG = b"\x6a"  # payload, field 13 of every bulk body
_CHUNK_OVERHEAD = 8  # two tags and two lengths of three bytes
_NO_BYTES = memoryview(b"")
#: Most and fewest bulk bytes of one chunk.
MAX_CHUNK_BYTES = MAX_MESSAGE_BYTES - _CHUNK_OVERHEAD
MIN_CHUNK_BYTES = 16 << 10

BytesLike = bytes | bytearray | memoryview
#: A part of a payload.
Piece = BytesLike | FrozenArray
Envelope = pb.ToServer | pb.ToClient | peers.ToPeer | peers.FromPeer
Bulk = pb.Push | pb.Reply | peers.Part | peers.Holding
Chunked = pb.Offer | pb.Slots  # their payloads always follow as chunks; both are rare
Message = TypeVar("Message", pb.ToServer, pb.ToClient, peers.ToPeer, peers.FromPeer)


class Malformed(Exception):
    """What arrived is not a message, or not one that is allowed here."""


class Chunk:
    """A frame that continues a payload, as parts of memory that are not joined yet.

    Attributes:
        parts: Its bulk bytes.
        num_bytes: How many.
    """

    __slots__ = ("_head", "num_bytes", "parts")

    def __init__(self, parts: list[memoryview], num_bytes: int) -> None:
        self.parts, self.num_bytes = parts, num_bytes
        length = _varint(num_bytes)
        outer = _varint(1 + len(length) + num_bytes)
        self._head = b"".join((_CHUNK_TAG, outer, bytes((_DATA_TAG,)), length))

    def __len__(self) -> int:
        """Return the bytes of the whole frame."""
        return len(self._head) + self.num_bytes

    def __bytes__(self) -> bytes:
        """Return the frame; each bulk byte is copied."""
        return b"".join((self._head, *self.parts))


class Arriving(Protocol):
    """Bulk bytes that continue a payload, and have not been moved to their place yet."""

    def __len__(self) -> int:
        """Return how many bytes were moved."""

    def read_into(self, space: memoryview) -> int:
        """Move what there is to its place; return how many bytes."""


Frame = bytes | Chunk


def frame(message: Envelope) -> bytes:
    """Return the one frame of a message without payload.

    Raises:
        ValueError: The message is larger than MAX_MESSAGE_BYTES.
    """
    data = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a {message.WhichOneof('body')} message of {len(data)} bytes does not fit into one "
            f"frame of {MAX_MESSAGE_BYTES}: shorten its lists or its document"
        )
    return data


def chunk_bytes_for(link: Link) -> int:
    """Return how many bulk bytes a chunk should carry over a link.

    A whole chunk is the smallest sign of progress, so on a slow link it must pass well within a
    lease: half a second's worth, but at least 16 KiB.
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

    Sets ``payload_bytes``. The frames are made one by one while the result is iterated, so the
    memory behind ``pieces`` must not change until then, and where they are chunks until these are
    joined or sent.

    Args:
        message: With one of the bodies that have a ``payload``, and that unset, or one whose
            payload always follows as chunks.
        pieces: The payload, as buffers of bytes in order, or arrays that may change meanwhile.
        chunk_bytes: Most bulk bytes of one chunk; a function is called before each.

    Raises:
        ValueError: The header does not fit into one frame, or the message has no payload.
    """
    name = message.WhichOneof("body")
    body: Any = getattr(message, name or "", None)
    is_bulk = name in _BULK_BODIES
    if not (is_bulk or isinstance(body, Chunked)):
        raise ValueError(
            f"only {', '.join(_BULK_BODIES)}, offer and slots have a payload, this message has "
            f"{name}"
        )
    sizes = (each if isinstance(each, FrozenArray) else memoryview(each) for each in pieces)
    body.payload_bytes = sum(each.nbytes for each in sizes)
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
    """Return the numbers of the fields that this version's messages do not have, ascending."""
    unknown = UnknownFieldSet(message)
    return sorted({unknown[place].field_number for place in range(len(unknown))})


class MessageAssembler(Generic[Message]):
    """Puts the frames of one stream together to messages with their payloads.

    Args:
        message_type: What arrives: ToServer on the server, ToClient on the client, and so on.
        limit: Given the header of a message with a payload, returns the largest one it may have,
            in bytes; may raise Malformed itself. Called before anything is allocated.
        space: Returns the memory for a payload that comes in chunks, as `buffer` does.
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

    @property
    def inside_payload(self) -> bool:
        """Whether chunks of the last header are still to come."""
        return self._header is not None

    def feed(self, data: bytes | Arriving) -> tuple[Message, memoryview] | None:
        """Take in one frame, or what has come of one.

        Returns:
            A message and its payload (empty where the message has none), or None while chunks are
            still to come. The payload belongs to the caller.

        Raises:
            Malformed: The frame, or its place in the stream, is wrong. The stream is of no use
                after that.
        """
        if not isinstance(data, bytes):
            return self._read(data)
        if len(data) > MAX_MESSAGE_BYTES:
            raise Malformed(f"a frame of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} is allowed")
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
                f"a frame of {len(data)} bytes holds no known message (fields {numbers}); is the "
                "other side of another Thinwire?"
            )
        if name == "chunk":  # encoded in an unusual way by another client
            return self._continue(memoryview(message.chunk.data))
        if self._header is not None:
            raise Malformed(f"a {name} arrived in the middle of a payload")
        if name in _BULK_BODIES:
            return self._begin(message, getattr(message, name))
        if isinstance(body := getattr(message, name), Chunked):
            return self._expect(message, body.payload_bytes)
        return message, memoryview(b"")

    def _begin(self, message: Message, body: Bulk) -> tuple[Message, memoryview] | None:
        payload = body.payload  # each access makes a new copy
        if not payload:
            return self._expect(message, body.payload_bytes)
        self._check_limit(message, body.payload_bytes)
        if len(payload) != body.payload_bytes:
            raise Malformed(
                f"payload_bytes is {body.payload_bytes} but the message holds {len(payload)} bytes"
            )
        return message, memoryview(payload)

    def _check_limit(self, message: Message, size: int) -> None:
        allowed = self._limit(message)
        if size > allowed:
            raise Malformed(f"a payload of {size} bytes; this message may have at most {allowed}")

    def _expect(self, message: Message, size: int) -> tuple[Message, memoryview] | None:
        """Begin to collect a payload that comes in chunks."""
        self._check_limit(message, size)
        if size == 0:
            return message, memoryview(b"")
        self._header = message
        self._buffer = self._space(size).data  # aligned, as TensorFlow's zero-copy import needs
        self._filled = 0
        return None

    def _continue(self, bulk: memoryview) -> tuple[Message, memoryview] | None:
        if self._header is None:
            raise Malformed("a chunk arrived without a header before it")
        end = self._filled + len(bulk)
        if len(bulk) == 0 or end > len(self._buffer):
            raise Malformed(
                f"a chunk of {len(bulk)} bytes where {len(self._buffer) - self._filled} are missing"
            )
        self._buffer[self._filled : end] = bulk
        return self._filled_to(end)

    def _read(self, arriving: Arriving) -> tuple[Message, memoryview] | None:
        if self._header is None:
            raise Malformed("a chunk arrived without a header before it")
        return self._filled_to(self._filled + arriving.read_into(self._buffer[self._filled :]))

    def _filled_to(self, end: int) -> tuple[Message, memoryview] | None:
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
    """Return (value, position behind it), or (-1, position) if there is none of <= 4 bytes."""
    value = 0
    for count, byte in enumerate(data[position : position + 4]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return -1, position


def _chunk_data(data: bytes) -> memoryview | None:
    """Return the bytes of a frame encoded as `Chunk` does; None for anything else."""
    if data[:1] != _CHUNK_TAG:
        return None
    length, position = _read_varint(data, 1)
    if position + length != len(data) or data[position : position + 1] != b"\x0a":
        return None
    length, position = _read_varint(data, position + 1)
    if length < 0 or position + length != len(data):
        return None
    return memoryview(data)[position:]
