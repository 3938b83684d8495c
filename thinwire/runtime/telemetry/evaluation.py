"""Evaluations of the PS's model: metrics by name, and the training cost until the evaluation.

The names of the metrics come from a built-in task, from a script's compiled metrics, or from a
script's own function. A metric value that is not finite is written as null.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.runtime.persistence.documents import Document

#: Pattern of words in the names of metrics whose larger value is better (accuracy, for example).
_LARGER_IS_BETTER = re.compile(
    r"acc|auc|precision|recall|sensitivity|specificity|f1|f_?beta|fscore|iou|dice|r2|similarity"
    r"|hit|top_?[k\d]|ndcg|bleu|rouge|psnr|ssim|score|reward"
)
#: Pattern of words in the names of metrics whose smaller value is better (loss, for example). The
#: pattern is checked before `_LARGER_IS_BETTER`.
_SMALLER_IS_BETTER = re.compile(r"loss|err|divergence|perplexity|false_|m[as]p?e$|rmse")


@dataclasses.dataclass(frozen=True)
class Evaluation(Document):
    """Evaluation of one model version of the PS by one set of metrics."""

    version: int  # number of updates applied to the evaluated model
    samples: int  # number of training examples up to the evaluated version
    seconds: float  # training time up to the evaluated version, in seconds
    metrics: dict[str, float | None]  # metric name -> value; None if the value is not finite
    bytes_up: int  # bytes sent by all workers to PS shards up to the evaluation
    bytes_down: int  # bytes sent by PS shards to all workers up to the evaluation
    versions: list[int] = dataclasses.field(default_factory=list)  # number of updates per PS shard
    final: bool = False  # True if the run ended with the evaluated version


def standing(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Drop evaluations of model updates that a PS restart undid; merge those of one model version.

    Args:
        evaluations: Evaluations of a run in the order in which they were made.

    Returns:
        One evaluation for each model version (number of updates) that still belongs to the run,
        versions ascending. If a metric was recorded twice for a version, the later value counts.
    """
    valid: list[Evaluation] = []
    for evaluation in evaluations:
        undone = False
        while valid and valid[-1].version > evaluation.version:
            valid.pop()
            undone = True
        if valid and valid[-1].version == evaluation.version:
            before = valid.pop()
            # After a PS restart, a version number names different weights than before, so
            # evaluations of the version must not be merged.
            evaluation = evaluation if undone else _merged(before, evaluation)
        valid.append(evaluation)
    return valid


def latest(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the newest evaluation, with all metrics of its model version; None if none exists."""
    newest: Evaluation | None = None
    for evaluation in reversed(evaluations):
        if newest is not None and evaluation.version != newest.version:
            break
        newest = evaluation if newest is None else _merged(evaluation, newest)
    return newest


def latest_until(version: int, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the newest evaluation if its model has at most ``version`` updates; else return None.

    An evaluation of a model with more than ``version`` updates is from an earlier run in the same
    directory.
    """
    newest = latest(evaluations)
    return newest if newest is not None and newest.version <= version else None


def ranges(evaluations: Sequence[Evaluation]) -> dict[str, dict[str, float | None]]:
    """Return metric name -> ``last``, ``min`` and ``max`` value of the metric in a run.

    Args:
        evaluations: Evaluations of the run, ordered by ascending model version.
    """
    spreads: dict[str, dict[str, float | None]] = {}
    for name in names_in(evaluations):
        values = [
            evaluation.metrics[name] for evaluation in evaluations if name in evaluation.metrics
        ]
        finite = [value for value in values if value is not None]
        spreads[name] = {
            "last": values[-1],
            "min": min(finite, default=None),
            "max": max(finite, default=None),
        }
    return spreads


def ranges_in(summary: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return metric name -> ``last``, ``min``, ``max`` from a summary.json of any Thinwire version.

    A metric value in summary.json that is not a number becomes None.
    """
    known = summary.get("metrics")
    if not isinstance(known, dict):
        return {}
    return {
        name: {key: _number(spread.get(key)) for key in ("last", "min", "max")}
        for name, spread in known.items()
        if isinstance(spread, dict)
    }


def names_in(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the names of all metrics in some evaluations, in the order of first occurrence."""
    return list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))


def is_larger_better(name: str) -> bool:
    """Return True if the name of a metric shows that a larger value is better.

    >>> is_larger_better("val_auc"), is_larger_better("mean_absolute_error")
    (True, False)
    """
    lower = name.lower()
    if _SMALLER_IS_BETTER.search(lower):
        return False
    return _LARGER_IS_BETTER.search(lower) is not None


def is_share(name: str) -> bool:
    """Return True if a metric is a fraction of the examples (accuracy), to be shown in percent."""
    return "accuracy" in name.lower()


def best_of(name: str, spread: Mapping[str, float | None]) -> float | None:
    """Return the best value of a metric from its last, min and max; None if not finite."""
    return spread.get("max" if is_larger_better(name) else "min")


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < math.inf else None


def _merged(before: Evaluation, after: Evaluation) -> Evaluation:
    metrics = {**before.metrics, **after.metrics}
    return dataclasses.replace(after, metrics=metrics, final=before.final or after.final)
