"""Parses Thinwire's messages out of the bytes that a proxy passes on."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tests.chaos.proxy import DOWN, UP
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.handshake import NUMBER_BYTES, PROOF_BYTES

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _PADDED = 0, 0x8
_FRAME_BYTES, _PREFIX_BYTES = 9, 5
_WORD_BYTES, _IS_PIECE = 4, 1 << 31
_TYPES: dict[str, Any] = {UP: pb.ToServer, DOWN: pb.ToClient}


class Messages:
    """Finds the gRPC messages of one direction of one connection.

    Args:
        way: Which.
    """

    def __init__(self, way: str) -> None:
        self._type = _TYPES[way]
        self._bytes = bytearray()
        self._streams: dict[int, bytearray] = collections.defaultdict(bytearray)
        self._has_preface = way == UP

    def feed(self, data: bytes) -> Iterator[Any]:
        """Return the messages that these bytes complete; chunks of payloads are none."""
        self._bytes += data
        if self._has_preface:
            if len(self._bytes) < len(_PREFACE):
                return
            self._has_preface = False
            del self._bytes[: len(_PREFACE)]
        for stream, content in self._frames():
            self._streams[stream] += content
            yield from self._messages(self._streams[stream])

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        while len(self._bytes) >= _FRAME_BYTES:
            end = _FRAME_BYTES + int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < end:
                return
            kind, flags = self._bytes[3], self._bytes[4]
            stream = int.from_bytes(self._bytes[5:9], "big")
            content = bytes(self._bytes[_FRAME_BYTES:end])
            del self._bytes[:end]
            if kind == _DATA:
                padded = bool(flags & _PADDED)
                yield stream, content[1 : len(content) - content[0]] if padded else content

    def _messages(self, stream: bytearray) -> Iterator[Any]:
        while len(stream) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(stream[1:_PREFIX_BYTES], "big")
            if len(stream) < end:
                return
            message = self._type.FromString(bytes(stream[_PREFIX_BYTES:end]))
            del stream[:end]
            if message.WhichOneof("body") != "chunk":
                yield message


class BulkMessages:
    """Finds the messages of one direction of a bulk connection.

    Args:
        way: Which.
    """

    def __init__(self, way: str) -> None:
        self._type = _TYPES[way]
        self._bytes = bytearray()
        self._handshake = {UP: NUMBER_BYTES + PROOF_BYTES, DOWN: PROOF_BYTES}[way]

    def feed(self, data: bytes) -> Iterator[Any]:
        """Return the messages that these bytes complete; pieces of payloads are none."""
        self._bytes += data
        if len(self._bytes) < self._handshake:
            return
        del self._bytes[: self._handshake]
        self._handshake = 0
        while len(self._bytes) >= _WORD_BYTES:
            word = int.from_bytes(self._bytes[:_WORD_BYTES], "big")
            end = _WORD_BYTES + (word & ~_IS_PIECE)
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[_WORD_BYTES:end])
            del self._bytes[:end]
            if not word & _IS_PIECE:
                yield self._type.FromString(content)


class Ambusher(Protocol):
    """Waits for an instant."""

    def __call__(self, worker: int, shard: int, message: Any) -> bool:
        """Hear a message; return False if it, and all that follows, is to vanish."""


class Hearing:
    """Records all messages to workers, by worker and shard.

    Attributes:
        told: (worker, shard) -> steps that were answered during the run.
        on_ports: Called before a worker receives a shard's UDP ports.
        on_bulk: Called before a worker receives a shard's port for a bulk connection.
        ambush: Called with every message.
    """

    def __init__(self) -> None:
        """Start without any messages."""
        self.told: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
        self.on_ports: Callable[[int, tuple[int, ...]], None] = lambda worker, ports: None
        self.on_bulk: Callable[[int, int, int], None] = lambda worker, shard, port: None
        self.ambush: Ambusher | None = None

    def between(
        self, worker: int, shard: int, kind: type[Messages] | type[BulkMessages] = Messages
    ) -> Callable[[str], Callable[[bytes], bool]]:
        """Return what makes the listeners of a connection of some kind."""

        def listener(way: str) -> Callable[[bytes], bool]:
            messages = kind(way)
            return lambda data: all([self._hear(worker, shard, m) for m in messages.feed(data)])

        return listener

    def _hear(self, worker: int, shard: int, message: Any) -> bool:
        body = message.WhichOneof("body")
        if body == "reply":
            if message.reply.step and not message.reply.stop:
                self.told[worker, shard].add(message.reply.step)
        elif body == "welcome":
            if message.welcome.datagrams.ports:
                self.on_ports(worker, tuple(message.welcome.datagrams.ports))
            if message.welcome.bulk.port:
                self.on_bulk(worker, shard, message.welcome.bulk.port)
        ambush = self.ambush
        return ambush is None or ambush(worker, shard, message)
