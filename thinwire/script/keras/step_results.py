"""Results of metrics among the numbers that a script's own `train_step` returns.

Keras takes an epoch's logs from the model's metrics where the `train_step` returns results of all
of them, under their own names. Otherwise the logs are what the last step has returned: results
under names of the script's own, or of some metrics only, as many GANs and autoencoders have them.
Such a number was computed before the workers' states were merged, so it is of one worker's rows.
A number that equals the result of a metric at the end of the steps is that result, and gets the
merged one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

#: Keys from the outermost dictionary to a number.
Path = tuple[str, ...]
#: A step in a graph and the same metric afterwards may round differently.
_ROUNDING = 1e-6


class StepResults:
    """The metrics whose results the last step of an epoch has returned.

    Args:
        logs: What the step has returned.
        metrics: Those of the model, with the states that they have after the step.
    """

    def __init__(self, logs: Any, metrics: Iterable[Any]) -> None:
        self._sources: dict[Path, tuple[Any, Path]] = {}
        results = [
            (metric, path, value) for metric in metrics for path, value in _numbers(metric.result())
        ]
        for path, value in _numbers(logs) if isinstance(logs, Mapping) else ():
            equal = [(metric, at) for metric, at, result in results if _is_equal(value, result)]
            # Two metrics may be equal, such as both at 1.0; then the name decides.
            named = [(metric, at) for metric, at in equal if path[-1] in (metric.name, *at)]
            if len(equal) == 1 or len(named) == 1:
                self._sources[path] = (named or equal)[0]

    def renew(self, logs: Any, separate: Iterable[str]) -> tuple[Any, list[str]]:
        """Put the present results of the metrics in the place of those that were returned.

        Args:
            logs: What the step has returned.
            separate: Names of metrics whose states could not be merged.

        Returns:
            The logs with new results, and the names of the numbers that stay this worker's own.
        """
        separate, stay = set(separate), []

        def renewed(value: Any, path: Path) -> Any:
            if isinstance(value, Mapping):
                return {key: renewed(each, (*path, str(key))) for key, each in value.items()}
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
    """Yield the numbers and arrays within dictionaries, each with its path."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, (*path, str(key)))
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
