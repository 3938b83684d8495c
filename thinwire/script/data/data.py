"""Finds the type of a script's training data and divides the data among workers.

The modules that divide the data sets of a framework import the framework. This module imports them
only for a script that passes such a data set.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from thinwire.data.partition import split
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.arrays import are_arrays, labels_of, num_rows, share_arrays, take_rows
from thinwire.script.data.batches import part_of_batches, share_batches
from thinwire.script.data.place import Shared, WorkerPlace
from thinwire.script.data.ray_data import is_ray_dataset, part_of_ray_dataset, share_ray_dataset


def _is_tf_dataset(data: Any) -> bool:
    """Return True if an object is a tf.data.Dataset."""
    # a script that has made such a data set has already imported TensorFlow
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(data, tf.data.Dataset)


def _share_tf_dataset(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    from thinwire.script.data.datasets import share_dataset

    return share_dataset(arguments, place)


def _part_of_tf_dataset(dataset: Any, place: WorkerPlace) -> Any:
    from thinwire.script.data.datasets import part_of_dataset

    return part_of_dataset(dataset, place)


def _is_torch_loader(data: Any) -> bool:
    """Return True if an object is a torch.utils.data.DataLoader."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.DataLoader)


def _share_torch_loader(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    from thinwire.script.data.torch_loader import share_loader

    return share_loader(arguments, place)


def _part_of_torch_loader(loader: Any, place: WorkerPlace) -> Any:
    from thinwire.script.data.torch_batches import part_of_loader

    return part_of_loader(loader, place)


#: For each type of data sets: a function that recognizes it, a function that divides the data set
#: of a `fit`, and a function that returns one worker's part.
_DATA_SETS: tuple[tuple[Callable[..., bool], Callable[..., Shared], Callable[..., Any]], ...] = (
    (_is_tf_dataset, _share_tf_dataset, _part_of_tf_dataset),
    (lambda x: isinstance(x, keras.utils.PyDataset), share_batches, part_of_batches),
    (_is_torch_loader, _share_torch_loader, _part_of_torch_loader),
    (is_ray_dataset, share_ray_dataset, part_of_ray_dataset),
)
_SCALARS = (str, bytes, int, float, np.generic)

__all__ = ["Shared", "WorkerPlace", "part_of_data", "share"]


def share(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return the arguments of Keras' fit with this worker's part of the training data as x.

    Args:
        arguments: Arguments of the script's call of Keras' fit, by name; not modified.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Returns:
        The arguments with this worker's part of the training data, batch size and number of steps.
        Data that Keras itself rejects is returned unchanged.

    Raises:
        ConfigurationError: Thinwire cannot divide the training data into disjoint parts that cover
            the data, or a worker would get no data.
    """
    x = arguments.get("x")
    for is_known, share_data_set, _ in _DATA_SETS:
        if is_known(x):
            return share_data_set(arguments, place)
    if x is not None and are_arrays((x, arguments.get("y"), arguments.get("sample_weight"))):
        return share_arrays(arguments, place)
    if place.is_shared and (what := _unshareable(x)):
        raise ConfigurationError(
            f"the script called fit with {what}, which Thinwire cannot divide among the workers. "
            'Give distribute() shard="off" (or --shard=off) and let the script yield a different '
            "part of the data on each worker, by thinwire.worker_id() and thinwire.num_workers(); "
            "or give fit arrays, a tf.data.Dataset, a keras.utils.PyDataset, a torch DataLoader or "
            "a ray.data.Dataset."
        )
    return Shared(dict(arguments))


def _unshareable(x: Any) -> str:
    """Return the name of a data type that Keras accepts but Thinwire cannot divide, or ""."""
    if isinstance(x, types.GeneratorType):
        return "a Python generator"
    if data_adapters.is_grain_dataset(x):
        return "a grain data set"
    if isinstance(x, DataAdapter) or data_adapters.is_tf_dataset(x):
        return f"a {type(x).__name__}"
    return ""


def part_of_data(data: tuple[Any, ...], place: WorkerPlace) -> Any:
    """Return this worker's part of the data that a script passes to `shard`, with whole batches.

    Args:
        data: Arrays [N, ...] in any nesting, or one tf.data.Dataset, keras.utils.PyDataset, torch
            DataLoader or ray.data.Dataset. Some values of --partition use the last arrays as
            labels.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Returns:
        A tuple with the part of each array; for a single array or dataset, only its part. The part
        of a list of numbers is an array.

    Raises:
        ConfigurationError: The data has no rows, or Thinwire cannot divide it into disjoint,
            non-empty parts that cover the data.
    """
    for is_known, _, part_of in _DATA_SETS:
        if len(data) == 1 and is_known(data[0]):
            return part_of(data[0], place)
    arrays = tuple(_with_arrays(component) for component in data)
    if not are_arrays(arrays):
        kinds = ", ".join(type(leaf).__name__ for leaf in keras.tree.flatten(arrays))
        raise ConfigurationError(
            f"shard() was given {kinds}; expected arrays with a first axis of rows, in lists, "
            "tuples or dicts, or one tf.data.Dataset, keras.utils.PyDataset, torch DataLoader or "
            "ray.data.Dataset."
        )
    total = num_rows(arrays)
    labels = labels_of(arrays[-1], total, place.rule.partition)
    parts = take_rows(arrays, split(labels, place.rule)[place.worker - 1])
    return parts[0] if len(parts) == 1 else parts


def _with_arrays(data: Any) -> Any:
    """Return data in which arrays replace all lists of numbers or texts, nested or not."""
    if isinstance(data, dict):
        return {key: _with_arrays(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        if all(isinstance(leaf, _SCALARS) for leaf in keras.tree.flatten(data)):
            return np.asarray(data)
        return type(data)(_with_arrays(component) for component in data)
    return data
