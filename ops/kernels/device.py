"""Arrays that live where TensorFlow's tensors do, with what codecs use of numpy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

FLOATS = tf.TensorSpec([None], tf.float32)
FLOAT = tf.TensorSpec([], tf.float32)
PLACES = tf.TensorSpec([None], tf.int64)
NUMBER = tf.TensorSpec([], tf.int32)

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: XLA fuses what else were a pass over memory each, and has no operation that only a CPU can do;
#: it compiles for every length anew. Where no GPU is, TensorFlow's own operations start faster.
USES_XLA = True if tf.config.list_physical_devices("GPU") else None


def traced(*signature: tf.TensorSpec) -> Callable[[_Function], _Function]:
    """Return a decorator that makes one graph of a function, for arguments like these."""
    decorator: Callable[[_Function], _Function] = tf.function(input_signature=signature)
    return decorator


def fused(*signature: tf.TensorSpec) -> Callable[[_Function], _Function]:
    """Return `traced` with the passes over memory fused into one where a GPU is."""
    decorator: Callable[[_Function], _Function] = tf.function(
        input_signature=signature, jit_compile=USES_XLA
    )
    return decorator


@traced(FLOATS, PLACES)
def _taken(x: Any, places: Any) -> Any:
    return tf.gather(x, places)


@traced(FLOATS, PLACES, FLOATS)
def _put(x: Any, places: Any, values: Any) -> Any:
    return tf.tensor_scatter_nd_update(x, places[:, None], values)


class DeviceArray:
    """[n] float32 on the device; what changes it in place gives it another tensor.

    Operands may be numpy arrays: these are copied to the device. `np.asarray` copies it to the
    host; no operator does that.

    Attributes:
        value: A tensor, never written to.
    """

    __array_ufunc__ = None  # numpy's operators leave the work to this class
    dtype = np.dtype(np.float32)

    def __init__(self, value: Any) -> None:
        """Take a tensor, or copy an array to the device."""
        if isinstance(value, np.ndarray):
            value = value.copy()  # TensorFlow may keep the array itself where it is on a processor
        self.value = tf.convert_to_tensor(value, tf.float32)

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(self.value.shape[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a copy on the host."""
        del copy
        return np.asarray(self.value.numpy(), dtype)

    def __getitem__(self, where: Any) -> DeviceArray:
        """Return the entries of a slice, or at positions [k] int64."""
        value = self.value
        return DeviceArray(value[where] if isinstance(where, slice) else _taken(value, where))

    def __setitem__(self, where: Any, values: Any) -> None:
        """Set the entries at positions [k] int64, or all of them, to values [k] or a number.

        Raises:
            IndexError: For a slice of only some entries.
        """
        if not isinstance(where, slice):
            spread = tf.broadcast_to(tensor_of(values), [len(where)])
            self.value = _put(self.value, where, spread)
        elif where == slice(None):
            self.value = tf.broadcast_to(tensor_of(values), [self.size])
        else:
            raise IndexError(f"{where} of a DeviceArray cannot be set; expected positions or [:]")

    def any(self) -> bool:
        """Return whether an entry is not 0."""
        return bool(tf.reduce_any(self.value != 0))

    def zeros(self) -> DeviceArray:
        """Return [n] zeros on the same device."""
        return DeviceArray(tf.zeros_like(self.value))

    def __len__(self) -> int:
        """Return the number of entries."""
        return self.size

    def __add__(self, other: Any) -> DeviceArray:
        """Return the sum with an array [n] or a number."""
        return DeviceArray(self.value + tensor_of(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> DeviceArray:
        """Return the difference from an array [n] or a number."""
        return DeviceArray(self.value - tensor_of(other))

    def __iadd__(self, other: Any) -> DeviceArray:
        """Add an array [n] or a number."""
        self.value = self.value + tensor_of(other)
        return self

    def __isub__(self, other: Any) -> DeviceArray:
        """Subtract an array [n] or a number."""
        self.value = self.value - tensor_of(other)
        return self

    def __imul__(self, factor: Any) -> DeviceArray:
        """Multiply by an array [n] or a number."""
        self.value = self.value * tensor_of(factor)
        return self

    def __mul__(self, factor: Any) -> DeviceArray:
        """Return the product with an array [n] or a number."""
        return DeviceArray(self.value * tensor_of(factor))

    __rmul__ = __mul__


def tensor_of(array: Any) -> Any:
    """Return the tensor of a `DeviceArray`, or a float32 one of anything else."""
    if isinstance(array, DeviceArray):
        return array.value
    return tf.convert_to_tensor(array, tf.float32)


def as_saved(state: Any) -> Any:
    """Return a state with numpy arrays for what lives on the device."""
    if isinstance(state, dict):
        return {key: as_saved(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(as_saved(value) for value in state)
    return np.asarray(state) if isinstance(state, DeviceArray) else state


def as_kept(saved: Any, fresh: Any) -> Any:
    """Return a saved state with everything on the device that a fresh one has there."""
    if isinstance(saved, dict) and isinstance(fresh, dict):
        return {key: as_kept(value, fresh.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(fresh, list) and len(saved) == len(fresh):
        return [as_kept(value, other) for value, other in zip(saved, fresh, strict=True)]
    return DeviceArray(saved) if isinstance(fresh, DeviceArray) else saved
