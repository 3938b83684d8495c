"""``thinwire.evaluate(function)``: metrics that a script finds itself, in the run's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.script.identity import is_chief
from thinwire.worker.script import RECORD


def evaluate(function: Callable[[], Mapping[str, float]]) -> dict[str, float] | None:
    """Let one worker evaluate, and record what it finds: in summary, report, TensorBoard, --target.

    For what no `validation_data` can describe: a score of generated samples, a loop of one's own.
    Call it on every worker, after `fit` or in a loop.

    Args:
        function: Returns metrics by name, each one number; called on the chief alone.

    Returns:
        The metrics on the chief, and where no run is; None on other workers, which do not wait.

    Raises:
        ConfigurationError: The function does not return numbers by name.
    """
    if not is_chief():
        return None
    found = function()
    try:
        metrics = {str(name): float(value) for name, value in dict(found).items()}
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"thinwire.evaluate: the function returned {found!r:.200}; expected a dictionary of "
            'names and numbers, such as {"score": 0.5}.'
        ) from error
    if not RECORD.evaluated(metrics):
        logging.info("no run records %s", metrics)
    return metrics
