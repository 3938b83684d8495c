"""What a worker trains on of all that a script gives to `fit`."""

from __future__ import annotations

from typing import Any

from thinwire.keras.arrays import are_arrays, share_arrays
from thinwire.keras.datasets import is_dataset, share_dataset
from thinwire.keras.place import Shared, WorkerPlace

__all__ = ["Shared", "WorkerPlace", "share"]


def share(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return the arguments of Keras' fit for this worker.

    Args:
        arguments: Of Keras' fit, by name; unchanged.
        place: This worker's.

    Returns:
        The arguments with this worker's part of the training data, its batch size and its steps.
        What Keras itself would refuse is left to it.

    Raises:
        ConfigurationError: The data cannot be shared so that the parts are disjoint and complete,
            or a part would be empty.
    """
    data = arguments.get("x"), arguments.get("y"), arguments.get("sample_weight")
    if arguments.get("x") is not None and are_arrays(data):
        return share_arrays(arguments, place)
    if is_dataset(arguments.get("x")):
        return share_dataset(arguments, place)
    return Shared(dict(arguments))
