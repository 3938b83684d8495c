"""Kernels that JAX and torch share, built from a few operations of each framework.

A kernel whose array is a `FrameworkArray` computes on the array's device. Only what a packet sends
is copied to the host: positions as int32, values, codes, scales, and a few numbers and flags. A
kernel whose array is a numpy array is numpy's kernel, because a copy to the device and back would
take longer than the selection.

These kernels copy a FrameworkArray as a whole to the host and are numpy's there: those for blocks
of a gradient (DGT: `contribution`, `to_levels`, `block_flags`, `best_first`, `take_blocks`,
`code_blocks`) and those for thin matrices (PowerSGD: `power_step`, `entries`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from thinwire.ops.kernels import few_bits, numpy_chunks, numpy_ops, numpy_select
from thinwire.ops.kernels.base import Selected, SelectedWithThreshold
from thinwire.ops.kernels.framework_array import FrameworkArray
from thinwire.ops.types import Array, Bool, CodedValues, Float32, Int64, UInt8


def is_there(array: Any) -> bool:
    """Return True if an array is on a device of JAX or torch."""
    return isinstance(array, FrameworkArray)


def host(array: Any) -> Any:
    """Return a numpy array, which is a copy if the array is on a device."""
    return array.fetched() if isinstance(array, FrameworkArray) else array


class KernelsOnDevice(abc.ABC):
    """The kernels of a framework, as methods named like the fields of `Kernels`.

    Subclasses have the abstract methods, which take and return the framework's tensors.

    Attributes:
        array: Class of the framework's arrays.
    """

    array: type[FrameworkArray]

    # -- operations of a framework -----------------------------------------------------------------

    @abc.abstractmethod
    def _largest_in(self, value: Any, k: int) -> Any:
        """Return [n] bool: True for the k entries of largest magnitude of n > 0, 0 < k <= n."""

    @abc.abstractmethod
    def _largest_in_chunks(self, value: Any, k: int, chunk: int, last: int) -> Any:
        """Return [n] bool: True for the k largest of each chunk, the `last` largest of the last."""

    @abc.abstractmethod
    def _reaching(self, value: Any, threshold: float) -> Any:
        """Return [n] bool: True for entries with a magnitude of at least `threshold` > 0."""

    @abc.abstractmethod
    def _count_of(self, mask: Any) -> int:
        """Return how many flags of a mask [n] are True; copies the number to the host."""

    @abc.abstractmethod
    def _entries_at(self, value: Any, mask: Any, count: int) -> Selected:
        """Copy positions and values of entries with a flag to the host; there are `count` > 0."""

    @abc.abstractmethod
    def _cleared(self, value: Any, mask: Any) -> Any:
        """Return the tensor with 0 at the entries with a flag."""

    @abc.abstractmethod
    def _flat(self, tensor: Any) -> Any:
        """Return the framework's own tensor of any shape and dtype as a float32 tensor [n]."""

    @abc.abstractmethod
    def _concatenated(self, values: Sequence[Any]) -> Any:
        """Return one tensor with the entries of all tensors."""

    @abc.abstractmethod
    def _are_finite(self, values: Sequence[Any]) -> Bool:
        """Return a flag per tensor: True if it holds no NaN or infinity."""

    @abc.abstractmethod
    def _norm_of(self, value: Any) -> float:
        """Return the L2 norm of a tensor, summed in double precision."""

    @abc.abstractmethod
    def _largest_magnitude(self, value: Any) -> float:
        """Return the largest magnitude of a tensor with at least one entry."""

    @abc.abstractmethod
    def _coded(self, value: Any, dtype: str, scale: float) -> Array:
        """Return values in bfloat16 (as uint16), float16 or int8 (divided by `scale`)."""

    @abc.abstractmethod
    def _chunk_sums(self, value: Any, edges: Int64) -> tuple[Array, Array, Array]:
        """Return sums of magnitudes of each chunk, as `few_bits.side_means` takes them.

        Returns:
            Sum of all magnitudes [c] float64 of each chunk; sum [c] float64 and number [c] of the
            magnitudes above the chunk's mean, which is rounded to float32.
        """

    @abc.abstractmethod
    def _chunk_peaks(self, value: Any, edges: Int64) -> Float32:
        """Return the largest magnitude [c] of each chunk."""

    @abc.abstractmethod
    def _level_codes(
        self, value: Any, edges: Int64, limits: Float32, sign_shift: int, strict: bool
    ) -> UInt8:
        """Return codes [n]: the number of a chunk's limits that a magnitude reaches, and the sign.

        Args:
            value: [n] float32 tensor.
            edges: [c + 1] int64, the start of each chunk, and the end of the last one.
            limits: [c, m] float32 limits of the magnitudes of each chunk.
            sign_shift: Number of the bit for the sign.
            strict: True if a magnitude must exceed a limit to reach it.
        """

    # -- selection ---------------------------------------------------------------------------------

    def _selected(self, value: Any, mask: Any, count: int | None = None) -> Selected:
        """Copy the entries with a flag to the host; count them first if `count` is None."""
        number = self._count_of(mask) if count is None else count
        if not number:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return self._entries_at(value, mask, number)

    def _taken_out(self, residual: Any, mask: Any, count: int | None = None) -> Selected:
        """Copy entries with a flag to the host, and set them to 0 in the residual."""
        selected = self._selected(residual.value, mask, count)
        # the mask is on the device already, so no position is copied back to it
        residual.value = self._cleared(residual.value, mask)
        return selected

    def top_k(self, x: Any, k: int) -> Selected:
        """Return the k entries of largest magnitude; see `numpy_select.top_k`."""
        if not is_there(x):
            return numpy_select.top_k(x, k)
        k = min(k, x.size)
        if k <= 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return self._selected(x.tensor, self._largest_in(x.tensor, k))

    def feedback_top_k(
        self, residual: Any, addend: Any, k: int, factor: float = 1.0, hint: float = 0.0
    ) -> SelectedWithThreshold:
        """Add an addend to a residual, then remove and return the k largest entries.

        The hint that a residual on a device returns is 0 (unknown).
        """
        if not is_there(residual):
            return numpy_select.feedback_top_k(residual, host(addend), k, factor, hint)
        self.accumulate(residual, addend, factor)
        k = min(k, residual.size)
        if k <= 0:
            return np.empty(0, np.int64), np.empty(0, np.float32), 0.0
        return *self._taken_out(residual, self._largest_in(residual.value, k)), 0.0

    def feedback_of_each(
        self,
        residuals: Sequence[Any],
        addends: Sequence[Any],
        counts: Sequence[int],
        factors: Sequence[float],
        hints: Sequence[float],
    ) -> list[SelectedWithThreshold]:
        """Apply `feedback_top_k` to several residuals; on the host, to all of them together."""
        if not any(map(is_there, residuals)):
            on_host = [host(addend) for addend in addends]
            return numpy_select.feedback_of_each(residuals, on_host, counts, factors, hints)
        inputs = zip(residuals, addends, counts, factors, hints, strict=True)
        return [self.feedback_top_k(*arguments) for arguments in inputs]

    def _carried(self, x: Any, k: int, threshold: float) -> tuple[Any, int | None]:
        """Return a mask of about k entries, and how many they are if that is known.

        The mask is None if no entry is to be selected.
        """
        if threshold > 0 and x.size > numpy_select.EXACT_BELOW:
            mask = self._reaching(x.tensor, threshold)
            count = self._count_of(mask)
            if numpy_select.TOO_FEW * k <= count <= numpy_select.TOO_MANY * k:
                return mask, count
        k = min(k, x.size)
        return (self._largest_in(x.tensor, k) if k > 0 else None), None

    def carried_top_k(self, x: Any, k: int, threshold: float) -> SelectedWithThreshold:
        """Return about k entries that reach a threshold; see `numpy_select.carried_top_k`."""
        if not is_there(x):
            return numpy_select.carried_top_k(x, k, threshold)
        return self._with_threshold(x, k, *self._carried(x, k, threshold), takes_out=False)

    def feedback_carried(
        self, residual: Any, addend: Any, k: int, factor: float = 1.0, threshold: float = 0.0
    ) -> SelectedWithThreshold:
        """Apply `carried_top_k` to a residual plus an addend; set the selected entries to zero."""
        if not is_there(residual):
            return numpy_select.feedback_carried(residual, host(addend), k, factor, threshold)
        self.accumulate(residual, addend, factor)
        mask, count = self._carried(residual, k, threshold)
        return self._with_threshold(residual, k, mask, count, takes_out=True)

    def _with_threshold(
        self, x: Any, k: int, mask: Any, count: int | None, takes_out: bool
    ) -> SelectedWithThreshold:
        """Return the entries with a flag, and the threshold for the next selection.

        Args:
            x: Array from which entries are selected.
            k: Number of entries that were to be selected approximately.
            mask: [n] bool flags of the selected entries; None to select nothing.
            count: Number of entries that reached a threshold; None if exactly k were to be
                selected.
            takes_out: True to set the selected entries of x to zero.
        """
        if mask is None:
            return np.empty(0, np.int64), np.empty(0, np.float32), 0.0
        if takes_out:
            indices, values = self._taken_out(x, mask, count)
        else:
            indices, values = self._selected(x.tensor, mask, count)
        if count is None:
            return indices, values, numpy_select.lowest_of(values, k)
        return indices, values, numpy_select.magnitude_at(np.abs(values), k)

    def chunk_top_k(self, x: Any, k: int, chunk: int) -> Selected:
        """Return the k entries of largest magnitude of each chunk; see `numpy_chunks`."""
        if not is_there(x):
            return numpy_chunks.chunk_top_k(x, k, chunk)
        mask = self._chunk_mask(x, k, chunk)
        if mask is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return self._selected(x.tensor, mask)

    def feedback_chunk_top_k(
        self, residual: Any, addend: Any, k: int, chunk: int, factor: float = 1.0
    ) -> Selected:
        """Add an addend to a residual, then remove and return the k largest of each chunk."""
        if not is_there(residual):
            return numpy_chunks.feedback_chunk_top_k(residual, host(addend), k, chunk, factor)
        self.accumulate(residual, addend, factor)
        mask = self._chunk_mask(residual, k, chunk)
        if mask is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return self._taken_out(residual, mask)

    def _chunk_mask(self, x: Any, k: int, chunk: int) -> Any:
        """Return [n] bool: True for the k largest entries of each chunk; None if n is 0."""
        if not x.size:
            return None
        return self._largest_in_chunks(
            x.tensor, k, chunk, numpy_chunks.kept_of_last(x.size, k, chunk)
        )

    # -- arrays of a codec's state -----------------------------------------------------------------

    def accumulate(self, target: Any, addend: Any, factor: float = 1.0, decay: float = 1.0) -> None:
        """Do ``target = decay * target + factor * addend`` in place; each product is rounded.

        Products and sum are separate operations: a compiler that sees both may round them once, and
        the bits would differ from numpy's.
        """
        if not is_there(target):
            numpy_select.accumulate(target, host(addend), factor, decay)
            return
        if decay != 1:
            target *= np.float32(decay)
        target += addend if factor == 1 else addend * np.float32(factor)

    def zeros(self, sizes: Sequence[int]) -> list[Float32]:
        """Return one array of zeros on the device for each size."""
        return cast("list[Float32]", [self.array.of_zeros(size) for size in sizes])

    def joined(self, arrays: Sequence[Any]) -> Float32:
        """Return one array on the device with the entries of all arrays, in order.

        The arrays may be the framework's own tensors, for example gradients of any shape.
        """
        return cast("Float32", self.array(self._concatenated([self._tensor(x) for x in arrays])))

    def _tensor(self, array: Any) -> Any:
        if isinstance(array, np.ndarray):
            array = self.array(array.reshape(-1))
        return array.tensor if is_there(array) else self._flat(array)

    def first_not_finite(self, tensors: Sequence[Any]) -> int | None:
        """Return the index of the first tensor with NaN or infinity; None if there is none."""
        on_device = [tensor.tensor for tensor in tensors if is_there(tensor)]
        flags = iter(self._are_finite(on_device)) if on_device else iter(())
        for number, tensor in enumerate(tensors):
            if not (next(flags) if is_there(tensor) else numpy_ops.all_finite(tensor)):
                return number
        return None

    def norm(self, tensor: Any) -> float:
        """Return the L2 norm of a finite tensor; the sum over a device's array is of doubles."""
        return self._norm_of(tensor.tensor) if is_there(tensor) else numpy_ops.norm(tensor)

    def scale(self, values: Any, rate: float | Float32) -> Any:
        """Return ``rate * values``, on the device if `values` is there."""
        return values * rate if is_there(values) else numpy_ops.scale(values, rate)

    def as_saved(self, state: Any) -> Any:
        """Return a codec's state with numpy arrays instead of arrays on the device."""
        if isinstance(state, dict):
            return {key: self.as_saved(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return type(state)(self.as_saved(value) for value in state)
        return host(state)

    def as_kept(self, saved: Any, fresh: Any) -> Any:
        """Return a saved codec state; its arrays are on the device where the fresh state's are."""
        if isinstance(saved, dict) and isinstance(fresh, dict):
            return {key: self.as_kept(value, fresh.get(key)) for key, value in saved.items()}
        if isinstance(saved, list) and isinstance(fresh, list) and len(saved) == len(fresh):
            return [self.as_kept(value, goal) for value, goal in zip(saved, fresh, strict=True)]
        return self.array(saved) if is_there(fresh) else saved

    # -- values in fewer bits ----------------------------------------------------------------------

    def quantise(self, values: Any, dtype: str) -> CodedValues:
        """Code values as float32, bfloat16, float16 or int8; the coded values are numpy arrays."""
        if not is_there(values) or dtype == "float32" or not values.size:
            return numpy_ops.quantise(host(values), dtype)
        if dtype not in ("bfloat16", "float16", "int8"):
            raise numpy_ops.unknown_dtype(dtype)
        scale = 1.0
        if dtype == "int8":
            scale = numpy_ops.int8_scale(self._largest_magnitude(values.tensor))
        return CodedValues(dtype, self._coded(values.tensor, dtype, scale), scale)

    def quantise_chunks(self, values: Any, edges: Int64, dtype: str) -> tuple[UInt8, Float32]:
        """Code values of consecutive chunks with a few bits each, and compute each chunk's scales.

        The sums of magnitudes have double precision, as in `few_bits.quantise_chunks`, and may be
        summed in another order.
        """
        if not is_there(values) or not values.size:
            return few_bits.quantise_chunks(host(values), edges, dtype)
        lengths, value = np.diff(edges), values.tensor
        strict = False
        if dtype.startswith("int"):
            scales = few_bits.rounded(self._chunk_peaks(value, edges))[:, None]
            limits = scales * np.array(few_bits.boundaries(dtype))
        else:
            sums, upper, num_above = self._chunk_sums(value, edges)
            if dtype == "sign":
                scales = few_bits.rounded(sums / lengths)[:, None]
                limits = np.empty((lengths.size, 0), np.float32)
            else:
                scales = few_bits.rounded(few_bits.side_means(sums, upper, num_above, lengths))
                limits, strict = (sums / lengths).astype(np.float32)[:, None], True
        shift = few_bits.num_magnitudes(dtype).bit_length() - 1
        return self._level_codes(value, edges, limits, shift, strict), scales

    # -- blocks of a gradient, and thin matrices: on the host --------------------------------------

    def contribution(
        self, values: Any, block_entries: int, averages: Any, alpha: float
    ) -> tuple[Float32, Float32]:
        """Update the mean magnitudes of blocks on the host; see `numpy_ops.contribution`."""
        return numpy_ops.contribution(host(values), block_entries, host(averages), alpha)

    def to_levels(self, rows: Any, bits: int) -> tuple[Array, Float32, Float32]:
        """Quantize blocks on the host; see `numpy_ops.to_levels`."""
        return numpy_ops.to_levels(host(rows), bits)

    def block_flags(self, sums: Any) -> tuple[Bool, Bool]:
        """Return two flags per block, on the host; see `numpy_ops.block_flags`."""
        return numpy_ops.block_flags(host(sums))

    def best_first(self, scores: Sequence[Any], classes: UInt8) -> Int64:
        """Sort scores on the host; see `numpy_ops.best_first`."""
        return numpy_ops.best_first([host(part) for part in scores], classes)

    def take_blocks(self, values: Any, numbers: Int64, out: Array) -> None:
        """Copy a tensor to the host, then some of its blocks into `out` [m, e]."""
        numpy_ops.take_blocks(host(values), numbers, out)

    def code_blocks(
        self, values: Any, numbers: Int64, block_entries: int, bits: int
    ) -> tuple[Array, Float32, Float32, Float32]:
        """Quantize some blocks on the host; see `numpy_ops.code_blocks`."""
        return numpy_ops.code_blocks(host(values), numbers, block_entries, bits)

    def power_step(self, tensor: Any, right: Float32) -> tuple[Float32, Float32] | None:
        """Do one step of PowerSGD's subspace iteration on the host."""
        return numpy_ops.power_step(host(tensor), right)
