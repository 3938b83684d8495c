"""Format of UDP datagrams: 64-byte header, gradient values of one variable slice, 16-byte tag.

All numbers in a UDP datagram are little-endian. In the datagram format, a slot is a slice of a
variable on a shard server. Each datagram header has the position of the values in the variable
slice, so a shard server can use a datagram without earlier datagrams, which may be lost, repeated
or reordered. The authentication tag of a datagram is keyed BLAKE2b-128 (RFC 7693) over header and
payload. The authentication tag of a datagram cannot be forged without the session's key, and it
detects damage as a checksum does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from thinwire.ops.routing.base import ValueEncoding
from thinwire.ops.types import Bool, UInt8

MAGIC = int.from_bytes(b"DGT1", "little")
VERSION = 1
HEADER_BYTES, TAG_BYTES, KEY_BYTES = 64, 16, 32
#: Size of a datagram's header and authentication tag together, in bytes.
FRAME_BYTES = HEADER_BYTES + TAG_BYTES
#: Largest payload of UDP over IPv4, in bytes.
LARGEST_DATAGRAM = 65_507
#: Largest distance between consecutive positions in a sparse datagram, which sends the distance as
#: a uint16.
LARGEST_GAP = 0xFFFF
#: Largest number of UDP datagram channels (priority classes) of a run.
MOST_CHANNELS = 7

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("encoding", "u1"),  # a ValueEncoding; sparse datagrams also set the flag SPARSE
        ("channel", "u1"),  # number of the datagram's channel (priority class), 1 to 7
        ("flags", "u1"),  # reserved, always 0
        ("session", "<u8"),
        ("worker", "<u4"),
        ("slot", "<u4"),  # number of the variable slice in the shard server's layout (ShardLayout)
        ("step", "<u4"),  # number of the step whose gradient is pushed, modulo 2**32
        ("block", "<u4"),  # number of the gradient block that has the first value
        ("num_blocks", "<u4"),  # number of gradient blocks of the variable slice
        ("offset", "<u4"),  # position of the datagram's first value in the variable slice
        ("count", "<u4"),  # number of gradient values in the datagram
        ("entries", "<u4"),  # number of entries of the variable slice
        ("scale", "<f4"),
        ("low", "<f4"),
        ("sequence", "<u4"),  # number of the datagram in its session and channel, modulo 2**32
        ("payload_bytes", "<u4"),
    ]
)

#: Value encoding -> dtype of the values in a datagram's payload. A UINT4 byte has two values, the
#: first value in its low half.
VALUE_DTYPES: dict[ValueEncoding, np.dtype[Any]] = {
    ValueEncoding.FLOAT32: np.dtype("<f4"),
    ValueEncoding.UINT16: np.dtype("<u2"),
    ValueEncoding.UINT8: np.dtype("u1"),
    ValueEncoding.UINT4: np.dtype("u1"),
    ValueEncoding.BFLOAT16: np.dtype("<u2"),
    ValueEncoding.FLOAT16: np.dtype("<f2"),
    ValueEncoding.INT8: np.dtype("i1"),
}
#: Encodings that quantize gradient values to integers between the low and high end of a block.
LEVELS = frozenset({ValueEncoding.UINT16, ValueEncoding.UINT8, ValueEncoding.UINT4})
GAP_DTYPE = np.dtype("<u2")


@dataclasses.dataclass(frozen=True)
class DatagramSession:
    """UDP session of a worker with a shard server, which the server creates at registration."""

    id: int  # session id, 64 random bits
    # 32-byte random key for the authentication tags of datagrams
    key: bytes = dataclasses.field(repr=False)
    worker: int  # id of the worker that sends the UDP datagrams

    def __post_init__(self) -> None:
        """Raise an error if the session id, key or worker id does not fit the datagram's header.

        Raises:
            ValueError: The session id, the key or the worker id has a wrong size.
        """
        if not (0 <= self.id < 1 << 64 and 0 <= self.worker < 1 << 32):
            raise ValueError(
                f"session {self.id}, worker {self.worker}: expected unsigned ids of 64 and 32 bits"
            )
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"the signing key has {len(self.key)} bytes; expected {KEY_BYTES}")


def value_bytes(encoding: ValueEncoding, count: int) -> int:
    """Return the size of `count` encoded gradient values on the wire, in bytes."""
    if encoding is ValueEncoding.UINT4:
        return (count + 1) // 2
    return count * VALUE_DTYPES[encoding].itemsize


def payload_bytes(encoding: ValueEncoding, sparse: bool, count: int) -> int:
    """Return the payload size in bytes of a datagram with `count` values, and gaps if sparse."""
    return value_bytes(encoding, count) + (GAP_DTYPE.itemsize * count if sparse else 0)


def most_values(encoding: ValueEncoding, sparse: bool, limit_bytes: int) -> int:
    """Return how many encoded values fit a datagram's payload of `limit_bytes`.

    >>> most_values(ValueEncoding.FLOAT32, False, 1392), most_values(ValueEncoding.UINT4, True, 13)
    (348, 5)
    """
    # a gap between positions (uint16) has 4 half bytes
    half_bytes = 4 * GAP_DTYPE.itemsize // 2 * sparse
    if encoding is ValueEncoding.UINT4:
        half_bytes += 1
        count = 2 * limit_bytes // half_bytes
        # An odd number of 4-bit values takes a whole last byte, which may exceed the payload limit.
        return count if payload_bytes(encoding, sparse, count) <= limit_bytes else count - 1
    return 2 * limit_bytes // (half_bytes + 2 * VALUE_DTYPES[encoding].itemsize)


def pack_nibbles(levels: UInt8) -> UInt8:
    """Pack [m, count] 4-bit quantized values into [m, (count + 1) // 2] bytes."""
    packed = levels[:, ::2].copy()
    packed[:, : levels.shape[1] // 2] |= levels[:, 1::2] << 4
    return packed


def unpack_nibbles(packed: UInt8, count: int) -> UInt8:
    """Unpack [m, count] 4-bit quantized values from [m, (count + 1) // 2] bytes."""
    levels = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 15, out=levels[:, ::2])
    np.right_shift(packed, 4, out=levels[:, 1::2])
    return levels[:, :count]


def sign(data: memoryview, size: int, key: bytes) -> None:
    """Write the authentication tag into each datagram of `size` bytes in `data`."""
    for start in range(0, len(data), size):
        end = start + size - TAG_BYTES
        data[end : end + TAG_BYTES] = blake2b(
            data[start:end], digest_size=TAG_BYTES, key=key
        ).digest()


def authentic(data: memoryview, size: int, starts: Sequence[int], tags: UInt8, key: bytes) -> Bool:
    """Return which datagrams have a correct authentication tag, in a time that no tag affects.

    Args:
        data: Consecutive received datagrams of `size` bytes.
        size: Size of each received datagram, in bytes.
        starts: Byte positions in `data` at which the datagrams to check start.
        tags: [len(starts), 16] received authentication tags.
        key: Secret key of the datagram session.

    Returns:
        [len(starts)] bool: True if the datagram's tag is correct.
    """
    signed = size - TAG_BYTES
    computed = b"".join(
        [
            blake2b(data[start : start + signed], digest_size=TAG_BYTES, key=key).digest()
            for start in starts
        ]
    )
    # All 16 bytes of a tag are compared. If the comparison stopped at the first wrong byte, the
    # response time would reveal how many bytes of a forged tag are correct.
    difference = np.frombuffer(computed, np.uint8).reshape(-1, TAG_BYTES) ^ tags
    right: Bool = np.bitwise_or.reduce(difference, axis=1) == 0
    return right
