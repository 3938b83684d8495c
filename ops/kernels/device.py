"""Arrays on TensorFlow's device (CPU or GPU) with the numpy operators that gradient codecs use."""

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
#: True: compile functions with XLA, because there is a GPU. None: run TensorFlow's own operations,
#: which start faster without a GPU. XLA fuses operations that otherwise each need one pass over
#: memory, but it lacks operations that only a CPU can do, and compiles again for every array
#: length.
USES_XLA = True if tf.config.list_physical_devices("GPU") else None


def traced(*signature: tf.TensorSpec) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function to one TensorFlow graph for `signature`."""
    decorator: Callable[[_Function], _Function] = tf.function(input_signature=signature)
    return decorator


def fused(*signature: tf.TensorSpec) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function to a TensorFlow graph, with XLA on a GPU."""
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
    """An array [n] float32 on TensorFlow's device, with the operators of a numpy array.

    An in-place operation replaces the DeviceArray's tensor by a new tensor. Operands of a
    DeviceArray can be numpy arrays: the operators copy numpy operands to the device. `np.asarray`
    copies a DeviceArray to the host; no operator copies a DeviceArray to the host.

    Attributes:
        value: [n] float32 tensor on the device, which is never overwritten.
        kernels: Value of --kernels whose kernels compute with such arrays.
    """

    # `__array_ufunc__ = None` makes numpy's operators call the operators of this class
    __array_ufunc__ = None
    dtype = np.dtype(np.float32)
    kernels = "tf"

    def __init__(self, value: Any) -> None:
        """Store a tensor, or copy a numpy array to the device."""
        if isinstance(value, np.ndarray):
            # On a CPU, a TensorFlow tensor can use the numpy array's memory, which the caller can
            # overwrite.
            value = value.copy()
        self.value = tf.convert_to_tensor(value, tf.float32)

    @property
    def size(self) -> int:
        """Number of entries in the device array."""
        return int(self.value.shape[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a numpy array with a copy of this device array."""
        return np.asarray(self.value.numpy(), dtype)

    def __getitem__(self, where: Any) -> DeviceArray:
        """Return the device array's entries in a slice, or at positions [k] int64."""
        value = self.value
        return DeviceArray(value[where] if isinstance(where, slice) else _taken(value, where))

    def __setitem__(self, where: Any, values: Any) -> None:
        """Set the array's entries at positions [k] int64, or all entries, to given values.

        Raises:
            IndexError: `where` is a slice of only some entries of the device array.
        """
        if not isinstance(where, slice):
            spread = tf.broadcast_to(tensor_of(values), [len(where)])
            self.value = _put(self.value, where, spread)
        elif where == slice(None):
            self.value = tf.broadcast_to(tensor_of(values), [self.size])
        else:
            raise IndexError(f"{where} of a DeviceArray cannot be set; expected positions or [:]")

    def any(self) -> bool:
        """Return True if the device array has an entry that is not 0."""
        return bool(tf.reduce_any(self.value != 0))

    def zeros(self) -> DeviceArray:
        """Return a DeviceArray of zeros with as many entries as this device array."""
        return DeviceArray(tf.zeros_like(self.value))

    def __len__(self) -> int:
        """Return the number of entries in the device array."""
        return self.size

    def __add__(self, other: Any) -> DeviceArray:
        """Return the sum of this device array and an array [n] or a number."""
        return DeviceArray(self.value + tensor_of(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> DeviceArray:
        """Return this device array minus an array [n] or a number."""
        return DeviceArray(self.value - tensor_of(other))

    def __iadd__(self, other: Any) -> DeviceArray:
        """Add an array [n] or a number to this device array in place."""
        self.value = self.value + tensor_of(other)
        return self

    def __isub__(self, other: Any) -> DeviceArray:
        """Subtract an array [n] or a number from this device array in place."""
        self.value = self.value - tensor_of(other)
        return self

    def __imul__(self, factor: Any) -> DeviceArray:
        """Multiply this device array in place by an array [n], entry by entry, or by a number."""
        self.value = self.value * tensor_of(factor)
        return self

    def __mul__(self, factor: Any) -> DeviceArray:
        """Return this device array times an array [n], entry by entry, or times a number."""
        return DeviceArray(self.value * tensor_of(factor))

    __rmul__ = __mul__


def tensor_of(array: Any) -> Any:
    """Return the tensor of a `DeviceArray`, or convert any other array to a float32 tensor."""
    if isinstance(array, DeviceArray):
        return array.value
    return tf.convert_to_tensor(array, tf.float32)


def as_saved(state: Any) -> Any:
    """Return a codec's state with numpy arrays instead of arrays on the device."""
    if isinstance(state, dict):
        return {key: as_saved(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(as_saved(value) for value in state)
    return np.asarray(state) if isinstance(state, DeviceArray) else state


def as_kept(saved: Any, fresh: Any) -> Any:
    """Return a saved codec state; its arrays are on the device where the fresh state's are."""
    if isinstance(saved, dict) and isinstance(fresh, dict):
        return {key: as_kept(value, fresh.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(fresh, list) and len(saved) == len(fresh):
        return [as_kept(value, goal) for value, goal in zip(saved, fresh, strict=True)]
    return DeviceArray(saved) if isinstance(fresh, DeviceArray) else saved
