"""Gathers the batches of arrays in Python, for Keras' backends JAX and PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from keras import tree
from keras.src.trainers.data_adapters import array_slicing

from thinwire.script.data.passes import PassAdapter
from thinwire.script.data.row_order import RowOrder


def gather_by_batches(arrays: Any, order: RowOrder) -> PassAdapter:
    """Return a data set for Keras' `fit` of this worker's batches of a script's arrays.

    Args:
        arrays: Arrays [N, ...] in any nesting, which Keras can slice: of NumPy, JAX, PyTorch,
            TensorFlow, pandas, or sparse ones of SciPy.
        order: Order of the rows in each epoch, and their division among workers.
    """

    @functools.cache  # a conversion may copy the arrays to another dtype
    def sliceable_for(backend: str) -> Any:
        return array_slicing.convert_to_sliceable(arrays, target_backend=backend)

    def batches(number: int, backend: str) -> Iterator[Any]:
        sliceable = sliceable_for(backend)
        for rows in order.batches(number):
            take = functools.partial(_take, rows=rows, backend=backend)
            yield tree.map_structure(take, sliceable, none_is_leaf=False)

    return PassAdapter(
        batches, order.num_batches, order.batch_size, order.num_rows % order.batch_size
    )


def _take(array: Any, *, rows: Any, backend: str) -> Any:
    """Return the rows of one of Keras' sliceable arrays, in a form that a backend can read."""
    if backend == "jax":
        return array.convert_to_jax_compatible(array[rows])
    if backend == "torch":
        return array.convert_to_torch_compatible(array[rows])
    return array.convert_to_numpy(array[rows])
