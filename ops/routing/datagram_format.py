"""The datagram: a header of 64 bytes, values of one slot, a tag of 16 bytes. Little-endian.

Each header gives the place of the values in the slot, so a datagram may be lost, repeated or
overtaken without harm to the others. The tag is keyed BLAKE2b-128 (RFC 7693) over header and
payload: it cannot be forged without the session's key, and it detects damage as a checksum would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.routing.base import ValueEncoding

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = int.from_bytes(b"DGT1", "little")
VERSION = 1
HEADER_BYTES, TAG_BYTES, KEY_BYTES = 64, 16, 32
#: Bytes of a datagram that are not payload.
FRAME_BYTES = HEADER_BYTES + TAG_BYTES
#: Largest payload of UDP over IPv4.
LARGEST_DATAGRAM = 65_507
#: Positions of a sparse datagram are at most this far apart.
LARGEST_GAP = 0xFFFF
#: Channels that there can be beside the stream.
MOST_CHANNELS = 7

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("encoding", "u1"),  # a ValueEncoding, and perhaps SPARSE
        ("channel", "u1"),  # 1 to 7
        ("flags", "u1"),  # 0
        ("session", "<u8"),
        ("worker", "<u4"),
        ("slot", "<u4"),  # slice number in the ShardLayout
        ("step", "<u4"),  # modulo 2**32
        ("block", "<u4"),  # of the first entry
        ("num_blocks", "<u4"),  # of the slot
        ("offset", "<u4"),  # position of the first value in the slot
        ("count", "<u4"),  # values
        ("entries", "<u4"),  # of the slot
        ("scale", "<f4"),
        ("low", "<f4"),
        ("sequence", "<u4"),  # per session and channel, modulo 2**32
        ("payload_bytes", "<u4"),
    ]
)

#: How the values lie in the payload; UINT4: two of them in each byte, the earlier one lower.
VALUE_DTYPES: dict[ValueEncoding, np.dtype[Any]] = {
    ValueEncoding.FLOAT32: np.dtype("<f4"),
    ValueEncoding.UINT16: np.dtype("<u2"),
    ValueEncoding.UINT8: np.dtype("u1"),
    ValueEncoding.UINT4: np.dtype("u1"),
    ValueEncoding.BFLOAT16: np.dtype("<u2"),
    ValueEncoding.FLOAT16: np.dtype("<f2"),
    ValueEncoding.INT8: np.dtype("i1"),
}
#: Encodings whose values are levels between a low and a high end.
LEVELS = frozenset({ValueEncoding.UINT16, ValueEncoding.UINT8, ValueEncoding.UINT4})
GAP_DTYPE = np.dtype("<u2")


@dataclasses.dataclass(frozen=True)
class DatagramSession:
    """What one worker and one shard share from the worker's registration until it ends."""

    id: int  # 64 random bits
    key: bytes = dataclasses.field(repr=False)  # 32 random bytes
    worker: int

    def __post_init__(self) -> None:
        """Refuse what does not fit the header.

        Raises:
            ValueError: An id, key or worker number of another size.
        """
        if not (0 <= self.id < 1 << 64 and 0 <= self.worker < 1 << 32):
            raise ValueError(
                f"session {self.id} of worker {self.worker}: expected 64 and 32 bits, not negative"
            )
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"a session key of {len(self.key)} bytes; expected {KEY_BYTES}")


def value_bytes(encoding: ValueEncoding, count: int) -> int:
    """Return the bytes of `count` values on the wire."""
    if encoding is ValueEncoding.UINT4:
        return (count + 1) // 2
    return count * VALUE_DTYPES[encoding].itemsize


def payload_bytes(encoding: ValueEncoding, sparse: bool, count: int) -> int:
    """Return the bytes of `count` values, and of their gaps if sparse."""
    return value_bytes(encoding, count) + (GAP_DTYPE.itemsize * count if sparse else 0)


def most_values(encoding: ValueEncoding, sparse: bool, limit_bytes: int) -> int:
    """Return how many values fit a payload of `limit_bytes`.

    >>> most_values(ValueEncoding.FLOAT32, False, 1392), most_values(ValueEncoding.UINT4, True, 13)
    (348, 5)
    """
    half_bytes = 4 * GAP_DTYPE.itemsize // 2 * sparse
    if encoding is ValueEncoding.UINT4:
        half_bytes += 1
        count = 2 * limit_bytes // half_bytes
        return count if payload_bytes(encoding, sparse, count) <= limit_bytes else count - 1
    return 2 * limit_bytes // (half_bytes + 2 * VALUE_DTYPES[encoding].itemsize)


def pack_nibbles(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return [m, (count + 1) // 2] bytes for [m, count] levels below 16."""
    packed = levels[:, ::2].copy()
    packed[:, : levels.shape[1] // 2] |= levels[:, 1::2] << 4
    return packed


def unpack_nibbles(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Return [m, count] levels of [m, (count + 1) // 2] bytes."""
    levels = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 15, out=levels[:, ::2])
    np.right_shift(packed, 4, out=levels[:, 1::2])
    return levels[:, :count]


def sign(data: memoryview, size: int, key: bytes) -> None:
    """Write the tag of each datagram of `size` bytes in `data`."""
    for start in range(0, len(data), size):
        end = start + size - TAG_BYTES
        data[end : end + TAG_BYTES] = blake2b(
            data[start:end], digest_size=TAG_BYTES, key=key
        ).digest()


def authentic(
    data: memoryview, size: int, starts: Sequence[int], tags: NDArray[np.uint8], key: bytes
) -> NDArray[np.bool_]:
    """Return for each datagram whether its tag is right, in time that does not depend on it.

    Args:
        data: Datagrams of `size` bytes.
        size: Of each.
        starts: Where those to check begin.
        tags: [len(starts), 16] as received.
        key: Of the session.
    """
    signed = size - TAG_BYTES
    computed = b"".join(
        [
            blake2b(data[start : start + signed], digest_size=TAG_BYTES, key=key).digest()
            for start in starts
        ]
    )
    difference = np.frombuffer(computed, np.uint8).reshape(-1, TAG_BYTES) ^ tags
    right: NDArray[np.bool_] = np.bitwise_or.reduce(difference, axis=1) == 0
    return right
