"""Wraps Keras' `fit`: selects this worker's part of the data, joins the run and leaves it."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import keras
from absl import logging

from thinwire.script.backends.present import backend
from thinwire.script.keras.data_errors import refusing_unfit
from thinwire.script.keras.files import listed, writing_once
from thinwire.script.keras.fit_lifecycle import FitLifecycle

if TYPE_CHECKING:
    from thinwire.script.keras.session import ModelSession


class EpochEnd(keras.callbacks.Callback):
    """Last callback of a `fit`, which agrees with the other workers' scripts on an early end."""

    def __init__(self, session: ModelSession) -> None:
        """Store the model's session with the servers (``model.thinwire``)."""
        super().__init__()
        self._session = session

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End `fit` after the same epoch as the scripts of the other workers."""
        self._session.fits.end_epoch()


def surround_fit(model: keras.Model, session: ModelSession) -> None:
    """Patch a model's `fit`, `evaluate`, `train_step` and `train_on_batch` to train in a run.

    The patched methods are attributes of the model object; the model's class and configuration do
    not change.

    Args:
        model: Keras model that the script trains.
        session: Session of the model with the servers (``model.thinwire``).
    """
    alone, evaluate_alone = model.fit, model.evaluate
    signature = _signature(alone)

    @functools.wraps(alone)
    def fit(*args: Any, **keywords: Any) -> Any:
        if model.built and not model.trainable_variables:
            return fit_without_weights(*args, **keywords)
        options = _named(signature.bind(*args, **keywords))
        callbacks = _listed(options.get("callbacks"))
        written = writing_once(callbacks, lambda: session.writes_files)
        with refusing_unfit(model), session.fits.running(options) as arguments, written:
            arguments["callbacks"] = _between(
                session.fits, options.get("callbacks"), EpochEnd(session)
            )
            history = alone(**arguments)
        session.evaluations.report_history(history)
        return history

    def fit_without_weights(*args: Any, **keywords: Any) -> Any:
        """Call Keras' own fit for a model without trainable weights, which needs no exchange."""
        logging.warning(
            "model %r has no trainable weights: its fit exchanges no updates with the PS and runs "
            "on each worker with all of the data",
            model.name,
        )
        patched = {name: vars(model)[name] for name in originals}
        vars(model).update(originals, train_function=None)
        try:
            return alone(*args, **keywords)
        finally:
            vars(model).update(patched, train_function=None)

    @functools.wraps(evaluate_alone)
    def evaluate(*args: Any, **keywords: Any) -> Any:
        if keywords.get("_use_cached_eval_dataset") and session.evaluations.is_elsewhere:
            return session.evaluations.evaluate(evaluate_alone, keywords)
        try:
            with session.evaluations.evaluating():
                return evaluate_alone(*args, **keywords)
        finally:
            session.fits.keep_metrics()

    results = model._get_metrics_result_or_logs
    originals = {
        "evaluate": evaluate_alone,
        "_get_metrics_result_or_logs": results,
    }

    @functools.wraps(results)
    def results_of_all(logs: Any) -> Any:
        is_of_epoch = session.fits.merge_metrics(logs)
        present = results(logs)
        if not is_of_epoch or present is None:
            return present
        return session.fits.metrics.complete(present, are_results=present is not logs)

    trains_on_batch = model.train_on_batch

    @functools.wraps(trains_on_batch)
    def train_on_batch(*args: Any, **keywords: Any) -> Any:
        with session.loop.on_batch():
            return trains_on_batch(*args, **keywords)

    model.fit, model.evaluate = fit, evaluate
    originals |= backend().surround_steps(model, session)
    model.train_on_batch, model._get_metrics_result_or_logs = train_on_batch, results_of_all
    # a train_function from an earlier `fit` would bypass the patched train_step
    model.train_function = None


def _signature(alone: Any) -> inspect.Signature:
    """Return the signature of a model's `fit`, or of Keras' fit if `alone` has *args."""
    signature = inspect.signature(alone)
    if any(item.kind is item.VAR_POSITIONAL for item in signature.parameters.values()):
        parameters = list(inspect.signature(keras.Model.fit).parameters.values())[1:]
        return signature.replace(parameters=parameters)
    return signature


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def _listed(callbacks: Any) -> list[Any]:
    """Return the callbacks of the script as a list, without Thinwire's own callbacks."""
    return [item for item in listed(callbacks) if not isinstance(item, FitLifecycle | EpochEnd)]


def _between(first: FitLifecycle, others: Any, last: EpochEnd) -> Any:
    """Return `first`, the script's callbacks and `last` as one list or CallbackList."""
    if isinstance(others, keras.callbacks.CallbackList):
        others.callbacks[:] = [first, *_listed(others), last]
        for callback in (first, last):
            callback.set_model(others.model)
            callback.set_params(others.params)
        return others
    return [first, *_listed(others), last]
