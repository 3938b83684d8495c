"""``thinwire.evaluate(function)``: records metrics that a script computes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.script.identity import is_chief
from thinwire.worker.script import RECORD


def evaluate(function: Callable[[], Mapping[str, float]]) -> dict[str, float] | None:
    """Record a script's own metrics of the current model in summary, report and TensorBoard.

    Use `thinwire.evaluate` if `validation_data` cannot describe the evaluation: for a score of
    generated samples, or in a training loop of your own. Call `thinwire.evaluate` on every worker,
    after `fit` or in a training loop. Metrics of `thinwire.evaluate` count for the flag --target,
    which ends the run at a metric's value.

    Args:
        function: Function that returns a dictionary of metric names and numbers. Only the chief
            (normally worker 1) calls it.

    Returns:
        The metrics, on the chief and in a script outside a run. None on all other workers, which do
        not wait for the chief.

    Raises:
        ConfigurationError: The function does not return a dictionary of names and numbers.
    """
    if not is_chief():
        return None
    returned = function()
    try:
        metrics = {str(name): float(value) for name, value in dict(returned).items()}
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"thinwire.evaluate: the function returned {returned!r:.200}; expected a dictionary of "
            'names and numbers, such as {"score": 0.5}.'
        ) from error
    if not RECORD.evaluated(metrics):
        logging.info("thinwire.evaluate: no run of Thinwire records these metrics: %s", metrics)
    return metrics
