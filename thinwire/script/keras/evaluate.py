"""Runs a script as the evaluator: `fit` does not train, but evaluates the shards' weights.

The evaluator runs the same script as the workers, so it has the same validation data and compiled
metrics. Within a `fit` the evaluator answers the workers' requests for evaluations at the ends of
epochs, and evaluates weights between requests, too. The evaluator's `fit` returns when the workers
begin their next call of `fit`. The evaluator's process ends with the run, so it never executes the
script's code after the last `fit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
import types
from typing import TYPE_CHECKING, Any, NoReturn

import keras
from absl import logging
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import decode_metrics, encode_metrics
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.settings import END_REASONS
from thinwire.script.backends.present import backend
from thinwire.script.data.arrays import are_arrays, cut_off_validation
from thinwire.script.data.place import WorkerPlace
from thinwire.script.data.ray_data import is_ray_dataset, share_ray_dataset
from thinwire.script.evaluator_script import (
    LOOK_SECONDS,
    EvaluatorScript,
    after_waiting,
    script_of,
)
from thinwire.script.keras.data_errors import refusing_unfit
from thinwire.script.keras.files import listed, save_once
from thinwire.script.keras.plan import is_built
from thinwire.script.keras.reports import EvaluatedWeights, fill_history

if TYPE_CHECKING:
    from thinwire.runtime.run.settings import Run

#: Fraction of one processor's time that evaluations without a worker's request may use.
_SHARE = 0.05
#: Pause after an evaluator's first evaluation, in seconds. Tracing takes most of the first
#: evaluation's time, so this time does not predict the time of the next evaluation.
_FIRST_PAUSE_SECONDS = 5.0


def evaluate_fit(model: keras.Model, run: Run) -> None:
    """Patch a model for the evaluator: `fit` evaluates, and saving writes only temporary files.

    Args:
        model: Keras model, which the script compiles before or after the call of `evaluate_fit`.
        run: Settings of the training run.
    """
    script = script_of(run)
    evaluator = FitEvaluator(model, script)
    signature = inspect.signature(keras.Model.fit)

    def fit(*args: Any, **keywords: Any) -> Any:
        with refusing_unfit(model):
            return evaluator.fit(dict(signature.bind(model, *args, **keywords).arguments))

    model.fit = fit
    model.train_on_batch = after_waiting(model.train_on_batch, script)
    save_once(model, contextlib.nullcontext)  # only temporary files, which no worker writes


def skip_steps(optimizer: Any, run: Run) -> None:
    """Patch the optimizer of a training loop in the evaluator so that its steps only wait.

    In the evaluator, an optimizer's step waits until a worker has begun a `fit` with validation
    data. If the optimizer's steps did not wait, the evaluator would run through the loop, and then
    execute the rest of the script, with an untrained model.
    """
    optimizer.apply = after_waiting(lambda *given, **named: None, script_of(run))


class ValidationSet:
    """Validation data of a `fit`, from the argument `validation_data` or `validation_split`.

    Attributes:
        is_repeatable: True if each evaluation reads the same validation rows. If False, an
            evaluation without a worker's request would consume rows that the requested evaluations
            need.
        fit: Number of the call of `fit`, counted over all models of the script.
    """

    def __init__(self, model: keras.Model, arguments: dict[str, Any], fit: int) -> None:
        """Prepare an iterator over the validation data of one call of `fit`.

        Args:
            model: Built Keras model that is evaluated.
            arguments: Arguments of the call of Keras' `fit`, by name.
            fit: Number of the call of `fit`.
        """
        self.fit = fit
        x, y, sample_weight = unpack_x_y_sample_weight(arguments["validation_data"])
        batch_size = arguments.get("validation_batch_size") or arguments.get("batch_size")
        steps = arguments.get("validation_steps")
        data = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        self._model, self._keywords = model, data | {"steps": steps}
        self.is_repeatable = steps is None and not isinstance(x, types.GeneratorType)
        # One iterator serves all evaluations, as Keras' fit has one validation iterator for all
        # epochs.
        self._iterator = backend().evaluation_iterator(model, data, steps)

    def evaluate(self) -> list[pb.Metric]:
        """Return the metrics of the model's current weights on the validation data."""
        self._model._eval_epoch_iterator = self._iterator
        logs = self._model.evaluate(
            **self._keywords, verbose=0, return_dict=True, _use_cached_eval_dataset=True
        )
        return encode_metrics(logs)


