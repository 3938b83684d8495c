"""Passes over the training data, numbered from the first epoch of `fit`.

A worker's part of the data depends on the number of the pass, so all workers must count alike.
Keras' `fit` may read batches before it trains: on JAX and PyTorch one batch, from which it builds a
model that has no weights yet, and on TensorFlow two batches of a DataLoader, for their shapes. The
first epoch then begins to read the data again. Whether Keras reads such batches differs by backend
and by script, so the pass that they begin must be the pass of the first epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras import tree
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from thinwire.script.data.place import UnfilledRounds


class TrainingPasses:
    """Data set whose iterators are passes; the first epoch continues a pass begun before training.

    Each iterator of the data set begins a pass when its first batch is read, not when it is made:
    Keras makes iterators that it never reads. All iterators made before training belong to pass 0,
    and each of them begins with the first batch of that pass.

    Args:
        begin: Function of the number of a pass, from 0, that returns the batches of the pass.
        unfilled: Counter of rounds in which this worker has no rows, counted while `begin`'s
            batches are read; None if the data does not count them.
    """

    def __init__(
        self, begin: Callable[[int], Iterable[Any]], unfilled: UnfilledRounds | None = None
    ) -> None:
        self._begin, self._unfilled = begin, unfilled
        self._is_training, self._num_passes = False, 0
        self._early: list[Any] = []  # batches of pass 0 that were read before training
        self._rest: Iterator[Any] | None = None  # batches of pass 0 after `_early`
        self._num_unfilled = 0  # rounds without rows in pass 0, counted before training

    def __iter__(self) -> Iterator[Any]:
        if not self._is_training:
            yield from self._before_training()
            return
        number, self._num_passes = self._num_passes, self._num_passes + 1
        if number or self._rest is None:
            yield from self._begin(number)
            return
        early, rest = self._early, self._rest
        self._early, self._rest = [], None
        # the callbacks of `fit` have cleared the counter at the start of the epoch
        for _ in range(self._num_unfilled):
            self._unfilled.note()  # type: ignore[union-attr] # 0 rounds without a counter
        yield from early
        yield from rest

    def _before_training(self) -> Iterator[Any]:
        if self._rest is None:
            self._rest = iter(self._begin(0))
        yield from tuple(self._early)
        # not "yield from": the end of this iterator must not close the pass
        for batch in self._rest:
            self._early.append(batch)
            yield batch

    def end_epoch(self) -> None:
        """Note that Keras ends an epoch; `fit` ends one before it begins its first epoch."""
        if not self._is_training:
            self._is_training = True
            if self._unfilled is not None:
                self._num_unfilled = self._unfilled.take()


class PassAdapter(DataAdapter):
    """Gives Keras' `fit` the batches of numbered passes, on JAX and PyTorch.

    Args:
        batches: Function of the number of a pass, from 0, and of a backend ("numpy", "jax" or
            "torch") that returns the batches of the pass. Their arrays may be NumPy arrays on every
            backend.
        num_batches: Number of batches in each pass.
        batch_size: Number of rows in a full batch.
        num_remaining: Number of rows in a short last batch; 0 if all batches are full.
    """

    def __init__(
        self,
        batches: Callable[[int, str], Iterable[Any]],
        num_batches: int,
        batch_size: int,
        num_remaining: int,
    ) -> None:
        backend = keras.backend.backend()
        self._passes = TrainingPasses(lambda number: batches(number, backend))
        self._num_batches, self._batch_size = num_batches, batch_size
        self._num_remaining = num_remaining

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over the batches of a pass, with NumPy arrays."""
        numpy_batches: Iterator[Any] = data_adapter_utils.get_numpy_iterator(self._passes)
        return numpy_batches

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return an iterator over the batches of a pass, with arrays for JAX."""
        return iter(self._passes)

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Return an iterator over the batches of a pass, with tensors of PyTorch.

        Keras only iterates over the result, so it need not be a DataLoader, which would draw from
        PyTorch's random generator.
        """
        convert = functools.partial(
            tree.map_structure, keras.ops.convert_to_tensor, none_is_leaf=False
        )
        return map(convert, self._passes)

    @property
    def num_batches(self) -> int:
        """Number of batches in each pass."""
        return self._num_batches

    @property
    def batch_size(self) -> int:
        """Number of rows in a full batch."""
        return self._batch_size

    @property
    def has_partial_batch(self) -> bool:
        """True if the last batch of a pass is short."""
        return self._num_remaining > 0

    @property
    def partial_batch_size(self) -> int | None:
        """Number of rows in a short last batch; None if all batches are full."""
        return self._num_remaining or None

    def on_epoch_end(self) -> None:
        """Note that Keras ends an epoch."""
        self._passes.end_epoch()
