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
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from absl import logging
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.trainers.compile_utils import CompileMetrics

from thinwire.proto import thinwire_pb2 as pb
from thinwire.script.backends.present import backend
from thinwire.script.keras.run_member import RunMember

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
#: Keys of nested dictionaries, the outermost first, that lead to a number.
Path = tuple[str, ...]
#: Largest relative difference between a metric's result within a graph and outside of the graph
#: that still counts as equal.
_RESULT_ROUNDING = 1e-6


@dataclasses.dataclass
class _Tested:
    """A metric of a class that is not Keras' own, and if the workers' states can be added up.

    Attributes:
        metric: Metric of the script's own class.
        is_additive: True if each update adds an amount that is independent of the metric's state;
            None if no update has changed the state yet.
    """

    metric: Any
    is_additive: bool | None = None


class TrainMetrics:
    """Merges the training metrics of one model over all workers.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
    """

    def __init__(self, member: RunMember) -> None:
        self._member = member
        # Maps the id of a metric whose class is not Keras' own to the test of the metric.
        self._tested: dict[int, _Tested] = {}
        # Maps the id of a metric to the metric's state at the start of the epoch.
        self._initial: dict[int, NDArray[np.float64]] = {}
        # names of the metrics that could not be merged over the workers
        self._separate: set[str] = set()
        self._returned: StepResults | None = None
        self._has_named = False

    def begin_fit(self) -> None:
        """Wrap the updates of metrics of the script's own classes, before a step is traced."""
        for metric in self._given():
            if id(metric) not in self._tested and not _is_of_keras(metric):
                tested = self._tested[id(metric)] = _Tested(metric)
                _watch(tested)

    @property
    def needs_trial(self) -> bool:
        """True if a metric of the script's own class has not been tested yet."""
        return any(tested.is_additive is None for tested in self._tested.values())

    def try_updates(self, call: Callable[[], object]) -> None:
        """Test the metrics in one call of a stateless train_step that is not traced.

        Args:
            call: Function that calls the train_step with values, without an effect on variables.
        """
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a script's train_step may raise any error
            logging.info("the train_step cannot be called outside of a trace: %r", error)
        for tested in self._tested.values():
            if tested.is_additive is None:
                tested.is_additive = False

    def begin_epoch(self) -> None:
        """Record the metrics' states before an epoch's first batch: callbacks may have set them."""
        metrics = [*self._given(), *(metric for _, metric in self._metrics())]
        self._initial = {id(metric): _joined(metric.variables) for metric in metrics}

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
        if names and not self._has_named and self._member.is_chief:
            self._has_named = True
            logging.warning(
                "training metrics that describe only one worker's rows: %s. Their states cannot be "
                "summed over the workers, so their values differ among workers, and callbacks that "
                "read them may act in different epochs. Metrics of Keras, and other metrics that "
                "only add to their state, are merged",
                ", ".join(names),
            )
        return logs

    def _added(self, metric: Any) -> NDArray[np.float64] | None:
        """Return the amount that an epoch has added to a metric's state.

        Returns:
            [n] float64 amounts; None if the metric cannot be merged over the workers.
        """
        state, initial = _joined(metric.variables), self._initial.get(id(metric))
        # If the first step has created the metric or its variables, the metric began at zero.
        if initial is None or not initial.size:
            initial = self._initial[id(metric)] = np.zeros_like(state)
        if not state.size or state.size != initial.size:
            return None
        tested = self._tested.get(id(metric))
        is_additive = _is_of_keras(metric) if tested is None else tested.is_additive
        if is_additive is None:
            is_additive = np.array_equal(state, initial, equal_nan=True)
        return state - initial if is_additive else None

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

    def _metrics(self) -> list[tuple[str, Any]]:
        """Return pairs (unique name, metric) of the metrics of the model and of `compile`."""
        parts = (
            metric.metrics if isinstance(metric, CompileMetrics) else [metric]
            for metric in self._member.model.metrics
        )
        metrics = enumerate(itertools.chain.from_iterable(parts))
        return [(f"{number}/{metric.name}", metric) for number, metric in metrics]


def _is_of_keras(metric: Any) -> bool:
    """Return True if Keras' own code updates a metric's state; `result` may be the script's."""
    is_keras_update = str(type(metric).update_state.__module__).startswith("keras.")
    return is_keras_update and not metric._metrics


def _joined(values: Iterable[Any]) -> NDArray[np.float64]:
    """Return a copy of variables or tensors as one float64 vector."""
    parts = [np.ravel(keras.ops.convert_to_numpy(value)).astype(np.float64) for value in values]
    return np.concatenate([np.zeros(0), *parts])


def _without_effect(metric: Any) -> Any:
    """Return a copy of a metric with the same variables but with copies of lists, dicts, sets."""
    # the `__init__` of the script's metric may require arguments
    copied = object.__new__(type(metric))
    for name, value in vars(metric).items():
        is_own = isinstance(value, list | dict | set) and name not in _OF_KERAS
        vars(copied)[name] = copy.copy(value) if is_own else value
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


