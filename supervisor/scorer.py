"""Evaluates a model with weights pulled from the shards, and saves the model to a file."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from thinwire.models.flat_model import SharedModel
from thinwire.models.flat_variables import FlatVariables
from thinwire.models.loss import ensure_compiled_loss
from thinwire.runtime.run.files import naming
from thinwire.runtime.run.settings import Run
from thinwire.runtime.run.target import Target
from thinwire.supervisor.evaluator import Evaluator

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class ModelScorer:
    """Evaluates a Keras model on a test set and saves the model to a file.

    Args:
        run: Settings of the training run.
        shared: Model to evaluate, with its Keras network.
        images: Inputs of the test examples, [N, ...].
        labels: Labels of the test examples, [N, ...], in the form that the model's task defines.
    """

    def __init__(self, run: Run, shared: SharedModel, images: Any, labels: Any) -> None:
        self._shared = shared
        self.goal: Target = shared.task.goal
        """Metric that decides which model is the best, and whether high values are better."""
        self._statistics = FlatVariables(shared.statistics)
        loss = ensure_compiled_loss(shared.model, shared.task)
        extras = ("top5",) if run.top5 else ()
        self._evaluator = Evaluator(
            shared.model, loss, images, labels, run.batch_size, shared.task, extras=extras
        )

    def score(self, weights: Float32, statistics: Float32 | None) -> dict[str, float]:
        """Return the metrics of the model on the whole test set, with the given weights.

        Args:
            weights: Weights of the model, [num_parameters] float32.
            statistics: Moving statistics of the model, [m] float32; None to keep the present
                statistics.
        """

        def assign() -> None:
            self._shared.assign(weights)
            if statistics is not None:
                self._statistics.assign(statistics)

        return self._evaluator.evaluate(assign)

    def save(self, path: pathlib.Path) -> None:
        """Write the model that was evaluated last to a .keras file, atomically."""
        temporary = path.with_suffix(".tmp.keras")
        try:
            with naming(path):
                self._shared.model.save(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
