"""Finds metrics' results among the numbers that a script's own `train_step` returns.

Keras takes an epoch's logs from the model's metrics if the `train_step` returns the results of all
metrics under their own names. If the `train_step` returns other names or only some metrics, as in
many GANs and autoencoders, the logs of the epoch are the numbers that the last step returned. The
last step computes its returned numbers before the workers' metric states are merged, so these
numbers describe the rows of one worker. If a number that the last step returned equals the result
of a metric, it is replaced by the metric's merged result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

#: Keys of nested dictionaries, the outermost first, that lead to a number.
Path = tuple[str, ...]
#: Largest relative difference between a metric's result within a graph and outside of the graph
#: that still counts as equal.
_ROUNDING = 1e-6


class StepResults:
    """Maps numbers that the last step of an epoch has returned to the metrics that computed them.

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
        yield path, np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return


def _is_equal(first: Any, second: Any) -> bool:
    return first.shape == second.shape and np.allclose(
        first, second, rtol=_ROUNDING, atol=0, equal_nan=True
    )
