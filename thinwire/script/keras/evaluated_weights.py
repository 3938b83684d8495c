"""The central weights of a run, as the evaluator's model takes them over during one `fit`."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import keras

from thinwire.models.flat_model import FlatVariables, moving_statistics
from thinwire.ops.sharding.w_global import model_spec
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import decode_layouts
from thinwire.script.keras.reports import variables_of
from thinwire.supervisor.evaluation_requests import CentralModel
from thinwire.worker.client.slots import fetch_slots

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.runtime.run.settings import Run

#: What Keras calls a moving average of weights among an optimizer's slots; and how many states a
#: shard sends where there is one optimizer: the last is of what has none.
_AVERAGE, _WITH_ONE_OPTIMIZER = "average", 2


class EvaluatedWeights:
    """Fetches what the workers of a `fit` share, and writes it into a model.

    Attributes:
        shared: The variables that they share, in order.

    Args:
        model: Built, and the workers'.
        run: The run's settings.
        run_id: As the Supervisor's stream has it.
        begun: The `fit`, as the workers have reported it.

    Raises:
        ConfigurationError: The model is not the workers'.
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
        """Give the model the central weights and statistics; return versions and checksums.

        Args:
            averages: Whether moving averages of the weights take their place.

        Raises:
            Unreachable, RequestRejected: The PS is gone for good, or in a later phase.
        """
        view = self._central.fetch()
        if averages and any(view.versions):  # before the first update there are none
            self._put_averages(view.weights)
        self._flat.assign(view.weights)
        if view.statistics is not None:
            self._statistics.assign(view.statistics)
        given = [each for each in (view.weights, view.statistics) if each is not None]
        return list(view.versions), tuple(zlib.crc32(each.data) for each in given)

    def close(self) -> None:
        """End the streams."""
        self._central.close()

    def _put_averages(self, weights: Float32) -> None:
        """Replace weights by their moving averages, where the PS's optimizer has some.

        Args:
            weights: [num_parameters], in place.
        """
        offsets = self._spec.offsets
        shards = fetch_slots(self._run, 0, self._run_id, self._layouts, role=pb.ROLE_EVALUATOR)
        for layout, states in zip(self._layouts, shards, strict=True):
            if len(states) != _WITH_ONE_OPTIMIZER:
                continue
            for slot in states[0].slots:
                if slot.role == _AVERAGE and slot.slice is not None:
                    piece = layout.slices[slot.slice]
                    start = offsets[piece.tensor] + piece.start
                    weights[start : start + piece.size] = slot.values.ravel()
