"""The kernels on torch, for arrays on a GPU or in the memory of the host.

Operations run eagerly, one by one, so products and sums are rounded as in numpy. Every copy between
host and device is made by `to_device` or `to_host`. Single numbers are arguments of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from thinwire.ops.kernels import few_bits, numpy_chunks, numpy_ops, numpy_select
from thinwire.ops.kernels.base import Kernels, Selected
from thinwire.ops.kernels.framework_array import FrameworkArray
from thinwire.ops.kernels.largest import MAGNITUDE_BITS, NUM_BITS, are_largest, narrowed
from thinwire.ops.kernels.on_device import KernelsOnDevice
from thinwire.ops.types import Array, Bool, Float32, Int64, UInt8

_LARGEST_FLOAT16, _LARGEST_BFLOAT16_BITS = 65504.0, 0x7F7F0000
_SIGN_BIT = -(2**31)


def default_device() -> Any:
    """Return the device of new arrays: the current GPU, or torch's default device without a GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.get_default_device()


def to_device(array: Any, like: Any = None) -> Any:
    """Return a tensor with a copy of a numpy array, on the device of the tensor `like`."""
    # on the host, a tensor uses the numpy array's memory, which the caller can overwrite
    copied = torch.from_numpy(np.array(array))
    return copied.to(default_device() if like is None else like.device)


def to_host(value: Any) -> np.ndarray:
    """Return a numpy array with a copy of a tensor; the caller may overwrite it."""
    return np.array(value.detach().cpu().numpy())


def _magnitudes(x: Any) -> Any:
    return x.view(torch.int32) & MAGNITUDE_BITS


def _are_largest(magnitudes: Any, k: Any) -> Any:
    found: Any = torch.zeros((*magnitudes.shape[:-1], 1), device=magnitudes.device).int()
    for number in range(NUM_BITS):
        found = narrowed(found, number, magnitudes, k)
    return are_largest(magnitudes, found, k)


def _chunk_numbers(value: Any, edges: Any) -> Any:
    """Return [n] int64: the number of each entry's chunk, given the chunks' edges [c + 1]."""
    lengths = edges.diff()
    numbers = torch.arange(len(lengths), device=value.device)
    return numbers.repeat_interleave(lengths, output_size=len(value))


class TorchArray(FrameworkArray):
    """An array [n] float32 on torch's device; see `FrameworkArray`."""

    kernels = "torch"

    def __init__(self, value: Any) -> None:
        # a gradient may be part of a graph, by which torch would record each operation
        super().__init__(value if isinstance(value, np.ndarray) else value.detach())

    @classmethod
    def _placed(cls, array: np.ndarray, like: Any = None) -> Any:
        return to_device(np.asarray(array, np.float32), like)

    @classmethod
    def of_zeros(cls, size: int) -> Self:
        """Return an array of zeros [size] on the default device."""
        return cls(torch.zeros(size, dtype=torch.float32, device=default_device()))

    def fetched(self) -> np.ndarray:
        """Return a numpy array [n] float32 with a copy of this array."""
        return to_host(self.value)

    def any(self) -> bool:
        """Return True if the array has an entry that is not 0."""
        return bool(to_host((_magnitudes(self.value) != 0).any()))

    def _taken(self, places: Int64) -> Self:
        return type(self)(self.value[self._positions(places)])

    def _positions(self, places: Int64) -> Any:
        # as int32, positions are half as many bytes to copy; torch indexes with int64
        return to_device(places.astype(np.int32), self.value).long()

    def _put(self, places: Int64, values: Any) -> Any:
        value = self.value.clone()
        value[self._positions(places)] = self.operand(values)
        return value

    def _filled(self, values: Any) -> Any:
        value = torch.empty_like(self.value)
        value[:] = self.operand(values)
        return value


