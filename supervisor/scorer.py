"""Scores of a run's model, whose weights come from elsewhere, and a file of the best."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from thinwire.models.flat_model import FlatVariables, SharedModel
from thinwire.models.loss import ensure_compiled_loss
from thinwire.runtime.run.files import naming
from thinwire.runtime.run.settings import Run
from thinwire.runtime.run.target import Target
from thinwire.supervisor.evaluator import Evaluator

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class ModelScorer:
    """Evaluates a model on a test set.

    Args:
        run: The run's settings.
        shared: The model.
        images: [N, ...] test examples, as the model's task has them.
        labels: [N, ...] likewise.
    """

    def __init__(self, run: Run, shared: SharedModel, images: Any, labels: Any) -> None:
        self._shared = shared
        self.goal: Target = shared.task.goal
        """By which metric the best model is found."""
        self._statistics = FlatVariables(shared.statistics)
        loss = ensure_compiled_loss(shared.model, shared.task)
        extras = ("top5",) if run.top5 else ()
        self._evaluator = Evaluator(
            shared.model, loss, images, labels, run.batch_size, shared.task, extras=extras
        )

    def score(self, weights: Float32, statistics: Float32 | None) -> dict[str, float]:
        """Return the metrics on the whole test set.

        Args:
            weights: [num_parameters] float32.
            statistics: [m] float32 moving statistics; None leaves the model's as they are.
        """

        def assign() -> None:
            self._shared.assign(weights)
            if statistics is not None:
                self._statistics.assign(statistics)

        return self._evaluator.evaluate(assign)

    def save(self, path: pathlib.Path) -> None:
        """Write the model, as it was scored last, to a .keras file, which is never half written."""
        temporary = path.with_suffix(".tmp.keras")
        try:
            with naming(path):
                self._shared.model.save(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
