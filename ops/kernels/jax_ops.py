"""The kernels on JAX, for arrays on any of its devices.

JAX compiles an operation for each shape of its arrays. So the number k of selected entries is an
argument and no shape, and the arrays of selected entries, which are a few more or less in each
step, have one of few lengths (`capacity`).

On a processor, JAX flushes subnormal numbers to zero, so sums and products can differ from numpy's
by less than the smallest normal number. Every copy between host and device, even of a single
number, is made by `to_device` or `to_host`, so that the kernels run under JAX's transfer guards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from thinwire.ops.kernels import few_bits, numpy_chunks, numpy_ops, numpy_select
from thinwire.ops.kernels.base import Kernels, Selected
from thinwire.ops.kernels.framework_array import FrameworkArray
from thinwire.ops.kernels.largest import MAGNITUDE_BITS, NUM_BITS, are_largest, narrowed
from thinwire.ops.kernels.on_device import KernelsOnDevice
from thinwire.ops.types import Array, Bool, Float32, Int64, UInt8

_Function = TypeVar("_Function", bound=Callable[..., Any])
# An array of k selected entries has up to k / 16 unused places, or up to 15 if k is small.
_STEPS = 16
_LARGEST_FLOAT16, _LARGEST_BFLOAT16_BITS = 65504.0, 0x7F7F0000
_SIGN_BIT = -(2**31)


def capacity(count: int) -> int:
    """Return the length of arrays for `count` entries: one of 16 lengths per power of two.

    >>> capacity(0), capacity(17), capacity(1000), capacity(5762)
    (0, 32, 1024, 5888)
    """
    step = max(_STEPS, 1 << max(0, count.bit_length() - _STEPS.bit_length()))
    return -(-count // step) * step


def to_device(array: Any, like: Any = None) -> Any:
    """Return a JAX array with a copy of a numpy array, on the device of the JAX array `like`."""
    # On a processor, a JAX array can use the numpy array's memory, which the caller can overwrite.
    copied = np.array(array)
    if like is not None:
        return jax.device_put(copied, like.sharding)
    where = jax.config.jax_default_device  # a device, the name of a platform, or None
    return jax.device_put(copied, jax.devices(where)[0] if isinstance(where, str) else where)


def _number(number: Any, like: Any) -> Any:
    """Return an int as int32, or another number as float32, on the device of an array."""
    return to_device(np.int32(number) if isinstance(number, int) else np.float32(number), like)


def to_host(value: Any) -> np.ndarray:
    """Return a numpy array with a copy of a JAX array; the caller may overwrite it."""
    return np.array(jax.device_get(value))


def _double() -> Any:
    """Return a context in which JAX computes in double precision."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # up to JAX 0.7

    return enable_x64()


# -- compiled operations ---------------------------------------------------------------------------