class TorchKernels(KernelsOnDevice):
    """The kernels of torch; `KernelsOnDevice` describes the methods."""

    array = TorchArray

    def _largest_in(self, value: Any, k: int) -> Any:
        return _are_largest(_magnitudes(value), k)

    def _largest_in_chunks(self, value: Any, k: int, chunk: int, last: int) -> Any:
        size = len(value)
        rows = -(-size // chunk)
        # the zeros that fill up the last chunk are never selected
        padded = torch.nn.functional.pad(_magnitudes(value), (0, rows * chunk - size))
        counts = torch.full((rows, 1), k, device=value.device)
        counts[-1] = last
        return _are_largest(padded.reshape(rows, chunk), counts).reshape(-1)[:size]

    def _reaching(self, value: Any, threshold: float) -> Any:
        return _magnitudes(value) >= int(np.float32(threshold).view(np.int32))

    def _count_of(self, mask: Any) -> int:
        return int(to_host(mask.count_nonzero()))

    def _entries_at(self, value: Any, mask: Any, count: int) -> Selected:
        places = mask.nonzero().reshape(-1)
        return to_host(places.int()).astype(np.int64), to_host(value[places])

    def _cleared(self, value: Any, mask: Any) -> Any:
        return value.masked_fill(mask, 0)

    def _flat(self, tensor: Any) -> Any:
        return tensor.detach().reshape(-1).float()

    def _concatenated(self, values: Sequence[Any]) -> Any:
        return torch.cat(list(values))

    def _are_finite(self, values: Sequence[Any]) -> Bool:
        return to_host(torch.stack([value.isfinite().all() for value in values]))

    def _norm_of(self, value: Any) -> float:
        return float(to_host(torch.linalg.vector_norm(value, dtype=torch.float64)))

    def _largest_magnitude(self, value: Any) -> float:
        return float(to_host(value.abs().max()))

    def _coded(self, value: Any, dtype: str, scale: float) -> Array:
        if dtype == "bfloat16":
            return self._to_bfloat16(value)
        if dtype == "float16":
            return to_host(value.clip(-_LARGEST_FLOAT16, _LARGEST_FLOAT16).half())
        # a scale in the tensor's dtype, because torch may multiply by the inverse of a number
        codes = (value / torch.full_like(value, scale)).round().clip(-127.0, 127.0)
        return to_host(codes.to(torch.int8))

    @staticmethod
    def _to_bfloat16(value: Any) -> Array:
        """Return the upper halves of floats, rounded to nearest even, as uint16."""
        magnitudes = _magnitudes(value).clip(max=_LARGEST_BFLOAT16_BITS)
        # The sums cannot overflow without the sign. Shifts of negative numbers keep the sign.
        rounded = (magnitudes + ((magnitudes >> 16) & 1) + 0x7FFF) >> 16
        halves = rounded | ((value.view(torch.int32) & _SIGN_BIT) >> 16)
        return to_host(halves.to(torch.int16)).view(np.uint16)

    def _chunk_sums(self, value: Any, edges: Int64) -> tuple[Array, Array, Array]:
        there = to_device(edges.astype(np.int32), value).long()
        numbers, lengths = _chunk_numbers(value, there), there.diff()
        magnitudes = value.abs()

        def sum_of(values: Any) -> Any:
            return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)

        sums = sum_of(magnitudes.double())
        above = magnitudes > (sums / lengths).float()[numbers]
        upper = sum_of(magnitudes.double().masked_fill(~above, 0))
        return to_host(sums), to_host(upper), to_host(sum_of(above.double())).astype(np.int64)

    def _chunk_peaks(self, value: Any, edges: Int64) -> Float32:
        lengths = to_device(edges.astype(np.int32), value).long().diff()
        return to_host(torch.segment_reduce(value.abs(), "max", lengths=lengths, unsafe=True))

    def _level_codes(
        self, value: Any, edges: Int64, limits: Float32, sign_shift: int, strict: bool
    ) -> UInt8:
        numbers = _chunk_numbers(value, to_device(edges.astype(np.int32), value).long())
        magnitudes, there = value.abs(), to_device(limits, value)
        levels = torch.zeros_like(numbers, dtype=torch.uint8)
        for column in range(limits.shape[1]):
            limit = there[:, column][numbers]
            levels += magnitudes > limit if strict else magnitudes >= limit
        return to_host(levels | (value.signbit().to(torch.uint8) << sign_shift))


#: The kernels of torch; operations that `KernelsOnDevice` does not have are numpy's.
KERNELS = Kernels.of("torch", TorchKernels(), numpy_ops, numpy_select, numpy_chunks, few_bits)
