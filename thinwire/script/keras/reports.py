"""Reports of a `fit` from a worker to the evaluator, and the weights that the evaluator loads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from thinwire.models.flat_model import moving_statistics
from thinwire.models.flat_variables import FlatVariables
from thinwire.ops.sharding.w_global import model_spec
from thinwire.ops.types import ConfigurationError, ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import decode_layouts, encode_layouts
from thinwire.supervisor.evaluation_requests import CentralModel
from thinwire.worker.client.slots import fetch_slots

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.runtime.run.settings import Run

#: The constant `_AVERAGE` is Keras' name of the optimizer slot with the moving average of a weight.
#: `_WITH_ONE_OPTIMIZER` is the number of states that a shard with one optimizer sends: the
#: optimizer's state, and a last state for all values without an optimizer.
_AVERAGE, _WITH_ONE_OPTIMIZER = "average", 2
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


class EvaluatedWeights:
    """Fetches the variables that the workers train together, and writes them into a model.

    Attributes:
        shared: Variables of the model that all workers train, in the order in which the shards
            store them.

    Args:
        model: Built Keras model of the evaluator; it must equal the workers' model.
        run: Settings of the training run.
        run_id: Identifier of the run, which the stream of evaluation requests delivers.
        begun: Message from the workers which reports that the `fit` has begun.

    Raises:
        ConfigurationError: The evaluator's model differs from the workers' model.
    """

    def __init__(self, model: keras.Model, run: Run, run_id: str, begun: pb.FitBegun) -> None:
        self.shared = variables_of(begun, model)
        averaged = moving_statistics(model) if run.method.bn_sync else []
        self._flat, self._statistics = FlatVariables(self.shared), FlatVariables(averaged)
        self._run, self._run_id = run, run_id
        self._spec = model_spec(self.shared, numbers_paths=True)
        self._layouts = decode_layouts(begun.shards, self._spec)
        self._central = CentralModel(
            run, run_id, self._spec, self._layouts, self._statistics.size, begun.phase
        )

    def take(self, averages: bool = False) -> tuple[list[int], tuple[int, ...]]:
        """Load the shards' weights and moving statistics (of BatchNormalization) into the model.

        Args:
            averages: True to load the optimizer's moving averages of the weights instead of the
                weights.

        Returns:
            The version of each shard, and checksums of the loaded weights and statistics.

        Raises:
            Unreachable: The parameter server (PS) cannot be reached.
            RequestRejected: The PS rejects the request, because the run trains a later model or
                optimizer (a later phase).
        """
        view = self._central.fetch()
        # the PS has no moving averages of weights before the first update
        if averages and any(view.versions):
            self._put_averages(view.weights)
        self._flat.assign(view.weights)
        if view.statistics is not None:
            self._statistics.assign(view.statistics)
        loaded = [values for values in (view.weights, view.statistics) if values is not None]
        return list(view.versions), tuple(zlib.crc32(values.data) for values in loaded)

    def close(self) -> None:
        """Close the streams on which weights are fetched from the shards."""
        self._central.close()

    def _put_averages(self, weights: Float32) -> None:
        """Replace weights by their moving averages, if the PS's optimizer keeps moving averages.

        Args:
            weights: [num_parameters] float32 weights, which are overwritten by their averages.
        """
        offsets = self._spec.offsets
        shards = fetch_slots(self._run, 0, self._run_id, self._layouts, role=pb.ROLE_EVALUATOR)
        for layout, states in zip(self._layouts, shards, strict=True):
            for slot in states[0].slots if len(states) == _WITH_ONE_OPTIMIZER else ():
                if slot.role == _AVERAGE and slot.slice is not None:
                    piece = layout.slices[slot.slice]
                    start = offsets[piece.tensor] + piece.start
                    weights[start : start + piece.size] = slot.values.ravel()
