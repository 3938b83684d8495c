"""Reads pickles of plain values and numpy arrays without running anything that they name.

A pickle is a program: it may name any function and have it called. Here the three names that an
array needs stand for plain records, which are checked and made into an array afterwards; every
other name is refused.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ops.types import ConfigurationError

_UNSIGNED_BYTE = (b"u1", "u1")


class _DataType:
    """Stands for numpy.dtype: keeps its name."""

    def __init__(self, name: Any, *unused: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and layout: single bytes have none."""


class _ArrayName:
    """Stands for numpy.ndarray, which a pickle names but does not call."""

    def __new__(cls) -> _ArrayName:
        raise pickle.UnpicklingError("it calls numpy.ndarray, which arrays do not need")


@dataclasses.dataclass
class _Array:
    """Stands for an array; pickles first make an empty one, then hand it its state."""

    values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        """Take (version, shape, dtype, is in Fortran order, bytes).

        Raises:
            UnpicklingError: Of another form, or not of unsigned bytes.
        """
        try:
            _, shape, kind, is_fortran, content = state
            sizes = tuple(int(size) for size in shape)
        except (TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"it holds an array of another form: {error}") from error
        if not isinstance(kind, _DataType) or kind.name not in _UNSIGNED_BYTE:
            raise pickle.UnpicklingError("it holds an array of something else than unsigned bytes")
        if isinstance(content, str):  # how Python 3 reads a text of Python 2 by default
            content = content.encode("latin1")
        if not isinstance(content, bytes) or min(sizes, default=0) < 0:
            raise pickle.UnpicklingError(f"it holds an array of shape {sizes} without its bytes")
        if math.prod(sizes) != len(content):
            raise pickle.UnpicklingError(
                f"it holds an array of shape {sizes} with {len(content)} bytes"
            )
        flat = np.frombuffer(content, dtype=np.uint8)
        self.values = flat.reshape(sizes, order="F" if is_fortran else "C")


def _reconstruct(*unused: Any) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it encodes a text as {encoding!r:.40}; expected latin1")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _ArrayName,
    ("numpy", "dtype"): _DataType,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]  # typing knows the other one
    """In Python: the one in C takes gigabytes at once where a few bytes announce so much."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return the record that stands for an admitted name."""
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data needs")
        return _ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to elsewhere."""
        raise pickle.UnpicklingError(f"it refers to {pid!r:.40} outside of it")


def load_dict(stream: BinaryIO, where: str) -> dict[bytes, Any]:
    """Return the dict of a pickle by Python 2 or 3, its own arrays made real.

    Args:
        stream: The pickle; what follows it is not read.
        where: Names it in errors.

    Returns:
        Keys as bytes; values as they are, arrays uint8.

    Raises:
        ConfigurationError: Not a pickle, not a dict, damaged, or it names a function or class that
            plain data does not need.
    """
    try:
        content = _Unpickler(stream, encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not a dict")
        return {
            key.encode("latin1") if isinstance(key, str) else key: (
                value.values if isinstance(value, _Array) else value
            )
            for key, value in content.items()
        }
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigurationError(
            f"Data file {where} cannot be read: {error or type(error).__name__}. Expected a "
            "pickled dict of numbers, texts and arrays of bytes. Fetch it again, from where it is "
            "published."
        ) from error
