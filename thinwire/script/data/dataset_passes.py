"""Reads a tf.data.Dataset in numbered passes, for Keras' backends JAX and PyTorch."""

from __future__ import annotations

from typing import Any

from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from thinwire.script.data.passes import TrainingPasses
from thinwire.script.data.place import UnfilledRounds


def read_in_passes(
    arguments: dict[str, Any], unfilled: UnfilledRounds | None = None
) -> dict[str, Any]:
    """Return arguments of `fit` in which the first epoch continues a pass begun before training.

    A tf.data.Dataset counts its own passes, and a shuffle draws a new order in each of them. With
    TensorFlow as its backend, Keras reads nothing from the data before it trains. If other backends
    read a pass to build the model, their workers would count one more.

    Args:
        arguments: Arguments of `fit` with this worker's tf.data.Dataset as x.
        unfilled: Counter of rounds in which this worker has no rows; None if the dataset does not
            count them.

    Raises:
        ValueError: Keras rejects an argument of `fit` together with a tf.data.Dataset.
    """
    named = ("x", "y", "sample_weight", "class_weight")
    adapter = data_adapters.get_data_adapter(**{name: arguments.get(name) for name in named})
    passes = _DatasetAdapter(adapter, unfilled)
    return arguments | {"x": passes, "class_weight": None, "shuffle": False}


class _DatasetAdapter(TFDatasetAdapter):
    """Gives Keras' `fit` the batches of a tf.data.Dataset as its own adapter does, in passes."""

    def __init__(self, adapter: TFDatasetAdapter, unfilled: UnfilledRounds | None) -> None:
        self._num_batches: int | None = adapter.num_batches
        self._batch_size: int | None = adapter.batch_size
        self._dataset = TrainingPasses(lambda number: adapter._dataset, unfilled)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in each pass; None if unknown."""
        return self._num_batches

    @property
    def batch_size(self) -> int | None:
        """Number of rows in each batch; None if it varies."""
        return self._batch_size

    def on_epoch_end(self) -> None:
        """Note that Keras ends an epoch."""
        self._dataset.end_epoch()
