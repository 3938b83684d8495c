"""The script of an evaluator's process, which takes no training steps.

The Supervisor starts the evaluator with the same script as the workers. A step of an optimizer in
the evaluator waits for the workers. The evaluator's process ends with the run.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from absl import logging

from thinwire.runtime.run.settings import EXIT_DONE
from thinwire.supervisor.evaluation_requests import EvaluationRequests
from thinwire.worker.temporary import remove_temporary

if TYPE_CHECKING:
    from thinwire.runtime.run.settings import Run

#: Longest wait for messages of shard 0, in seconds, before the evaluator checks whether an
#: evaluation without a worker's request is due.
LOOK_SECONDS = 0.5


class EvaluatorScript:
    """Values that the evaluators of all models of a script share, and the stream to shard 0.

    The opened stream reports to shard 0 that the script has called `distribute`. No worker trains
    before an evaluator has reported; the function `thinwire.ps.scripts.evaluators` implements
    this wait.

    Attributes:
        run: Settings of the training run.
        requests: Stream from shard 0 on which the workers' evaluation requests arrive.
        num_fits: Number of the script's calls of `fit` so far, over all its models.
        newest: Evaluator of the model whose `fit` was called last; None before the first `fit`.
        missing: Maps the Python id of a variable to the variable, for variables that an earlier
            `fit` trained and whose trained values this process does not have.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.requests = run, EvaluationRequests(run)
        self.num_fits = 0
        self.newest: Any = None
        self.missing: dict[int, Any] = {}

    def end(self) -> NoReturn:
        """End the process without the script's exit handlers, which only the workers should run."""
        remove_temporary()
        logging.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_DONE)


#: List with the values of this process's script; empty before its first call of `distribute`.
_SCRIPT: list[EvaluatorScript] = []


def script_of(run: Run) -> EvaluatorScript:
    """Return the values of this process's script; open the stream to shard 0 at the first call."""
    if not _SCRIPT:
        _SCRIPT.append(EvaluatorScript(run))
    return _SCRIPT[0]


def after_waiting(alone: Callable[..., Any], script: EvaluatorScript) -> Callable[..., Any]:
    """Return a function that awaits a worker's `fit` with validation data, then calls `alone`."""

    @functools.wraps(alone)
    def step(*args: Any, **keywords: Any) -> Any:
        requests = script.requests
        while not requests.has_validation:
            num_news = requests.num_news
            if requests.halt_cause:
                requests.close()
                script.end()
            requests.wait(LOOK_SECONDS, num_news)
        return alone(*args, **keywords)

    return step
