"""What a worker reports of a `fit`, for the evaluator of its model, which has no part in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from thinwire.ops.types import ConfigurationError, ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import encode_layouts

#: A longer history is not reported.
_MOST_CHARACTERS = 900_000


def describe_fit(
    model: keras.Model, variables: Sequence[Any], layouts: Sequence[ShardLayout]
) -> pb.FitBegun:
    """Return which of a model's weights a run shares, and where they are.

    Args:
        model: Built.
        variables: The shared ones, in order; those that the model does not hold are numbered after
            its own.
        layouts: Of all shards.
    """
    weights = model.weights
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    return pb.FitBegun(
        variables=[numbers.setdefault(id(each), len(numbers)) for each in variables],
        num_weights=len(weights),
        shards=encode_layouts(layouts),
    )


def variables_of(fit: pb.FitBegun, model: keras.Model) -> list[Any]:
    """Return the weights of a model that `describe_fit` has named, in order.

    Those that the model does not hold, and no evaluation needs, are new variables.

    Raises:
        ConfigurationError: The workers' model is another one.
    """
    weights = model.weights
    if len(weights) != fit.num_weights:
        raise ConfigurationError(
            f"{model.name!r} has {len(weights)} weights in the evaluator, and {fit.num_weights} on "
            "the workers; expected the same model in every process that runs the script. Build it "
            "before fit, and alike everywhere: model(x[:1])."
        )
    sizes = [0] * len(fit.variables)
    for shard in fit.shards:
        for variable, stop in zip(shard.variables, shard.stops, strict=True):
            sizes[variable] = max(sizes[variable], stop)
    return [
        weights[number] if number < len(weights) else keras.Variable(np.zeros(size, np.float32))
        for number, size in zip(fit.variables, sizes, strict=True)
    ]


def describe_history(history: Any) -> str:
    """Return Keras' History as JSON; empty where it is too long."""
    found = {name: [_plain(value) for value in row] for name, row in history.history.items()}
    text = json.dumps({"epoch": list(history.epoch), "history": found})
    return text if len(text) <= _MOST_CHARACTERS else ""


def fill_history(history: Any, text: str) -> None:
    """Give a History what `describe_history` has described; nothing where that is empty."""
    if text:
        found = json.loads(text)
        history.epoch, history.history = found["epoch"], found["history"]


def _plain(value: Any) -> Any:
    try:
        return np.asarray(value, np.float64).tolist()
    except (TypeError, ValueError):
        return None
