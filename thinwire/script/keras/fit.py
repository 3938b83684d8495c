"""Keras' `fit`, surrounded: this worker's part of the data in, joining and leaving around it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
from absl import logging

from thinwire.script.keras.data_errors import refusing_unfit
from thinwire.script.keras.files import listed, writing_once

if TYPE_CHECKING:
    from thinwire.script.keras.session import ModelSession


class FitCallback(keras.callbacks.Callback):
    """The first of a `fit`'s callbacks: joins before the others begin, leaves before they end.

    It overrides no `on_train_batch_end`, so Keras may still run the others' in another thread.
    """

    def __init__(self, session: ModelSession, others: Sequence[Any] = ()) -> None:
        """Do nothing yet.

        Args:
            session: Of the model.
            others: The script's callbacks.
        """
        super().__init__()
        self._session = session
        swaps = [each for each in others if isinstance(each, keras.callbacks.SwapEMAWeights)]
        self._swaps, self._swaps_at_end = bool(swaps), any(each.swap_on_epoch for each in swaps)

    def on_train_begin(self, logs: Any = None) -> None:
        """Join, where that is possible before the first step."""
        del logs
        self._session.fits.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        del logs
        self._session.fits.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count, and end `fit` with what went wrong in the batch before."""
        del batch, logs
        self._session.fits.begin_batch()

    def on_test_begin(self, logs: Any = None) -> None:
        """Have the averages that SwapEMAWeights puts in, where this process evaluates."""
        del logs
        if self._swaps and self._session.evaluations.takes_averages:
            self._session.central.refresh_averages()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End `fit` with what went wrong in the last batch; wait for those that have another."""
        del epoch, logs
        self._session.fits.end_steps()
        if self._swaps_at_end:
            self._session.central.refresh_averages()

    def on_train_end(self, logs: Any = None) -> None:
        """Leave; from here on the model has the final weights."""
        del logs
        self._session.fits.leave()


class EpochEnd(keras.callbacks.Callback):
    """The last of a `fit`'s callbacks: agrees with the other scripts on an early end."""

    def __init__(self, session: ModelSession) -> None:
        """Do nothing yet."""
        super().__init__()
        self._session = session

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End `fit` after the same epoch as the other scripts."""
        del epoch, logs
        self._session.fits.end_epoch()


def surround_fit(model: keras.Model, session: ModelSession) -> None:
    """Put `session` around a model's `fit`, into its `train_step` and into fit's `evaluate`.

    All are attributes of this one model; its class and its configuration stay as they are.
    """
    alone, evaluate_alone, train_step = model.fit, model.evaluate, model.train_step
    signature = _signature(alone)

    @functools.wraps(alone)
    def fit(*args: Any, **keywords: Any) -> Any:
        if model.built and not model.trainable_variables:
            return fit_without_weights(*args, **keywords)
        given = _named(signature.bind(*args, **keywords))
        others = _listed(given.get("callbacks"))
        written = writing_once(others, lambda: session.central.writes_files)
        with refusing_unfit(model), session.fits.running(given) as arguments, written:
            first, last = FitCallback(session, others), EpochEnd(session)
            arguments["callbacks"] = _between(first, given.get("callbacks"), last)
            history = alone(**arguments)
        session.evaluations.report_history(history)
        return history

    def fit_without_weights(*args: Any, **keywords: Any) -> Any:
        """Let Keras alone fit a model that has nothing to train, as it does with a warning."""
        logging.warning(
            "%r has no trainable weights: its fit exchanges nothing, and runs on each worker with "
            "all of the data",
            model.name,
        )
        surrounded = {name: vars(model)[name] for name in kept}
        vars(model).update(kept, train_function=None)
        try:
            return alone(*args, **keywords)
        finally:
            vars(model).update(surrounded, train_function=None)

    @functools.wraps(evaluate_alone)
    def evaluate(*args: Any, **keywords: Any) -> Any:
        is_of_fit = keywords.get("_use_cached_eval_dataset") and session.evaluations.is_elsewhere
        if is_of_fit:
            return session.fits.evaluate(evaluate_alone, keywords)
        try:
            with session.evaluations.evaluating():
                return evaluate_alone(*args, **keywords)
        finally:
            session.fits.keep_metrics()

    results = model._get_metrics_result_or_logs
    kept = {
        "train_step": train_step,
        "evaluate": evaluate_alone,
        "_get_metrics_result_or_logs": results,
    }

    @functools.wraps(results)
    def results_of_all(logs: Any) -> Any:
        is_of_epoch = session.fits.merge_metrics(logs)
        present = results(logs)
        if not is_of_epoch or present is None:
            return present
        return session.fits.complete_logs(present, are_results=present is not logs)

    @functools.wraps(train_step)
    def step(data: Any) -> Any:
        return session.train_step(data)

    trains_on_batch = model.train_on_batch

    @functools.wraps(trains_on_batch)
    def train_on_batch(*args: Any, **keywords: Any) -> Any:
        with session.loop.on_batch():
            return trains_on_batch(*args, **keywords)

    model.fit, model.evaluate, model.train_step = fit, evaluate, step
    model.train_on_batch, model._get_metrics_result_or_logs = train_on_batch, results_of_all
    model.train_function = None  # one of an earlier `fit` holds the old step


def _signature(alone: Any) -> inspect.Signature:
    """Return the signature by which arguments get their names: Keras' own if `alone`'s has none."""
    found = inspect.signature(alone)
    if any(each.kind is each.VAR_POSITIONAL for each in found.parameters.values()):
        parameters = list(inspect.signature(keras.Model.fit).parameters.values())[1:]
        return found.replace(parameters=parameters)
    return found


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def _listed(callbacks: Any) -> list[Any]:
    """Return the script's own callbacks."""
    return [each for each in listed(callbacks) if not isinstance(each, FitCallback | EpochEnd)]


def _between(first: FitCallback, others: Any, last: EpochEnd) -> Any:
    """Return callbacks in the form that `fit` takes, with one before and one after the script's."""
    if isinstance(others, keras.callbacks.CallbackList):
        others.callbacks[:] = [first, *_listed(others), last]
        for callback in (first, last):
            callback.set_model(others.model)
            callback.set_params(others.params)
        return others
    return [first, *_listed(others), last]