def compiled(*constants: int) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function with JAX.

    Args:
        constants: Numbers of the arguments for each of whose values the function is compiled.
    """
    decorator: Callable[[_Function], _Function] = functools.partial(
        jax.jit, static_argnums=constants
    )
    return decorator


def _magnitudes(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE_BITS


def _are_largest(magnitudes: Any, k: Any) -> Any:
    found = jax.lax.fori_loop(
        0,
        NUM_BITS,
        lambda number, found: narrowed(found, number, magnitudes, k),
        jnp.zeros((*magnitudes.shape[:-1], 1), jnp.int32),
    )
    return are_largest(magnitudes, found, k)


@compiled()
def _largest_in(x: Any, k: Any) -> Any:
    return _are_largest(_magnitudes(x), k)


@compiled(2)
def _largest_in_chunks(x: Any, k: Any, chunk: int, last: Any) -> Any:
    rows = -(-x.size // chunk)
    # the zeros that fill up the last chunk are never selected
    magnitudes = jnp.pad(_magnitudes(x), (0, rows * chunk - x.size)).reshape(rows, chunk)
    counts = jnp.where(jnp.arange(rows)[:, None] == rows - 1, last, k)
    return _are_largest(magnitudes, counts).reshape(-1)[: x.size]


@compiled()
def _reaching(x: Any, threshold: Any) -> Any:
    return _magnitudes(x) >= _magnitudes(threshold)


@compiled()
def _count(mask: Any) -> Any:
    return mask.sum(dtype=jnp.int32)


@compiled(2)
def _entries_at(x: Any, mask: Any, length: int) -> Any:
    """Return positions and values of the entries with a flag; n and 0 fill unused places.

    The position of the r-th flag is the first at which r flags are counted. A binary search for it
    takes fewer steps than a scatter of all n entries.
    """
    reached = jnp.cumsum(mask, dtype=jnp.int32)
    places = jnp.searchsorted(reached, jnp.arange(1, length + 1, dtype=jnp.int32))
    return places.astype(jnp.int32), x.at[places].get(mode="fill", fill_value=0)


@compiled()
def _cleared(x: Any, mask: Any) -> Any:
    return jnp.where(mask, jnp.float32(0), x)


@compiled(2)
def _sliced(x: Any, start: Any, size: int) -> Any:
    return jax.lax.dynamic_slice(x, (start,), (size,))


@compiled()
def _gathered(x: Any, places: Any) -> Any:
    return x.at[places].get(mode="fill", fill_value=0)


@compiled()
def _scattered(x: Any, places: Any, values: Any) -> Any:
    return x.at[places].set(values, mode="drop")


@compiled()
def _is_finite(x: Any) -> Any:
    return jnp.isfinite(x).all()


@compiled()
def _has_entry(x: Any) -> Any:
    return (_magnitudes(x) != 0).any()


@compiled()
def _norm(x: Any) -> Any:
    return jnp.sqrt(jnp.square(x.astype(jnp.float64)).sum())


@compiled()
def _largest_bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(_magnitudes(x).max(), jnp.float32)


@compiled()
def _to_bfloat16(x: Any) -> Any:
    """Return the upper halves of floats, rounded to nearest even, as uint16; as in numpy_ops."""
    sign = jax.lax.bitcast_convert_type(x, jnp.int32) & _SIGN_BIT
    bits = sign | jnp.minimum(_magnitudes(x), _LARGEST_BFLOAT16_BITS)
    bits = jax.lax.bitcast_convert_type(bits, jnp.uint32)
    odd = (bits >> 16) & 1
    return ((bits + odd + 0x7FFF) >> 16).astype(jnp.uint16)


@compiled()
def _to_float16(x: Any) -> Any:
    return jnp.clip(x, -_LARGEST_FLOAT16, _LARGEST_FLOAT16).astype(jnp.float16)


@compiled()
def _to_int8(x: Any, scale: Any) -> Any:
    return jnp.clip(jnp.rint(x / scale), -127.0, 127.0).astype(jnp.int8)


def _chunk_numbers(size: int, edges: Any) -> Any:
    """Return [size] int32: the number of each entry's chunk, given the chunks' edges [c + 1]."""
    starts = jnp.zeros(size + 1, jnp.int32).at[edges[1:-1]].add(1)
    return jnp.cumsum(starts[:size])


@compiled()
def _chunk_sums(x: Any, edges: Any) -> Any:
    numbers, count = _chunk_numbers(x.size, edges), edges.size - 1
    sum_of = functools.partial(
        jax.ops.segment_sum, segment_ids=numbers, num_segments=count, indices_are_sorted=True
    )
    magnitudes = jnp.abs(x)
    exact = magnitudes.astype(jnp.float64)
    sums = sum_of(exact)
    above = magnitudes > (sums / jnp.diff(edges)).astype(jnp.float32)[numbers]
    return sums, sum_of(jnp.where(above, exact, 0.0)), sum_of(above.astype(jnp.int32))


@compiled()
def _chunk_peaks(x: Any, edges: Any) -> Any:
    numbers = _chunk_numbers(x.size, edges)
    peaks = jax.ops.segment_max(_magnitudes(x), numbers, edges.size - 1, indices_are_sorted=True)
    return jax.lax.bitcast_convert_type(peaks, jnp.float32)


@compiled(3, 4)
def _level_codes(x: Any, edges: Any, limits: Any, sign_shift: int, strict: bool) -> Any:
    numbers, magnitudes = _chunk_numbers(x.size, edges), _magnitudes(x)
    levels = jnp.zeros(x.size, jnp.uint8)
    for column in range(limits.shape[1]):
        limit = _magnitudes(limits[:, column])[numbers]
        reached = magnitudes > limit if strict else magnitudes >= limit
        levels = levels + reached.astype(jnp.uint8)
    negative = jax.lax.bitcast_convert_type(x, jnp.int32) < 0
    return levels | (negative.astype(jnp.uint8) << sign_shift)


def _lengthened(array: Any, length: int) -> Any:
    """Return an array [k] of numpy or JAX with zeros after its entries, up to a length >= k."""
    if len(array) == length:
        return array
    module = np if isinstance(array, np.ndarray) else jnp
    return module.pad(array, (0, length - len(array)))


# -- arrays ----------------------------------------------------------------------------------------


class JaxArray(FrameworkArray):
    """An array [n] float32 on a JAX device; see `FrameworkArray`.

    Entries that were taken at positions have a tensor that is longer than n, so that JAX need not
    compile each operation again for another number of entries.

    Args:
        value: Tensor [n] float32, or a numpy array [n] to copy to the device.
        size: Number of entries, if the tensor is longer.
    """

    kernels = "jax"

    def __init__(self, value: Any, size: int | None = None) -> None:
        super().__init__(value)
        self._size = size

    @property
    def size(self) -> int:
        """Number of entries in the array."""
        return len(self.value) if self._size is None else self._size

    @property
    def tensor(self) -> Any:
        """Tensor [n] with the entries of this array alone; `value` may be longer."""
        return self.value if self._size is None else self._part(0, self._size)

    @classmethod
    def _placed(cls, array: np.ndarray, like: Any = None) -> Any:
        array = np.asarray(array, np.float32)
        return to_device(array if like is None else _lengthened(array, len(like)), like)

    def operand(self, other: Any) -> Any:
        """Return what JAX's operators take: a tensor as long as this one's, or a number."""
        if isinstance(other, JaxArray) and len(other.value) != len(self.value):
            return _lengthened(other.tensor, len(self.value))
        found = super().operand(other)
        return _number(found, self.value) if isinstance(found, float) else found

    @classmethod
    def of_zeros(cls, size: int) -> Self:
        """Return an array of zeros [size] on JAX's default device."""
        return cls(jnp.zeros(size, jnp.float32))

    def fetched(self) -> np.ndarray:
        """Return a numpy array [n] float32 with a copy of this array."""
        return to_host(self.value)[: self.size]

    def any(self) -> bool:
        """Return True if the array has an entry that is not 0."""
        return bool(to_host(_has_entry(self.value)))

    def _part(self, start: int, stop: int) -> Any:
        return _sliced(self.value, _number(start, self.value), stop - start)

    def _like(self, value: Any) -> Self:
        return type(self)(value, self._size)

    def _positions(self, places: Int64) -> Any:
        """Return positions on the device; those that fill up its length are beyond the array."""
        filled = np.full(capacity(len(places)), len(self.value), np.int32)
        filled[: len(places)] = places
        return to_device(filled, self.value)

    def _taken(self, places: Int64) -> Self:
        return type(self)(_gathered(self.value, self._positions(places)), len(places))

    def _put(self, places: Int64, values: Any) -> Any:
        positions = self._positions(places)
        # the values have the length of the positions, not of this array
        given = type(self)(positions, len(places)).operand(values)
        return _scattered(self.value, positions, given)

    def _filled(self, values: Any) -> Any:
        return jnp.broadcast_to(self.operand(values), self.value.shape)


