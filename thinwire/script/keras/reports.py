"""Builds the reports of a `fit` that a worker sends to the evaluator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from thinwire.ops.types import ConfigurationError, ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import encode_layouts

#: Longest Keras History that is reported, in characters of JSON, because one message must hold the
#: report.
_MOST_CHARACTERS = 900_000


def describe_fit(
    model: keras.Model, variables: Sequence[Any], layouts: Sequence[ShardLayout]
) -> pb.FitBegun:
    """Return which weights of a model all workers train, and which shard stores each weight.

    Args:
        model: Built Keras model.
        variables: Variables that all workers train, in the order in which the PS knows them.
            Variables that are not weights of the model are numbered after the model's weights.
        layouts: For each shard, the parts of the variables that the shard stores.
    """
    weights = model.weights
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    return pb.FitBegun(
        variables=[numbers.setdefault(id(variable), len(numbers)) for variable in variables],
        num_weights=len(weights),
        shards=encode_layouts(layouts),
    )


def variables_of(fit: pb.FitBegun, model: keras.Model) -> list[Any]:
    """Return a model's weights that a report of `describe_fit` lists, in the report's order.

    For a listed variable that is no weight of the model, a new variable of its size is returned,
    which no evaluation reads.

    Raises:
        ConfigurationError: The workers' model and the evaluator's `model` differ in the number of
            weights.
    """
    weights = model.weights
    if len(weights) != fit.num_weights:
        raise ConfigurationError(
            f"{model.name!r} has {len(weights)} weights in the evaluator, but {fit.num_weights} on "
            "the workers; expected the same model in every process of the script. Build the model "
            "before fit, in the same way in every process: model(x[:1])."
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
    """Return Keras' History as JSON; an empty string if the text would be too long to send."""
    logs = {name: [_plain(value) for value in row] for name, row in history.history.items()}
    text = json.dumps({"epoch": list(history.epoch), "history": logs})
    return text if len(text) <= _MOST_CHARACTERS else ""


def fill_history(history: Any, text: str) -> None:
    """Fill a Keras History from the text of `describe_history`; an empty text changes nothing."""
    if text:
        document = json.loads(text)
        history.epoch, history.history = document["epoch"], document["history"]


def _plain(value: Any) -> Any:
    try:
        return np.asarray(value, np.float64).tolist()
    except (TypeError, ValueError):
        return None
