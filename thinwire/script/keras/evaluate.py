"""A script in the evaluator's role: `fit` never trains, but evaluates the run's central model.

The script is the workers', so its validation data and its compiled metrics are theirs. Within a
`fit` the evaluator serves the requests of the workers at the ends of their epochs, and evaluates
now and then in between. It goes on behind a `fit` when the workers have begun the next one; the end
of the run is the end of the process, so nothing of what follows the last `fit` is done here.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import keras
from absl import logging
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import decode_metrics, encode_metrics
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.settings import END_REASONS, EXIT_DONE
from thinwire.script.data.arrays import are_arrays, cut_off_validation
from thinwire.script.keras.data_errors import refusing_unfit
from thinwire.script.keras.evaluated_weights import EvaluatedWeights
from thinwire.script.keras.plan import is_built, try_in_graph
from thinwire.script.keras.reports import fill_history
from thinwire.script.keras.saving import is_own_file
from thinwire.supervisor.evaluation_requests import EvaluationRequests
from thinwire.worker.temporary import remove_temporary

if TYPE_CHECKING:
    from thinwire.runtime.run.settings import Run

#: Of one processor's time that evaluations in between may take.
_SHARE = 0.05
#: After the first one, most of whose time went into tracing.
_FIRST_PAUSE_SECONDS = 5.0
_LOOK_SECONDS = 0.5
#: What would write a file of the model.
_WRITERS = ("save", "save_weights", "export")


def evaluate_fit(model: keras.Model, run: Run) -> None:
    """Let a model's `fit` evaluate; nothing of the model is saved.

    Args:
        model: Compiled before or after this call.
        run: The run's settings.
    """
    report_arrival(run)
    evaluator = FitEvaluator(model, run, _requests_of, _end_process, _SCRIPT)
    signature = inspect.signature(keras.Model.fit)

    def fit(*args: Any, **keywords: Any) -> Any:
        with refusing_unfit(model):
            return evaluator.fit(dict(signature.bind(model, *args, **keywords).arguments))

    model.fit = fit
    model.train_on_batch = _after_waiting(model.train_on_batch, run)
    for name in _WRITERS:
        setattr(model, name, _own_only(getattr(model, name)))


def report_arrival(run: Run) -> None:
    """Let shard 0 know, by this process' stream, that it has come to `distribute`.

    Nobody trains before that; see `thinwire.ps.scripts.first_evaluator`.
    """
    _requests_of(run)


def skip_steps(optimizer: Any, run: Run) -> None:
    """Let a distributed optimizer of a loop step nothing, and hold the loop while it is not needed.

    What follows the loop in the script would otherwise be done at the start of the run, with a
    model that nobody has trained.
    """
    optimizer.apply = _after_waiting(lambda *given, **named: None, run)


def _after_waiting(alone: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Let a step wait until a worker has begun a `fit` with validation data, behind the loop."""

    @functools.wraps(alone)
    def step(*args: Any, **keywords: Any) -> Any:
        requests = _requests_of(run)
        while not requests.has_validation:
            num_news = requests.num_news
            if requests.halt_cause:
                requests.close()
                _end_process()
            requests.wait(_LOOK_SECONDS, num_news)
        return alone(*args, **keywords)

    return step


def _own_only(alone: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of a model write temporary files alone, which no worker has."""

    @functools.wraps(alone)
    def write(filepath: Any, *args: Any, **keywords: Any) -> Any:
        return alone(filepath, *args, **keywords) if is_own_file(filepath) else None

    return write


class ValidationSet:
    """The validation data of one `fit`, or the part that its `validation_split` cuts off."""

    def __init__(self, model: keras.Model, arguments: dict[str, Any]) -> None:
        """Take the arguments of Keras' fit; the model has variables."""
        x, y, sample_weight = unpack_x_y_sample_weight(arguments["validation_data"])
        batch_size = arguments.get("validation_batch_size") or arguments.get("batch_size")
        steps = arguments.get("validation_steps")
        data = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        self._model, self._keywords = model, data | {"steps": steps}
        #: Whether each evaluation is of the same rows, so that more of them do no harm.
        self.is_repeatable = steps is None and not isinstance(x, types.GeneratorType)
        # As Keras' fit makes it, once for all epochs.
        self._iterator = TFEpochIterator(
            **data,
            steps_per_epoch=steps,
            shuffle=False,
            distribute_strategy=model.distribute_strategy,
            steps_per_execution=model.steps_per_execution,
        )

    def evaluate(self) -> list[pb.Metric]:
        """Return the model's metrics at its present weights."""
        self._model._eval_epoch_iterator = self._iterator
        logs = self._model.evaluate(
            **self._keywords, verbose=0, return_dict=True, _use_cached_eval_dataset=True
        )
        return encode_metrics(logs)


#: The stream of requests, one for all models of the process.
_REQUESTS: list[EvaluationRequests] = []


def _requests_of(run: Run) -> EvaluationRequests:
    if not _REQUESTS:
        _REQUESTS.append(EvaluationRequests(run))
    return _REQUESTS[0]


def _end_process() -> NoReturn:
    """End without what the script has for its end, which would be the workers' affair."""
    remove_temporary()
    logging.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_DONE)


