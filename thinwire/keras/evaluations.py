"""What `fit` reports to the Supervisor, and takes over of what the Supervisor's evaluator finds."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from absl import logging

from thinwire.keras.reports import describe_fit, describe_history
from thinwire.keras.run_member import RunMember
from thinwire.models.flat_model import moving_statistics
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import decode_metrics


class FitEvaluations:
    """The evaluations of a model's calls of `fit`.

    Attributes:
        validates: Whether the present `fit` has validation data.
        is_evaluating: Whether Keras' evaluate is running.
    """

    def __init__(self, member: RunMember) -> None:
        self.validates = self.is_evaluating = False
        self._member = member
        self._checksums: dict[int, int] = {}  # by identity, of values that the run does not share
        self._has_own_states = False  # made by training, so that no evaluator knows them

    def begin_fit(self, arguments: dict[str, Any]) -> None:
        """Look at the arguments of Keras' fit for validation data."""
        is_given = arguments.get("validation_data") is not None
        self.validates = is_given or bool(arguments.get("validation_split"))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep what Keras' evaluate reads apart from the metrics of the training."""
        before, self.is_evaluating = self.is_evaluating, True
        try:
            yield
        finally:
            self.is_evaluating = before

    @property
    def is_elsewhere(self) -> bool:
        """Whether `fit` takes over what the Supervisor's evaluator finds, as all workers do."""
        member = self._member
        is_launched = member.settings is not None and member.settings.is_launched
        return is_launched and member.in_fit and member.takes_part

    def evaluate(self, epoch: int, alone: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        """Return the metrics of the validation data at the end of an epoch.

        The run's weights are evaluated once, by the Supervisor's evaluator, and all workers wait
        for that. Where nobody evaluates there are no metrics. Where the run has ended, or the model
        has states that the evaluator does not know, this worker evaluates its own.

        Args:
            epoch: As Keras counts them.
            alone: Keras' evaluate.
            keywords: Its arguments, as `fit` gives them.
        """
        barriers, callbacks = self._member.barriers, keywords["callbacks"]
        callbacks.on_test_begin()
        found = None if barriers is None else barriers.evaluate(epoch)
        if not isinstance(found, pb.Evaluated):
            self._member.take_end(found)
        if isinstance(found, pb.Evaluated) and not self._look_for_own_states():
            logs = decode_metrics(found.metrics)
        else:
            with self.evaluating():
                logs = alone(**keywords | {"callbacks": None, "verbose": 0})
        callbacks.on_test_end(logs)
        return logs

    def _look_for_own_states(self) -> bool:
        """Return whether training has changed values of the model that the run does not share."""
        if not self._has_own_states:
            now = self._sum_states()
            changed = [each for each, known in self._checksums.items() if now.get(each) != known]
            self._has_own_states = bool(changed)
            if changed:
                path = next(v.path for v in self._member.model.variables if id(v) == changed[0])
                logging.warning(
                    "training changes %s and %d more variables that no optimizer steps, which the "
                    "evaluator does not know: each worker evaluates its own model, and the "
                    "Supervisor's figures of validation are of initial values of these",
                    path,
                    len(changed) - 1,
                )
        return self._has_own_states

    def _sum_states(self) -> dict[int, int]:
        """Return checksums of what the model has beside the shared and the averaged variables."""
        session, model = self._member.joined, self._member.model
        averaged = moving_statistics(model) if session.settings.run.method.bn_sync else []
        shared = {id(each) for each in (*session.shared.variables, *averaged)}
        own = [each for each in model.non_trainable_weights if id(each) not in shared]
        return {id(each): zlib.crc32(np.array(each.numpy()).tobytes()) for each in own}

    def report_fit(self) -> None:
        """Report a `fit` of a run that has a Supervisor of ours."""
        member, session = self._member, self._member.session
        if session is not None and self.validates and not self._has_own_states:
            self._checksums = self._sum_states()
        if session is not None and member.barriers is not None and member.takes_part:
            layouts = session.part.core.layouts
            fit = describe_fit(member.model, session.shared.variables, layouts)
            fit.validates, fit.phase = self.validates, session.phase
            member.barriers.begin_fit(fit)

    def report_history(self, history: Any) -> None:
        """Report what `fit` has returned."""
        member = self._member
        is_known = isinstance(history, keras.callbacks.History)  # else of a fit of the script's own
        if member.barriers is not None and not member.stopped and is_known:
            member.barriers.end_fit(describe_history(history))
