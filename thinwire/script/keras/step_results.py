"""Find results of metrics among the numbers that a script's own `train_step` returns.

Keras takes an epoch's logs from the model's metrics if the `train_step` returns the results of all
metrics under their own names. Otherwise the logs are the numbers that the last step has returned:
results under names of the script's choice, or of some metrics only, as in many GANs and
autoencoders. These numbers were computed before the workers' states were merged, so they describe
one worker's rows. A number that equals the result of a metric at the end of the steps is taken as
that result, and is replaced by the merged result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

#: Keys that lead from the outermost dictionary to a number.
Path = tuple[str, ...]
#: Relative rounding error between a metric's result within a graph and afterwards.
_ROUNDING = 1e-6


class StepResults:
    """The metrics whose results the last step of an epoch has returned.

    Args:
        logs: Return value of the step.
        metrics: The model's metrics, with their states after the step.
    """

    def __init__(self, logs: Any, metrics: Iterable[Any]) -> None:
        self._sources: dict[Path, tuple[Any, Path]] = {}
        results = [
            (metric, path, value) for metric in metrics for path, value in _numbers(metric.result())
        ]
        for path, value in _numbers(logs) if isinstance(logs, Mapping) else ():
            equal = [(metric, at) for metric, at, result in results if _is_equal(value, result)]
            # Two metrics may have equal results, such as 1.0. Then the name decides.
            named = [(metric, at) for metric, at in equal if path[-1] in (metric.name, *at)]
            if len(equal) == 1 or len(named) == 1:
                self._sources[path] = (named or equal)[0]

    def renew(self, logs: Any, separate: Iterable[str]) -> tuple[Any, list[str]]:
        """Replace the returned results of metrics by their present results.

        Args:
            logs: Return value of the step.
            separate: Names of metrics whose states could not be merged.

        Returns:
            The logs with new results, and the names of the numbers that describe only this worker.
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
    """Yield the numbers and arrays within nested dictionaries, with their paths."""
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