class JaxKernels(KernelsOnDevice):
    """The kernels of JAX; `KernelsOnDevice` describes the methods."""

    array = JaxArray

    def _largest_in(self, value: Any, k: int) -> Any:
        return _largest_in(value, _number(k, value))

    def _largest_in_chunks(self, value: Any, k: int, chunk: int, last: int) -> Any:
        return _largest_in_chunks(value, _number(k, value), chunk, _number(last, value))

    def _reaching(self, value: Any, threshold: float) -> Any:
        return _reaching(value, _number(float(threshold), value))

    def _count_of(self, mask: Any) -> int:
        return int(to_host(_count(mask)))

    def _entries_at(self, value: Any, mask: Any, count: int) -> Selected:
        places, values = _entries_at(value, mask, capacity(count))
        return to_host(places)[:count].astype(np.int64), to_host(values)[:count]

    def _cleared(self, value: Any, mask: Any) -> Any:
        return _cleared(value, mask)

    def _flat(self, tensor: Any) -> Any:
        return tensor.reshape(-1).astype(jnp.float32)

    def _concatenated(self, values: Sequence[Any]) -> Any:
        return jnp.concatenate(values)

    def _are_finite(self, values: Sequence[Any]) -> Bool:
        return to_host(jnp.stack([_is_finite(value) for value in values]))

    def _norm_of(self, value: Any) -> float:
        with _double():
            return float(to_host(_norm(value)))

    def _largest_magnitude(self, value: Any) -> float:
        return float(to_host(_largest_bits(value)))

    def _coded(self, value: Any, dtype: str, scale: float) -> Array:
        if dtype == "bfloat16":
            return to_host(_to_bfloat16(value))
        if dtype == "float16":
            return to_host(_to_float16(value))
        return to_host(_to_int8(value, _number(scale, value)))

    def _chunk_sums(self, value: Any, edges: Int64) -> tuple[Array, Array, Array]:
        with _double():
            sums, upper, num_above = _chunk_sums(value, to_device(edges.astype(np.int32), value))
            return to_host(sums), to_host(upper), to_host(num_above)

    def _chunk_peaks(self, value: Any, edges: Int64) -> Float32:
        return to_host(_chunk_peaks(value, to_device(edges.astype(np.int32), value)))

    def _level_codes(
        self, value: Any, edges: Int64, limits: Float32, sign_shift: int, strict: bool
    ) -> UInt8:
        there = to_device(edges.astype(np.int32), value), to_device(limits, value)
        return to_host(_level_codes(value, *there, sign_shift, strict))


#: The kernels of JAX; operations that `KernelsOnDevice` does not have are numpy's.
KERNELS = Kernels.of("jax", JaxKernels(), numpy_ops, numpy_select, numpy_chunks, few_bits)
