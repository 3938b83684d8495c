"""Arrays on a device of JAX or torch, with the numpy operators that gradient codecs use.

A `FrameworkArray` does for JAX and torch what `thinwire.ops.kernels.device.DeviceArray` does for
TensorFlow. This module imports no framework: `jax_ops` and `torch_ops` have the subclasses.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Self

import numpy as np

from thinwire.ops.types import Int64

#: Number of entries from which positions, which the device stores as int32, would overflow.
_TOO_MANY_ENTRIES = 2**31


class FrameworkArray(abc.ABC):
    """An array [n] float32 on a device, with the operators of a numpy array.

    An in-place operation replaces the array's tensor by a new tensor. Operands can be numpy arrays:
    the operators copy numpy operands to the device. `np.asarray` copies the array to the host; no
    operator copies it to the host. Each operation rounds its result once, as in numpy.

    Attributes:
        value: [n] float32 tensor on the device, which is never overwritten.
        kernels: Value of --kernels whose kernels compute with such arrays.

    Args:
        value: Tensor [n] float32, or a numpy array [n] to copy to the device.

    Raises:
        ValueError: The array has 2**31 entries or more.
    """

    # `__array_ufunc__ = None` makes numpy's operators call the operators of this class
    __array_ufunc__ = None
    dtype = np.dtype(np.float32)
    kernels: ClassVar[str]

    def __init__(self, value: Any) -> None:
        self.value = self._placed(value) if isinstance(value, np.ndarray) else value
        if len(self.value) >= _TOO_MANY_ENTRIES:
            raise ValueError(
                f"an array of {len(self.value)} entries: expected fewer than 2**31, because "
                "positions on the device are int32. Use --kernels=numpy for this model."
            )

    @classmethod
    @abc.abstractmethod
    def _placed(cls, array: np.ndarray, like: Any = None) -> Any:
        """Return a float32 tensor with a copy of an array, on the device of the tensor `like`.

        Without `like`, the tensor is on the framework's default device.
        """

    @classmethod
    @abc.abstractmethod
    def of_zeros(cls, size: int) -> Self:
        """Return an array of zeros [size] on the framework's default device."""

    @abc.abstractmethod
    def fetched(self) -> np.ndarray:
        """Return a numpy array [n] float32 with a copy of this array."""

    @abc.abstractmethod
    def any(self) -> bool:
        """Return True if the array has an entry that is not 0; subnormal numbers are not 0."""

    @abc.abstractmethod
    def _taken(self, places: Int64) -> Self:
        """Return the entries at positions [k]."""

    @abc.abstractmethod
    def _put(self, places: Int64, values: Any) -> Any:
        """Return the tensor with other values, [k] or one for all, at positions [k]."""

    @abc.abstractmethod
    def _filled(self, values: Any) -> Any:
        """Return a tensor like this array's whose entries are `values`, [n] or one for all."""

    def operand(self, other: Any) -> Any:
        """Return what the framework's operators take: a tensor on this device, or a number.

        A number is rounded to float32, so that the result does not depend on its dtype.
        """
        if isinstance(other, FrameworkArray):
            return other.value
        if isinstance(other, np.ndarray) and other.ndim:
            return self._placed(other, self.value)
        return float(np.float32(other)) if np.ndim(other) == 0 else other

    @property
    def size(self) -> int:
        """Number of entries in the array."""
        return int(self.value.shape[0])

    @property
    def tensor(self) -> Any:
        """Tensor [n] with the entries of this array alone; `value` may be longer."""
        return self.value

    def __len__(self) -> int:
        """Return the number of entries in the array."""
        return self.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a numpy array with a copy of this array."""
        return np.asarray(self.fetched(), dtype)

    def __getitem__(self, where: Any) -> Self:
        """Return the entries in a slice with step 1, or at positions [k] int64."""
        if isinstance(where, slice):
            start, stop, _ = where.indices(self.size)
            return type(self)(self._part(start, max(start, stop)))
        return self._taken(np.asarray(where))

    def __setitem__(self, where: Any, values: Any) -> None:
        """Set the entries at positions [k] int64, or all entries, to given values.

        Raises:
            IndexError: `where` is a slice of only some entries.
        """
        if not isinstance(where, slice):
            self.value = self._put(np.asarray(where), values)
        elif where == slice(None):
            self.value = self._filled(values)
        else:
            raise IndexError(f"{where} of an array cannot be set; expected positions or [:]")

    def zeros(self) -> Self:
        """Return an array of zeros with as many entries as this array, on its device."""
        return self._like(self._filled(0.0))

    def _part(self, start: int, stop: int) -> Any:
        """Return the tensor of consecutive entries."""
        return self.tensor[start:stop]

    def _like(self, value: Any) -> Self:
        """Return an array with as many entries as this one, given its tensor."""
        return type(self)(value)

    def __add__(self, other: Any) -> Self:
        """Return the sum of this array and an array [n] or a number."""
        return self._like(self.value + self.operand(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        """Return this array minus an array [n] or a number."""
        return self._like(self.value - self.operand(other))

    def __rsub__(self, other: Any) -> Self:
        """Return an array [n] or a number minus this array."""
        return self._like(self.operand(other) - self.value)

    def __neg__(self) -> Self:
        """Return this array with the other sign."""
        return self._like(-self.value)

    def __mul__(self, factor: Any) -> Self:
        """Return this array times an array [n], entry by entry, or times a number."""
        return self._like(self.value * self.operand(factor))

    __rmul__ = __mul__

    def __iadd__(self, other: Any) -> Self:
        """Add an array [n] or a number to this array in place."""
        self.value = self.value + self.operand(other)
        return self

    def __isub__(self, other: Any) -> Self:
        """Subtract an array [n] or a number from this array in place."""
        self.value = self.value - self.operand(other)
        return self

    def __imul__(self, factor: Any) -> Self:
        """Multiply this array in place by an array [n], entry by entry, or by a number."""
        self.value = self.value * self.operand(factor)
        return self
