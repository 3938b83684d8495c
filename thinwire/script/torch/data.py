"""Divides the data of a torch loop among workers, without Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import from_numpy
from torch.utils.data import DataLoader, Dataset, Subset

from thinwire.data.partition import split
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import WorkerPlace
from thinwire.script.data.torch_batches import part_of_loader


def part_of(data: Sequence[Any], place: WorkerPlace) -> Any:
    """Return this worker's part of the data that a script passes to `shard`.

    Args:
        data: One DataLoader, of whose batches each worker gets its own; one map-style Dataset; or
            arrays and tensors [N, ...], whose rows the workers divide. Some values of --partition
            use the last array as labels.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Raises:
        ConfigurationError: Thinwire cannot divide the data into disjoint parts that cover it.
    """
    if len(data) == 1 and isinstance(data[0], DataLoader):
        return part_of_loader(data[0], place)
    if len(data) == 1 and isinstance(data[0], Dataset) and hasattr(data[0], "__len__"):
        place.check_partition("torch Dataset")
        rows = split(np.zeros(len(data[0]), np.int64), place.rule)[place.worker - 1]
        return Subset(data[0], rows.tolist())
    if not data or not all(hasattr(each, "shape") and len(each.shape) for each in data):
        kinds = ", ".join(type(each).__name__ for each in data)
        raise ConfigurationError(
            f"shard() was given {kinds or 'nothing'}; expected one torch DataLoader or map-style "
            "Dataset, or arrays and tensors with a first axis of rows."
        )
    sizes = [len(each) for each in data]
    if len(set(sizes)) > 1:
        raise ConfigurationError(
            f"shard() was given arrays with {sizes} rows; expected equally many in each."
        )
    labels = np.asarray(data[-1])
    is_labelled = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    labels = labels if is_labelled else np.zeros(sizes[0], np.int64)
    rows = split(labels, place.rule)[place.worker - 1]
    parts = tuple(each[from_numpy(rows) if hasattr(each, "device") else rows] for each in data)
    return parts[0] if len(parts) == 1 else parts
