"""Records of a journal: the events of a PS shard's state machine with their times, as checksummed
bytes.

A journal record consists of the length of its body (4 bytes), a checksum (4 bytes, CRC-32 of length
and body), and the body.

The body of a journal record consists of the time (8 bytes, float64), the kind of the record (1
byte) and the record's contents. A journal stores a worker's push as the shard received it: the Push
message, then its payload. A push that was reassembled from datagrams is coded as a Push message
with payload, too. A journal stores all events except pushes, and the head of each file, as JSON.
All binary numbers in a journal are little-endian; no value is pickled.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.kernels import Kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.sharding.flat_updates import blocks_of
from thinwire.ops.types import Kind, ShardLayout
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages, push_head
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.core.serialization import from_plain, to_plain
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder

_FRAME = struct.Struct("<II")
_BODY = struct.Struct("<dB")
_PUSH = struct.Struct("<III")  # fields: worker id, bytes of the coded update, bytes of the message
_HEAD, _EVENT, _PUSH_EVENT = 0, 1, 2
#: Exceptions that decoding the body of a damaged journal record may raise.
_DECODING_ERRORS = (
    *(struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError),
    RecursionError,
)


class DamagedRecord(ValueError):
    """Error: a journal record was changed after it was written; the error's text names the
    damage.
    """


class TruncatedRecord(DamagedRecord):
    """Error: a journal file ends before the end of its last record."""


class EventCoder:
    """Codes the events of one shard's state machine as journal records, and decodes the records."""

    def __init__(
        self, layout: ShardLayout, method: Method, kernels: Kernels, aux_count: int = 0
    ) -> None:
        """Prepare the coder with the properties of the shard and the run that pushes must fit.

        Args:
            layout: Layout of the shard: the slices of the model that the shard holds.
            method: Training method of the run.
            kernels: Implementation of the array operations.
            aux_count: Number of values in each push that shard 0 averages over the workers (`aux`).
        """
        self._layout = layout
        self._kind = kind = method.kind if method.collective == THROUGH_PS else Kind.VALUES
        self._decoder = PushDecoder(
            layout,
            kind,
            kernels,
            aux_count,
            groups=None,
            keeps_blocks=method.down_codec.relays,
        )
        self._chooser = IndexChooser()

    def code(self, event: events.Event, now: float) -> list[Any]:
        """Return the byte strings of the journal record of an event that the shard's state machine
        handles at `now`.
        """
        if not isinstance(event, events.Push):
            return framed([_BODY.pack(now, _EVENT), _json(to_plain(event))])
        message, pieces = event.coded or self._coded(event)
        head = message.SerializeToString()
        described = _PUSH.pack(event.worker, event.num_bytes, len(head))
        return framed([_BODY.pack(now, _PUSH_EVENT) + described + head, *pieces])

    def _coded(self, push: events.Push) -> tuple[pb.Push, list[Any]]:
        """Code a push event that does not hold its received bytes as message and payload."""
        message = pb.Push(incarnation=push.incarnation, epoch=push.epoch)
        push_head.kind_to_message(self._kind, message)
        push_head.head_to_message(push.head, message)
        push_head.origin_to_message(push.origin, message)
        blocks = push.blocks or blocks_of(push.update, self._layout)
        coded = [self._chooser.encode(block) for block in blocks]
        pieces = list(messages.blocks_to_message(coded, message.blocks))
        if push.change is not None:
            changed = map(IndexChooser().encode, blocks_of(push.change, self._layout))
            change_pieces = messages.blocks_to_message(changed, message.changes)
            message.change_bytes = sum(map(len, change_pieces))
            pieces += change_pieces
        if push.aux is not None:
            message.aux_count = len(push.aux)
            pieces.append(push.aux.astype("<f4").tobytes())
        return message, pieces

    def decode(self, body: memoryview) -> tuple[events.Event, float]:
        """Return (event, time at which the shard's state machine handled the event) from a record's
        body.

        Raises:
            DamagedRecord: The body of the journal record does not hold an event.
        """
        try:
            now, kind = _BODY.unpack_from(body)
            if kind == _PUSH_EVENT:
                return self._push(body[_BODY.size :]), now
            if kind == _EVENT:
                return _event(json.loads(bytes(body[_BODY.size :]))), now
        except _DECODING_ERRORS as error:
            raise DamagedRecord(f"{type(error).__name__}: {error}") from error
        except (DecodeError, Malformed, NonFinite) as error:
            raise DamagedRecord(f"the record has no push for this shard: {error}") from error
        raise DamagedRecord(f"the journal record is of kind {kind}; expected an event")

    def _push(self, content: memoryview) -> events.Push:
        worker, num_bytes, head_bytes = _PUSH.unpack_from(content)
        start = _PUSH.size + head_bytes
        message = pb.Push.FromString(bytes(content[_PUSH.size : start]))
        contents = self._decoder.read(message, memoryview(bytes(content[start:])))
        return self._decoder.whole_event(worker, message, contents, num_bytes)


def _event(content: Any) -> events.Event:
    event = from_plain(content)
    if not isinstance(event, events.Event):
        raise TypeError(f"the journal record has a {type(event).__name__}; expected an event")
    return event


def framed(body: Sequence[Any]) -> list[Any]:
    """Return the byte strings that form a journal record with this body: length, checksum, body."""
    length = sum(len(piece) for piece in body)
    checksum = zlib.crc32(length.to_bytes(4, "little"))
    for piece in body:
        checksum = zlib.crc32(piece, checksum)
    return [_FRAME.pack(length, checksum) + body[0], *body[1:]]


def head(content: dict[str, Any]) -> list[Any]:
    """Return the byte strings of a journal file's head (first record) with the given content."""
    return framed([_BODY.pack(0.0, _HEAD), _json(content)])


def content_of_head(body: memoryview) -> dict[str, Any]:
    """Return the content of a journal file's head (first record), as passed to `head`.

    Raises:
        DamagedRecord: The body of the journal record is not the head of a file.
    """
    try:
        _, kind = _BODY.unpack_from(body)
        content = json.loads(bytes(body[_BODY.size :]))
    except (struct.error, ValueError, RecursionError) as error:
        raise DamagedRecord(f"the first record of the journal is no head: {error}") from error
    if kind != _HEAD or not isinstance(content, dict):
        raise DamagedRecord(f"the first record of the journal is of kind {kind}; expected a head")
    return content


def bodies(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (byte offset of the record's end, body) for each record of a journal file, in order.

    Raises:
        DamagedRecord: A journal record was changed after it was written. The subclass
            TruncatedRecord means that the last record is incomplete.
    """
    at = 0
    while at < len(data):
        if at + _FRAME.size > len(data):
            raise TruncatedRecord(
                f"the last record is cut short: the journal has only {len(data) - at} bytes of it"
            )
        length, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < length:
            raise TruncatedRecord(
                f"the last record is cut short: the journal has {len(body)} of its {length} bytes"
            )
        if length < _BODY.size or zlib.crc32(body, zlib.crc32(data[at : at + 4])) != checksum:
            raise DamagedRecord("the checksum of a journal record does not match its bytes")
        at += _FRAME.size + length
        yield at, body


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
