"""Merges the training metrics over the workers at the end of each epoch.

Each worker trains on its own rows, so its training metrics describe only these rows. Results of
metrics cannot be averaged over the workers: an AUC, a precision or an F1 score is not a mean over
rows. States of metrics (their variables) can be added up over the workers if each update adds an
amount that does not depend on the present state. The sum of the workers' metric states is the state
that one worker would have after all rows.

The states of Keras' own metrics can be added up over the workers. A metric of a class that is not
Keras' own is tested at its first update that changes its state: two more updates with the same
batch start from a reset copy of the state. The test of a metric runs eagerly, once: two more
updates in the graph would make its trace three times as long, and no later step would execute them.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras.src import backend
from keras.src.trainers.compile_utils import CompileMetrics

from thinwire.proto import thinwire_pb2 as pb
from thinwire.script.keras.own_states import OWN_PREFIX
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step_results import StepResults
from thinwire.script.keras.traces import call_with_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Largest total size of metric states in one message to shard 0, in bytes. A message has at most 1
#: MiB.
_MOST_BYTES = 900_000
#: Names of the attributes that every Keras metric has.
_OF_KERAS = frozenset(vars(keras.metrics.Metric(name="any")))
#: Difference, relative to a metric's state, up to which the amounts count as equal that two float32
#: updates with the same batch add.
_ROUNDING = 1e-4


class _Verdict(enum.IntEnum):
    """Result of the test whether the workers' states of a metric can be added up."""

    UNKNOWN = 0  # verdict on a metric whose state no update has changed yet
    ADDITIVE = 1  # verdict if each update adds an amount that is independent of the metric's state
    DEPENDENT = 2  # verdict if an update depends on the metric's state before the update