class FitEvaluator:
    """Evaluates the shards' weights whenever the script calls a model's `fit`, but does not train.

    Args:
        model: Keras model, compiled before its first `fit`.
        script: Values that the evaluators of all models of the script share.
    """

    def __init__(self, model: keras.Model, script: EvaluatorScript) -> None:
        self.model, self._script, self._run = model, script, script.run
        self._requests = script.requests
        # Object that fetches the weights of the newest `fit`; None before the first `fit`.
        self._weights: EvaluatedWeights | None = None
        # Validation data of the newest `fit` that has any; None before such a `fit`.
        self._validation: ValidationSet | None = None
        # Newest evaluation of this model; None before the first evaluation of a `fit`.
        self._last: pb.Evaluated | None = None
        # checksums of the weights of the evaluation `_last`
        self._last_values: tuple[int, ...] = ()
        self._swaps_averages = False  # True if the script's callbacks include SwapEMAWeights
        # time of time.monotonic() at which the next evaluation without a request is due
        self._free_at = 0.0

    def fit(self, arguments: dict[str, Any]) -> keras.callbacks.History:
        """Evaluate weights until the workers begin another `fit`; end this process with the run.

        Args:
            arguments: Arguments of the call of Keras' `fit`, by name.

        Returns:
            Keras History of the first worker's fit; empty if that worker has not reported one.

        Raises:
            Unreachable: The parameter server (PS) cannot be reached.
            RequestRejected: The PS rejects the request of this evaluator.
            ConfigurationError: The evaluator's model differs from the workers' model.
        """
        script, before = self._script, self._script.newest
        if before is not None and before is not self:
            before.close()
        script.newest, script.num_fits = self, script.num_fits + 1
        number, requests, is_ready, has_ended = script.num_fits, self._requests, False, False
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
            requests.wait(LOOK_SECONDS, num_news)
        if (begun := requests.fit(number)) is not None:
            if not is_ready:
                self._begin(arguments, begun)
            self._keep_weights()
        history = keras.callbacks.History()
        history.set_model(self.model)
        history.on_train_begin()
        fill_history(history, requests.history(number) or "")
        self.model.history = history
        return history

    def close(self) -> None:
        """Close the streams by which the evaluator fetches weights from the shards."""
        if self._weights is not None:
            self._weights.close()

    def _keep_weights(self) -> None:
        """Load the final weights of a `fit`, because the next `fit` may share fewer variables."""
        try:
            self._take_weights()
        except RequestRejected as error:
            if error.reason != pb.REASON_PHASE:
                raise
            if self._weights is not None:
                self._script.missing |= {id(var): var for var in self._weights.shared}

    def _begin(self, arguments: dict[str, Any], begun: pb.FitBegun) -> None:
        """Prepare the evaluations of a `fit`: build the model and split off validation data.

        Args:
            arguments: Arguments of the call of Keras' `fit`, by name.
            begun: Message from the workers which reports that the `fit` has begun.
        """
        options = dict(arguments)
        if is_ray_dataset(options.get("x")):  # Keras reads no columns of Ray, but builds the model
            alone = dataclasses.replace(WorkerPlace.of(self._run, 1), shard="off")
            options = dict(share_ray_dataset(options, alone).arguments)
        if are_arrays((options.get("x"), options.get("y"), options.get("sample_weight"))):
            cut_off_validation(options)
        _build(self.model, options)
        self.close()
        weights = EvaluatedWeights(self.model, self._run, self._requests.run_id, begun)
        self._weights, self._last = weights, None
        for variable in weights.shared:
            self._script.missing.pop(id(variable), None)
        self._swaps_averages = self._has_averages(options.get("callbacks"))
        if options.get("validation_data") is not None:
            self._validation = ValidationSet(self.model, options, begun.fit)
        logging.info("evaluating fit %d", begun.fit)

    def _answer(self, fit: int, epoch: int) -> None:
        """Answer a worker's evaluation request with metrics, or with a reason if there are none."""
        answer = pb.Evaluated(fit=fit, epoch=epoch, answers=True)
        if fit != self._script.num_fits:
            answer.nobody = f"the evaluator is already in fit {self._script.num_fits}"
        elif self._validation is None or self._validation.fit != fit:
            answer.nobody = (
                "the script gives fit no validation data in the evaluator, where "
                "thinwire.is_chief() is false"
            )
        if answer.nobody:
            self._requests.report(answer)
        else:
            self._evaluate(answer)

    def _is_due(self) -> bool:
        """Return True if the shards' weights are new and the last evaluation is long enough ago."""
        validation = self._validation
        if validation is None or validation.fit != self._script.num_fits:
            return False
        if not validation.is_repeatable or self._requests.is_by_script(self._script.num_fits):
            return False
        newest = self._last.versions[0] if self._last is not None else -1
        return time.monotonic() >= self._free_at and self._requests.version > newest

    def _evaluate(self, evaluated: pb.Evaluated) -> None:
        """Evaluate the shards' current weights, and report the metrics to shard 0.

        Args:
            evaluated: Report to send to shard 0, to which the method adds the weights' versions and
                the metrics.
        """
        began, spent = time.monotonic(), time.process_time()
        missing = self._script.missing
        lost = [variable.path for variable in self.model.variables if id(variable) in missing]
        if lost:
            if evaluated.answers:
                evaluated.nobody = (
                    f"the evaluator does not have {min(lost)}: an earlier fit trained this "
                    "variable, the run does not share it any more, and the evaluator started too "
                    "late to load its final value"
                )
                self._requests.report(evaluated)
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
        self._requests.report(evaluated)
        now = time.monotonic()
        cost = max(time.process_time() - spent, now - began)
        if not is_known:
            self._free_at = now + (_FIRST_PAUSE_SECONDS if last is None else cost / _SHARE)

    def _has_averages(self, callbacks: Any) -> bool:
        """Return True if a callback is SwapEMAWeights and the PS keeps averages of the weights."""
        averaging = keras.callbacks.SwapEMAWeights
        if not any(isinstance(callback, averaging) for callback in listed(callbacks)):
            return False
        if not self._run.method.steps_on_workers:
            return True
        logging.warning(
            "SwapEMAWeights: with --method=%s each worker has its own moving averages of the "
            "weights; this evaluation uses the PS's weights instead of averages",
            self._run.method.name,
        )
        return False

    def _take_weights(self, averages: bool = False) -> tuple[list[int], tuple[int, ...]]:
        """Load the shards' weights, or their moving averages, into the model.

        Returns:
            The version of each shard, and checksums of the loaded weights. Before the first `fit`
            the model is unchanged and the versions and the checksums are empty.
        """
        return ([], ()) if self._weights is None else self._weights.take(averages)

    def _finish(self) -> NoReturn:
        """Evaluate the run's final weights, report their metrics, and end the process."""
        requests, validation = self._requests, self._validation
        has_ended = requests.halt_cause in END_REASONS
        if validation is not None and has_ended and not requests.is_by_script(validation.fit):
            self._evaluate(pb.Evaluated(fit=validation.fit, final=True))
            if self._last is not None:
                logging.info("final metrics: %s", decode_metrics(self._last.metrics))
        self.close()
        requests.close()
        self._script.end()


def _build(model: Any, arguments: dict[str, Any]) -> None:
    """Build an unbuilt model with the shapes of the training data.

    Args:
        model: Keras model that the script trains.
        arguments: Arguments of the call of Keras' `fit`, by name.
    """
    if is_built(model):
        return
    names = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
    backend().build_for_fit(model, model.train_step, {name: arguments.get(name) for name in names})