class ScriptFits:
    """What the evaluators of a script's models have in common.

    Attributes:
        num_fits: Calls of `fit` so far, of all models.
        newest: Of the model whose `fit` was called last; None: there was none.
        missing: By identity, variables that an earlier `fit` has trained, whose values are unknown.
    """

    def __init__(self) -> None:
        self.num_fits = 0
        self.newest: FitEvaluator | None = None
        self.missing: dict[int, Any] = {}


_SCRIPT = ScriptFits()


class FitEvaluator:
    """Evaluates in the place of a model's `fit`.

    Args:
        model: Compiled before its first `fit`.
        run: The run's settings.
        requests: Returns the stream of requests of a run, when it is needed.
        end_process: Called at the end of the run.
        script: That trains the model, beside others.
    """

    def __init__(
        self,
        model: keras.Model,
        run: Run,
        requests: Callable[[Run], EvaluationRequests],
        end_process: Callable[[], NoReturn],
        script: ScriptFits,
    ) -> None:
        self.model, self._run, self._script = model, run, script
        self._requests_of, self._end_process = requests, end_process
        self._num_fits = 0  # of the script, when this model's newest began
        self._weights: EvaluatedWeights | None = None  # of the newest `fit`
        self._validation: ValidationSet | None = None  # of the newest `fit` that has any
        self._fit_of_validation = 0
        self._last: pb.Evaluated | None = None
        self._last_values: tuple[int, ...] = ()  # that it is of, by their checksums
        self._swaps_averages = False  # for evaluations, as SwapEMAWeights does
        self._free_at = 0.0  # when the next evaluation in between is due

    @property
    def requests(self) -> EvaluationRequests:
        """The stream of requests, from the first `fit` on."""
        return self._requests_of(self._run)

    def fit(self, arguments: dict[str, Any]) -> keras.callbacks.History:
        """Evaluate until the workers begin another `fit`; at the end of the run end the process.

        Args:
            arguments: Of Keras' fit, by name.

        Returns:
            What the first worker's fit has returned, as far as it was reported.

        Raises:
            Unreachable, RequestRejected: The PS is gone for good, or rejects this evaluator.
            ConfigurationError: The model is not the workers'.
        """
        script, before = self._script, self._script.newest
        if before is not None and before is not self:
            before.close()
        script.newest, script.num_fits = self, script.num_fits + 1
        self._num_fits = script.num_fits
        number, requests, is_ready, has_ended = self._num_fits, self.requests, False, False
        while requests.newest_fit <= number:
            num_news = requests.num_news
            if not is_ready and (begun := requests.fit(number)) is not None:
                is_ready = True
                self._begin(arguments, begun)
            if requests.halt_cause:
                self._finish()
            if is_ready and (place := requests.take(number)) is not None:
                self._answer(*place)
                continue
            if is_ready and not has_ended and requests.history(number) is not None:
                has_ended = True
                self._take_weights()
            if is_ready and not has_ended and self._is_due():
                self._evaluate(pb.Evaluated(fit=number))
            requests.wait(_LOOK_SECONDS, num_news)
        if (begun := requests.fit(number)) is not None:
            if not is_ready:
                self._begin(arguments, begun)
            self._keep_weights()
        return self._history(number)

    def close(self) -> None:
        """End the streams of the central model."""
        if self._weights is not None:
            self._weights.close()

    def _keep_weights(self) -> None:
        """Take what a `fit` has ended with: later ones may not share all of it any more."""
        try:
            self._take_weights()
        except RequestRejected as error:
            if error.reason != pb.REASON_PHASE:
                raise
            if self._weights is not None:
                self._script.missing |= {id(each): each for each in self._weights.shared}

    def _begin(self, arguments: dict[str, Any], begun: pb.FitBegun) -> None:
        """Prepare for the evaluations of a `fit`."""
        given = dict(arguments)
        if are_arrays((given.get("x"), given.get("y"), given.get("sample_weight"))):
            cut_off_validation(given)
        _build(self.model, given)
        self.close()
        weights = EvaluatedWeights(self.model, self._run, self.requests.run_id, begun)
        self._weights, self._last = weights, None
        for each in weights.shared:
            self._script.missing.pop(id(each), None)
        self._swaps_averages = self._has_averages(given.get("callbacks"))
        if given.get("validation_data") is not None:
            self._validation = ValidationSet(self.model, given)
            self._fit_of_validation = begun.fit
        logging.info("evaluating fit %d", begun.fit)

    def _answer(self, fit: int, epoch: int) -> None:
        """Answer a request."""
        answer = pb.Evaluated(fit=fit, epoch=epoch, answers=True)
        if fit != self._num_fits:
            answer.nobody = f"the evaluator has come to fit {self._num_fits} already"
        elif self._validation is None or self._fit_of_validation != fit:
            answer.nobody = (
                "the script gives fit no validation data in the evaluator, where "
                "thinwire.is_chief() is false"
            )
        if answer.nobody:
            self.requests.report(answer)
        else:
            self._evaluate(answer)

    def _is_due(self) -> bool:
        """Return whether there is time for an evaluation in between, of a model that has moved."""
        if self._validation is None or self._fit_of_validation != self._num_fits:
            return False
        if not self._validation.is_repeatable or self.requests.is_by_script(self._num_fits):
            return False
        newest = self._last.versions[0] if self._last is not None else -1
        return time.monotonic() >= self._free_at and self.requests.version > newest

    def _evaluate(self, evaluated: pb.Evaluated) -> None:
        """Evaluate the central model as it is now, and report that."""
        began, spent = time.monotonic(), time.process_time()
        missing = self._script.missing
        lost = [each.path for each in self.model.variables if id(each) in missing]
        if lost:
            if evaluated.answers:
                evaluated.nobody = (
                    f"the evaluator came too late for what an earlier fit has made of "
                    f"{min(lost)}, which is not shared any more"
                )
                self.requests.report(evaluated)
            return
        versions, values = self._take_weights(self._swaps_averages)
        last, validation = self._last, self._validation
        if validation is None:
            return
        is_known = last is not None and values == self._last_values
        metrics = last.metrics if last is not None and is_known else validation.evaluate()
        evaluated.versions.extend(versions)
        evaluated.metrics.extend(metrics)
        self._last, self._last_values = evaluated, values
        self.requests.report(evaluated)
        now = time.monotonic()
        cost = max(time.process_time() - spent, now - began)
        if not is_known:
            self._free_at = now + (_FIRST_PAUSE_SECONDS if last is None else cost / _SHARE)

    def _has_averages(self, callbacks: Any) -> bool:
        """Return whether a callback swaps the weights' moving averages in, and a PS has these."""
        found = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
        given = keras.tree.flatten(callbacks or []) if found is None else found
        if not any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in given):
            return False
        if not self._run.method.steps_on_workers:
            return True
        logging.warning(
            "SwapEMAWeights: with --method=%s each worker has moving averages of its own, so the "
            "central weights are evaluated as they are",
            self._run.method.name,
        )
        return False

    def _take_weights(self, averages: bool = False) -> tuple[list[int], tuple[int, ...]]:
        """Give the model the central weights, once there are some; see `EvaluatedWeights.take`."""
        return ([], ()) if self._weights is None else self._weights.take(averages)

    def _history(self, number: int) -> keras.callbacks.History:
        history = keras.callbacks.History()
        history.set_model(self.model)
        history.on_train_begin()
        fill_history(history, self.requests.history(number) or "")
        self.model.history = history
        return history

    def _finish(self) -> NoReturn:
        """Evaluate what the run ended with, and end the process."""
        requests = self.requests
        is_by_script = requests.is_by_script(self._fit_of_validation)
        has_to = self._validation is not None and not is_by_script
        if requests.halt_cause in END_REASONS and has_to:
            self._evaluate(pb.Evaluated(fit=self._fit_of_validation, final=True))
            if self._last is not None:
                logging.info("final metrics: %s", decode_metrics(self._last.metrics))
        self.close()
        requests.close()
        self._end_process()


def _build(model: Any, arguments: dict[str, Any]) -> None:
    """Let a first batch create the variables of a model that has none yet."""
    if is_built(model):
        return
    names = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
    iterator = TFEpochIterator(
        **{name: arguments.get(name) for name in names},
        shuffle=False,
        distribute_strategy=model.distribute_strategy,
        steps_per_execution=1,
    )
    try_in_graph(model.train_step, iterator._distributed_dataset.element_spec)