class TrainMetrics:
    """Merges the training metrics of one model over all workers.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
    """

    def __init__(self, member: RunMember) -> None:
        self._member = member
        # Maps the id of a metric to the metric and the tf.Variable with its `_Verdict`.
        self._verdicts: dict[int, tuple[Any, Any]] = {}
        # Maps the id of a metric to the metric's state at the start of the epoch.
        self._initial: dict[int, NDArray[np.float64]] = {}
        # names of the metrics that could not be merged over the workers
        self._separate: set[str] = set()
        self._returned: StepResults | None = None
        self._has_named = False

    def begin_fit(self) -> None:
        """Wrap the updates of metrics of the script's own classes, before a step is traced."""
        for metric in self._given():
            if id(metric) not in self._verdicts and not _is_of_keras(metric):
                verdict = tf.Variable(
                    *(_Verdict.UNKNOWN, False), dtype=tf.int32, name=f"{OWN_PREFIX}verdict"
                )
                self._verdicts[id(metric)] = metric, verdict
                _watch(metric, verdict)

    def begin_epoch(self) -> None:
        """Record the metrics' states before an epoch's first batch: callbacks may have set them."""
        metrics = [*self._given(), *(metric for _, metric in self._metrics())]
        self._initial = {id(metric): _state_of(metric) for metric in metrics}

    def describe(self) -> list[pb.MetricState]:
        """Return what the epoch has added to the states of those metrics that can be added up."""
        states, num_bytes = [], 0
        for name, metric in self._metrics():
            added = self._added(metric)
            if added is None or num_bytes + added.nbytes > _MOST_BYTES:
                continue
            num_bytes += added.nbytes
            states.append(pb.MetricState(name=name, values=added.astype("<f8").tobytes()))
        return states

    def take(self, states: Iterable[pb.MetricState]) -> None:
        """Set the states of the training metrics to the sums over all workers.

        Args:
            states: Sums over the workers of the amounts that `describe` returns. A metric without a
                sum keeps the state of this worker.
        """
        sums = {state.name: np.frombuffer(state.values, "<f8") for state in states}
        self._separate = set()
        for name, metric in self._metrics():
            if name in sums:
                _assign(metric, self._initial[id(metric)] + sums[name])
            else:
                self._separate.add(metric.name)

    def note_returned(self, logs: Any) -> None:
        """Find metrics' results among the numbers that the last step of the epoch has returned.

        `note_returned` must be called before the metrics' states are merged over the workers.

        Args:
            logs: Return value of the last train_step of the epoch.
        """
        self._returned = StepResults(logs, [metric for _, metric in self._metrics()])

    def complete(self, logs: Any, are_results: bool) -> Any:
        """Return the logs of an epoch with the results of metrics merged over the workers.

        A warning, logged once, names the numbers in the logs that describe only this worker's rows.

        Args:
            logs: Logs of the epoch, after the metrics' states were merged over the workers.
            are_results: True if Keras took the logs from the metrics; False if a train_step of the
                script returned the logs.
        """
        if not are_results and self._returned is not None:
            logs, names = self._returned.renew(logs, self._separate)
        else:
            output_names = getattr(self._member.model, "output_names", ())
            outputs = ["", *(f"{name}_" for name in output_names)]
            separate = {f"{output}{name}" for output in outputs for name in self._separate}
            names = [key for key in logs if key in separate]
        self._name_separate(names)
        return logs

    def _name_separate(self, names: list[str]) -> None:
        if names and not self._has_named and self._member.is_chief:
            self._has_named = True
            logging.warning(
                "training metrics that describe only one worker's rows: %s. Their states cannot be "
                "summed over the workers, so their values differ among workers, and callbacks that "
                "read them may act in different epochs. Metrics of Keras, and other metrics that "
                "only add to their state, are merged",
                ", ".join(names),
            )

    def _added(self, metric: Any) -> NDArray[np.float64] | None:
        """Return the amount that an epoch has added to a metric's state.

        Returns:
            [n] float64 amounts; None if the metric cannot be merged over the workers.
        """
        state, initial = _state_of(metric), self._initial.get(id(metric))
        # If the first step has created the metric or its variables, the metric began at zero.
        if initial is None or not initial.size:
            initial = self._initial[id(metric)] = np.zeros_like(state)
        if not state.size or state.size != initial.size:
            return None
        if id(metric) in self._verdicts:
            verdict = int(self._verdicts[id(metric)][1].numpy())
            has_changed = not np.array_equal(state, initial, equal_nan=True)
            if verdict == _Verdict.DEPENDENT or (verdict == _Verdict.UNKNOWN and has_changed):
                return None
        elif not _is_of_keras(metric):
            return None
        return state - initial

    def _given(self) -> Iterator[Any]:
        """Yield a model's metrics before its first step, when Keras has not built all of them."""
        for metric in self._member.model.metrics:
            if isinstance(metric, CompileMetrics):
                metrics = keras.tree.flatten([metric._user_metrics, metric._user_weighted_metrics])
                yield from (
                    compiled_metric
                    for compiled_metric in metrics
                    if isinstance(compiled_metric, keras.Metric)
                )
            else:
                yield metric

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """Yield (unique name, metric) for each metric of the model and each metric of `compile`."""
        number = 0
        for metric in self._member.model.metrics:
            for single_metric in (
                metric.metrics if isinstance(metric, CompileMetrics) else (metric,)
            ):
                yield f"{number}/{single_metric.name}", single_metric
                number += 1


def _is_of_keras(metric: Any) -> bool:
    """Return True if Keras' own code updates a metric's state; `result` may be the script's."""
    is_keras_update = str(type(metric).update_state.__module__).startswith("keras.")
    return is_keras_update and not metric._metrics


def _state_of(metric: Any) -> NDArray[np.float64]:
    """Return a copy of all variables of a metric as one float64 vector."""
    parts = [np.ravel(np.asarray(variable.value, np.float64)) for variable in metric.variables]
    return np.concatenate(parts) if parts else np.zeros(0)


def _without_effect(metric: Any) -> Any:
    """Return a copy of a metric with the same variables but with copies of lists, dicts, sets."""
    # the `__init__` of the script's metric may require arguments
    copied = object.__new__(type(metric))
    vars(copied).update(vars(metric))
    for name, value in vars(metric).items():
        if isinstance(value, list | dict | set) and name not in _OF_KERAS:
            vars(copied)[name] = copy.copy(value)
    # remove the wrapper of the metric's update that `_watch` has set
    vars(copied).pop("update_state", None)
    return copied


