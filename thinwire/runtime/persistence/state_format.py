"""Serialization of a node's plain state: a tree of JSON values, and the raw bytes of its arrays.

A node's arrays are stored one after the other in a file, aligned to 64 bytes, each with a CRC-32.
The tree of JSON values of a state refers to an array by the array's number. A manifest (the tree
and a record of each array) is one line of JSON with a CRC-32. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.ops.frozen import FrozenArray

_ALIGNMENT_BYTES = 64
_ARRAY_KINDS = "biufc"  # dtype kinds that are stored: bool, int, unsigned, float, complex


class StateEncoder:
    """Encoder of a node's plain state as JSON values and a list of arrays.

    Attributes:
        arrays: Arrays and byte strings of the encoded state, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any] | FrozenArray] = []

    def encode(self, value: Any, where: str) -> Any:
        """Return the JSON form of a state; containers and arrays become JSON objects with a tag.

        Args:
            value: Plain state: None, numbers, texts, arrays, and containers of these.
            where: Path of the value within the whole state, for error messages.

        Raises:
            TypeError: The value is not plain data (numbers, texts, arrays, containers of these).
                The message names the value's place in the state.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": [self._encode_item(item, where) for item in value.items()]}
        if type(value) in (bytes, bytearray):
            return {"bytes": self._put_aside(np.frombuffer(value, np.uint8), where)}
        if isinstance(value, np.generic):
            return {"scalar": self._put_aside(np.asarray(value), where)}
        if isinstance(value, (np.ndarray, FrozenArray)):
            return {"array": self._put_aside(value, where)}
        raise TypeError(
            f"{where} is a {type(value).__name__}; a checkpoint holds dicts, lists, tuples, numpy "
            "arrays, ints, floats, strings, bools, bytes and None"
        )

    def _encode_item(self, item: tuple[Any, Any], where: str) -> list[Any]:
        key, value = item
        if type(key) not in (str, int):
            raise TypeError(f"{where} has the key {key!r}, expected a string or an int")
        return [key, self.encode(value, f"{where}[{key!r}]")]

    def _put_aside(self, array: NDArray[Any] | FrozenArray, where: str) -> int:
        if array.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(
                f"{where} is an array of {array.dtype}, expected bools, integers, floats or "
                "complex numbers"
            )
        is_frozen = isinstance(array, FrozenArray)
        self.arrays.append(array if is_frozen else np.asarray(array, order="C"))
        return len(self.arrays) - 1


def decode_state(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return the state that ``StateEncoder.encode`` has encoded as tree ``value`` and arrays."""
    if isinstance(value, list):
        return [decode_state(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag == "dict":
        return {key: decode_state(item, arrays) for key, item in body}
    if tag == "tuple":
        return tuple(decode_state(item, arrays) for item in body)
    if tag == "array":
        return arrays[body]
    if tag == "scalar":
        return arrays[body][()]
    if tag == "bytes":
        return arrays[body].tobytes()
    if tag == "float":
        return float(body)
    raise ValueError(f"the checkpoint's manifest has the unknown type tag {tag!r}")


class _NoArrays(list[NDArray[Any]]):
    """Replacement for a list of a state's arrays that are not read; every item is a zero."""

    def __getitem__(self, number: Any) -> Any:
        """Return a zero in place of the state's array with the given number."""
        return np.zeros(())


def decode_values(value: Any) -> Any:
    """Return the state of an encoded tree ``value``, with a zero instead of every array."""
    return decode_state(value, _NoArrays())


class ArrayBytes:
    """Concatenated bytes of a state's arrays, padded to 64 bytes; each byte is read once.

    Attributes:
        records: Manifest records (dtype, shape, offset and CRC-32) of the arrays. The CRC-32 of an
            array is complete when all bytes of the array have been taken.
        num_bytes: Number of all bytes, including the padding between arrays.
    """

    def __init__(self, arrays: list[NDArray[Any] | FrozenArray]) -> None:
        self.records: list[dict[str, Any]] = []
        self.num_bytes = 0
        for array in arrays:
            start = self.num_bytes + -self.num_bytes % _ALIGNMENT_BYTES
            self.num_bytes = start + array.nbytes
            place = {"offset": start, "crc32": 0}
            self.records.append({"dtype": array.dtype.str, "shape": list(array.shape), **place})
        self._pieces, self._rest = self._all(arrays), memoryview(b"")

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the next ``num_bytes`` bytes in pieces, without a copy; that many must be left."""
        while num_bytes:
            if not len(self._rest):
                self._rest = next(self._pieces)
            piece, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
            num_bytes -= len(piece)
            yield piece

    def _all(self, arrays: list[NDArray[Any] | FrozenArray]) -> Iterator[memoryview]:
        """Yield the bytes of all arrays; yield a frozen array in small chunks."""
        end = 0
        for array, record in zip(arrays, self.records, strict=True):
            yield memoryview(bytes(record["offset"] - end))
            end = record["offset"] + array.nbytes
            for piece in _pieces(array):
                record["crc32"] = zlib.crc32(piece, record["crc32"])
                yield piece


def _pieces(array: NDArray[Any] | FrozenArray) -> Iterable[memoryview]:
    if isinstance(array, FrozenArray):
        return array.pieces()
    return (array.reshape(-1).view(np.uint8).data,)


def read_arrays(
    fill: Callable[[memoryview], None], total_bytes: int, records: list[dict[str, Any]]
) -> list[NDArray[Any]]:
    """Read a state's arrays and verify their checksums; check lengths before allocating memory.

    Args:
        fill: Function that fills a buffer with the next bytes, from the first array's bytes on.
        total_bytes: Number of bytes that exist, including the padding between arrays.
        records: Records of the arrays from the manifest, which `ArrayBytes` made.

    Raises:
        ValueError, KeyError, TypeError: The arrays' records or bytes are damaged.
    """
    arrays, end = [], 0
    for number, record in enumerate(records):
        dtype, shape = np.dtype(record["dtype"]), tuple(record["shape"])
        num_bytes = math.prod(shape) * dtype.itemsize
        if dtype.kind not in _ARRAY_KINDS or min(shape, default=0) < 0:
            raise ValueError(f"checkpoint array {number}: invalid dtype {dtype} or shape {shape}")
        gap, end = record["offset"] - end, record["offset"] + num_bytes
        if gap not in range(_ALIGNMENT_BYTES) or end > total_bytes:
            raise ValueError(
                f"checkpoint array {number}: invalid offset {record['offset']}, or the arrays are "
                f"truncated: {total_bytes} bytes, expected {end} or more"
            )
        fill(memoryview(bytearray(gap)))
        raw = np.empty(num_bytes, np.uint8)
        fill(raw.data)
        if zlib.crc32(raw.data) != record["crc32"]:
            raise ValueError(f"checkpoint array {number}: the checksum does not match the bytes")
        arrays.append(raw.view(dtype).reshape(shape))
    return arrays


def canonical(content: dict[str, Any]) -> bytes:
    """Return a manifest's content as the JSON text over which its checksum is computed."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def manifest_bytes(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest: its content and the content's checksum, as JSON."""
    text = canonical(content)
    return b'{"crc32":%d,"content":%b}\n' % (zlib.crc32(text), text)


def read_manifest(data: bytes, name: str) -> dict[str, Any]:
    """Return the content of a manifest after checking its checksum.

    Args:
        data: Bytes of the manifest, which `manifest_bytes` made.
        name: Name of the file that holds the manifest, for messages.

    Raises:
        ValueError, KeyError, TypeError: The manifest of the state is damaged.
    """
    document = json.loads(data)
    content: dict[str, Any] = document["content"]
    if zlib.crc32(canonical(content)) != document["crc32"]:
        raise ValueError(f"the checksum in file {name} does not match the file's text")
    return content
