"""Evaluates validation data in a distributed `fit`, in the Supervisor's evaluator or one worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from absl import logging

from thinwire.models.flat_model import moving_statistics
from thinwire.proto.evaluations import decode_metrics
from thinwire.script.keras.central import lent, refresh_averages
from thinwire.script.keras.files import listed
from thinwire.script.keras.own_states import OwnStates, reads_optimizer
from thinwire.script.keras.reports import describe_fit, describe_history
from thinwire.script.keras.run_member import RunMember
from thinwire.worker.client.control import RunHalted

#: Packages of known callbacks. Of the values that an evaluation reads, callbacks from these
#: packages change only weights that all workers share.
_KNOWN_CALLBACKS = ("keras.", "thinwire.")


def _is_of_script(callback: Any) -> bool:
    """Return True if a callback is the script's own and may change values that evaluations read.

    For example, a script's callback may set a variable or an attribute of the loss, or put other
    weights into the model.
    """
    is_known = type(callback).__module__.startswith(_KNOWN_CALLBACKS)
    # A LambdaCallback stores the script's functions as attributes of the instance.
    has_own = any(name.startswith("on_") for name in vars(callback))
    return not is_known or has_own


class FitEvaluations:
    """Evaluates the validation data within a model's calls of `fit`.

    Args:
        member: Membership of the model in a run.

    Attributes:
        validates: True if the current `fit` has validation data, from the argument
            `validation_data` or `validation_split`.
        is_evaluating: True while Keras' `evaluate` is running.
    """

    def __init__(self, member: RunMember) -> None:
        self.validates = self.is_evaluating = False
        self._member = member
        self._states = OwnStates()
        self._swaps: list[keras.callbacks.SwapEMAWeights] = []
        # True if only a worker, not the evaluator, has values that an evaluation reads
        self._by_script = False

    def begin_fit(self, arguments: dict[str, Any]) -> None:
        """Find out whether a `fit` has validation data, and whether a worker must evaluate it.

        Args:
            arguments: Arguments of the call of Keras' `fit`, by name.
        """
        is_given = arguments.get("validation_data") is not None
        self.validates = is_given or bool(arguments.get("validation_split"))
        callbacks = listed(arguments.get("callbacks"))
        self._swaps = [
            item for item in callbacks if isinstance(item, keras.callbacks.SwapEMAWeights)
        ]
        # this flag remains True in later calls of `fit`, because changes by callbacks persist
        self._by_script = (
            self._by_script
            or any(map(_is_of_script, callbacks))
            or reads_optimizer(self._member.model)
        )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Mark that Keras' `evaluate` runs, so that its metrics are not merged over the workers."""
        before, self.is_evaluating = self.is_evaluating, True
        try:
            yield
        finally:
            self.is_evaluating = before

    @property
    def is_elsewhere(self) -> bool:
        """True if `fit` receives validation metrics from the run instead of computing them."""
        member = self._member
        is_launched = member.settings is not None and member.settings.is_launched
        return is_launched and member.in_fit and member.takes_part

    def begin_test(self) -> None:
        """Load the weights' averages, which SwapEMAWeights uses, if this process evaluates."""
        if self._swaps and (self.is_evaluating or not self.is_elsewhere):
            refresh_averages(self._member)

    def end_epoch(self) -> None:
        """Load the weights' averages if SwapEMAWeights uses them at the end of an epoch."""
        if any(swap.swap_on_epoch for swap in self._swaps):
            refresh_averages(self._member)

    def evaluate(self, alone: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        """Return the metrics of the validation data at the end of the current epoch.

        One process evaluates the run's weights on validation data, and all workers wait for its
        metrics. Usually the evaluator process of the Supervisor evaluates the validation data. The
        evaluator runs no callbacks and does not train, so the run's weights are all that it gets
        from the workers. If callbacks or training may change values other than the run's weights, a
        worker evaluates, with its callbacks. If no process can evaluate the validation data, no
        metrics are returned. If the run has ended, this worker evaluates its own weights on the
        validation data.

        Args:
            alone: Keras' own `evaluate`, which runs on this worker only.
            keywords: Keyword arguments that `fit` passes to `evaluate`.
        """
        member = self._member
        barriers, epoch = member.met_barriers, member.epoch
        try:
            answer = barriers.evaluate(epoch, self._is_by_script())
        except RunHalted as ended:
            member.take_end(ended)
            with self.evaluating():
                return alone(**keywords)
        if answer is None:
            with lent(member), self.evaluating():
                metrics = alone(**keywords)
            versions = member.joined.part.core.versions
            answer = member.until_end(lambda: barriers.answer(epoch, versions, metrics))
            return metrics if answer is None else decode_metrics(answer.metrics)
        logs = decode_metrics(answer.metrics)
        callbacks = keywords["callbacks"]
        callbacks.on_test_begin()
        callbacks.on_test_end(logs)
        return logs

    def _is_by_script(self) -> bool:
        """Return True if an evaluation depends on values that only a worker's process has."""
        if not self._by_script and (changed := self._states.changed(self._shared())):
            self._by_script = True
            if self._member.is_chief:
                logging.info(
                    "training changes %s and %d more variables that the workers do not share: the "
                    "chief (first worker) evaluates the model instead of the evaluator process",
                    changed[0],
                    len(changed) - 1,
                )
        return self._by_script

    def _shared(self) -> list[Any]:
        """Return the weights and moving statistics that the evaluator loads from the shards."""
        session, model = self._member.joined, self._member.model
        averaged = moving_statistics(model) if session.settings.run.method.bn_sync else []
        return [*session.shared.variables, *averaged]

    def report_fit(self) -> None:
        """Report to shard 0, for the Supervisor's evaluator, that a `fit` has begun."""
        member, session = self._member, self._member.session
        is_first = not self._states.has_begun
        has_to = (self.validates or is_first) and self.is_elsewhere and not self._by_script
        if session is not None and has_to:
            self._states.begin(self._member.model, self._shared())
        if session is not None and member.barriers is not None and member.takes_part:
            layouts = session.part.core.layouts
            fit = describe_fit(member.model, session.shared.variables, layouts)
            fit.validates, fit.phase = self.validates, session.phase
            fit.by_script = self._by_script
            member.barriers.begin_fit(fit)

    def report_history(self, history: Any) -> None:
        """Report the Keras History that `fit` returns to shard 0, for the evaluator."""
        member = self._member
        # If the script overrides `fit`, its result may be no Keras History, and is then not
        # reported.
        is_known = isinstance(history, keras.callbacks.History)
        if member.barriers is not None and not member.stopped and is_known:
            member.barriers.end_fit(describe_history(history))