def _attributes(metric: Any) -> dict[str, Any]:
    """Return the ids of a metric's attributes and their elements, to detect changes of them."""
    return {
        name: list(map(id, value)) if isinstance(value, list | dict | set) else id(value)
        for name, value in vars(metric).items()
        if name not in _OF_KERAS
    }


def _assign(metric: Any, state: NDArray[np.float64]) -> None:
    start = 0
    for variable in metric.variables:
        size = int(np.prod(variable.shape))
        variable.assign(state[start : start + size].reshape(variable.shape).astype(variable.dtype))
        start += size


def _watch(metric: Any, verdict: tf.Variable) -> None:
    """Wrap a metric's updates: the first update that changes its state decides the verdict.

    Args:
        metric: Metric of a class that is not Keras' own.
        verdict: Variable that receives the `_Verdict` on the metric, within the graph of a step or
            eagerly.
    """
    alone = metric.update_state

    @functools.wraps(alone)
    def update_state(*args: Any, **keywords: Any) -> Any:
        result = alone(*args, **keywords)
        # do not test the metric while Keras builds it or `_probe` runs
        if not backend.in_stateless_scope():
            tf.cond(
                tf.equal(verdict, _Verdict.UNKNOWN),
                lambda: verdict.assign(
                    call_with_values(lambda batch: int(_probe(metric, *batch)), (args, keywords))
                ).read_value(),
                verdict.read_value,
            )
        return result

    metric.update_state = tf.autograph.experimental.do_not_convert(update_state)


def _probe(metric: Any, args: Any, keywords: Any) -> Any:
    """Update a metric's copy twice with the same batch, and compare the amounts added to it.

    Args:
        metric: Metric of a class that is not Keras' own.
        args: Positional arguments of a call of the metric's `update_state`.
        keywords: Keyword arguments of a call of the metric's `update_state`.

    Returns:
        The `_Verdict`, as an int32 scalar tensor.
    """
    if not metric.variables:
        return tf.constant(_Verdict.DEPENDENT)
    try:
        copied = _without_effect(metric)
        reset = [_float64(value) for value in copied.stateless_reset_state()]
        before = _attributes(copied)
        once = copied.stateless_update_state(_like(metric, reset), *args, **keywords)
        twice = copied.stateless_update_state(list(once), *args, **keywords)
        # the metric keeps state outside of its Keras variables, so it cannot be merged
        if _attributes(copied) != before:
            return tf.constant(_Verdict.DEPENDENT)
    except Exception as error:  # noqa: BLE001 - a script's metric may raise any error
        logging.info("metric %s cannot be updated on a copy of its state: %r", metric.name, error)
        return tf.constant(_Verdict.DEPENDENT)
    once, twice = [_float64(value) for value in once], [_float64(value) for value in twice]
    changes, repeats = [], []
    for state0, state1, state2 in zip(reset, once, twice, strict=True):
        scale = tf.abs(state0) + tf.abs(state1) + tf.abs(state2)
        changes.append(tf.reduce_any(tf.not_equal(state1, state0)))
        repeats.append(tf.reduce_all(tf.abs(state2 - 2 * state1 + state0) <= _ROUNDING * scale))
    verdict = tf.where(tf.reduce_all(repeats), _Verdict.ADDITIVE, _Verdict.DEPENDENT)
    return tf.where(tf.reduce_any(changes), verdict, _Verdict.UNKNOWN)


def _like(metric: Any, values: Iterable[Any]) -> list[Any]:
    """Return arrays as tensors with the dtypes of a metric's variables."""
    pairs = zip(metric.variables, values, strict=True)
    return [keras.ops.cast(value, variable.dtype) for variable, value in pairs]


def _float64(value: Any) -> Any:
    return tf.cast(keras.ops.convert_to_tensor(value), tf.float64)