def _watch(tested: _Tested) -> None:
    """Wrap a metric's updates, to test the metric at the first update that changes its state."""
    alone = tested.metric.update_state

    def test(batch: Any) -> None:
        tested.is_additive = _probe(tested.metric, *batch)

    @functools.wraps(alone)
    def update_state(*args: Any, **keywords: Any) -> Any:
        result = alone(*args, **keywords)
        # Do not test the metric while Keras builds it or `_probe` runs. A stateless backend updates
        # metrics in scopes only, and `call_until` skips the traces of Keras' building there.
        if backend().is_stateless or not in_stateless_scope():
            backend().call_until(lambda: tested.is_additive is not None, test, (args, keywords))
        return result

    tested.metric.update_state = backend().unconverted(update_state)


def _probe(metric: Any, args: Any, keywords: Any) -> bool | None:
    """Update a metric's copy twice with the same batch, and compare the amounts added to it.

    Args:
        metric: Metric of a class that is not Keras' own.
        args: Positional arguments of a call of the metric's `update_state`.
        keywords: Keyword arguments of a call of the metric's `update_state`.

    Returns:
        True if the metric's states can be added up; None if the batch does not change the state.
    """
    if not metric.variables:
        return False
    try:
        copied = _without_effect(metric)
        values, before = copied.stateless_reset_state(), _attributes(copied)
        states = [_joined(values)]
        for _ in range(2):
            values = copied.stateless_update_state(values, *args, **keywords)
            states.append(_joined(values))
        reset, once, twice = states
        is_equal = np.abs(twice - 2 * once + reset) <= _ROUNDING * np.abs(states).sum(0)
    except Exception as error:  # noqa: BLE001 - a script's metric may raise any error
        logging.info("metric %s cannot be updated on a copy of its state: %r", metric.name, error)
        return False
    # a metric that keeps state outside of its Keras variables cannot be merged
    if _attributes(copied) != before:
        return False
    return None if np.array_equal(once, reset) else bool(is_equal.all())


class StepResults:
    """Maps numbers that the last step of an epoch has returned to the metrics that computed them.

    Keras takes an epoch's logs from the model's metrics if the `train_step` returns the results of
    all metrics under their own names. If the `train_step` returns other names or only some metrics,
    as in many GANs and autoencoders, the logs of the epoch are the numbers that the last step
    returned. The last step computes its returned numbers before the workers' metric states are
    merged, so these numbers describe the rows of one worker. If a number that the last step
    returned equals the result of a metric, it is replaced by the metric's merged result.

    Args:
        logs: Return value of the epoch's last train_step.
        metrics: The model's metrics, with their states after the last train_step.
    """

    def __init__(self, logs: Any, metrics: Iterable[Any]) -> None:
        self._sources: dict[Path, tuple[Any, Path]] = {}
        results = [
            (metric, path, value) for metric in metrics for path, value in _numbers(metric.result())
        ]
        for path, value in _numbers(logs) if isinstance(logs, Mapping) else ():
            equal = [(metric, at) for metric, at, result in results if _is_equal(value, result)]
            # Two metrics may have equal results, for example 1.0. Then the key of the returned
            # number decides which metric it belongs to.
            named = [(metric, at) for metric, at in equal if path[-1] in (metric.name, *at)]
            if len(equal) == 1 or len(named) == 1:
                self._sources[path] = (named or equal)[0]

    def renew(self, logs: Any, separate: Iterable[str]) -> tuple[Any, list[str]]:
        """Replace metrics' results in an epoch's logs by the metrics' results over all workers.

        Args:
            logs: Return value of the epoch's last train_step.
            separate: Names of the metrics whose states could not be merged over the workers.

        Returns:
            The logs with merged results, and the names of the numbers in the logs that describe
            only this worker's rows.
        """
        separate, stay = set(separate), []

        def renewed(value: Any, path: Path) -> Any:
            if isinstance(value, Mapping):
                return {key: renewed(entry, (*path, str(key))) for key, entry in value.items()}
            metric, at = self._sources.get(path, (None, ()))
            if metric is None or metric.name in separate:
                stay.append(path[-1])
                return value
            result = metric.result()
            for key in at:
                result = result[key]
            return result

        return renewed(logs, ()), stay


def _numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the numbers and arrays within nested dictionaries, each with its path of keys."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(entry, (*path, str(key)))
        return
    if value is None:
        return
    try:
        yield path, np.asarray(keras.ops.convert_to_numpy(value), np.float64)
    except (TypeError, ValueError):
        return


def _is_equal(first: Any, second: Any) -> bool:
    return first.shape == second.shape and np.allclose(
        first, second, rtol=_RESULT_ROUNDING, atol=0, equal_nan=True
    )
