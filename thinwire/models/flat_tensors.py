"""Joins tensors to one flat vector, and cuts it again, on each of Keras' backends.

A function of `keras.ops` takes tens of microseconds where steps are not compiled, and there would
be several calls for each variable. So PyTorch's tensors use PyTorch's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


def join(tensors: Sequence[Any]) -> Any:
    """Return the entries of tensors as one float32 tensor [n], without gradients."""
    import keras

    if not tensors:
        return keras.ops.zeros([0])
    if keras.backend.backend() == "torch":
        import torch

        flat = [tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors]
        return torch.cat(flat)
    flat = [keras.ops.reshape(keras.ops.cast(tensor, "float32"), [-1]) for tensor in tensors]
    return keras.ops.concatenate(flat, 0)


def join_arrays(arrays: Sequence[Any]) -> Float32:
    """Return the entries of arrays as one new float32 array [n]."""
    flat = [np.ravel(array) for array in arrays]
    return np.concatenate([*flat, np.empty(0, np.float32)], dtype=np.float32)


def cut(flat: Any, variables: Sequence[Any], ends: Sequence[int]) -> list[Any]:
    """Return the parts of a flat vector as tensors of the variables' shapes and dtypes.

    Args:
        flat: [n] float32 tensor or array. The parts of an array do not use its memory.
        variables: Keras variables, at least one.
        ends: Index in `flat` of each part's end.
    """
    import keras

    if isinstance(flat, np.ndarray):
        # A framework may keep an array's memory as a tensor's, which must not change later.
        flat = flat.copy()
    if keras.backend.backend() == "torch":
        import torch

        sizes = np.diff(ends, prepend=0).tolist()
        parts = zip(variables, torch.as_tensor(flat).split(sizes), strict=True)
        return [part.view(tuple(v.shape)).to(v.value.dtype) for v, part in parts]
    split = np.split if isinstance(flat, np.ndarray) else keras.ops.split
    parts = zip(variables, split(flat, list(ends[:-1])), strict=True)
    return [keras.ops.cast(keras.ops.reshape(part, v.shape), v.dtype) for v, part in parts]
