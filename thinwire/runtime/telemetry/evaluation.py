"""Evaluations of the central model: metrics by name, and the cost of training up to then.

The evaluator chooses the names of the metrics: a built-in task, a script's compiled metrics, or a
script's own function. A value that is not finite is written as null.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.runtime.persistence.documents import Document

#: Words in the names of metrics for which a larger value is better.
_LARGER_IS_BETTER = re.compile(
    r"acc|auc|precision|recall|sensitivity|specificity|f1|f_?beta|fscore|iou|dice|r2|similarity"
    r"|hit|top_?[k\d]|ndcg|bleu|rouge|psnr|ssim|score|reward"
)
#: Words in the names of metrics for which a smaller value is better; checked first.
_SMALLER_IS_BETTER = re.compile(r"loss|err|divergence|perplexity|false_|m[as]p?e$|rmse")


@dataclasses.dataclass(frozen=True)
class Evaluation(Document):
    """Evaluation of one version of the central model by one set of metrics."""

    version: int  # number of updates applied
    samples: int  # examples consumed by the updates applied
    seconds: float  # training time, as in RunStatus
    metrics: dict[str, float | None]  # metric name -> value; None if the value is not finite
    bytes_up: int  # bytes that workers have sent to servers
    bytes_down: int  # bytes that servers have sent to workers
    versions: list[int] = dataclasses.field(default_factory=list)  # version of every shard
    final: bool = False  # True if the run ended with this version


def standing(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Drop evaluations that a server restart undid, and merge evaluations of the same version.

    Args:
        evaluations: Evaluations in the order in which they were made.

    Returns:
        One evaluation for each version that still belongs to the run, versions ascending. If a
        metric was recorded twice for a version, the later value counts.
    """
    valid: list[Evaluation] = []
    for evaluation in evaluations:
        undone = False
        while valid and valid[-1].version > evaluation.version:
            valid.pop()
            undone = True
        if valid and valid[-1].version == evaluation.version:
            before = valid.pop()
            # After a restart, the same version number names other weights: do not merge.
            evaluation = evaluation if undone else _merged(before, evaluation)
        valid.append(evaluation)
    return valid


def latest(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the newest evaluation, with all metrics of its version; None without evaluations."""
    newest: Evaluation | None = None
    for evaluation in reversed(evaluations):
        if newest is not None and evaluation.version != newest.version:
            break
        newest = evaluation if newest is None else _merged(evaluation, newest)
    return newest


def latest_until(version: int, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the newest evaluation unless its version is later than ``version``; else None.

    An evaluation of a later version is from an earlier run in the same directory.
    """
    newest = latest(evaluations)
    return newest if newest is not None and newest.version <= version else None


def ranges(evaluations: Sequence[Evaluation]) -> dict[str, dict[str, float | None]]:
    """Return metric name -> the ``last`` value, the ``min`` and the ``max``, for a summary.

    Args:
        evaluations: Evaluations of the run, versions ascending.
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
    """Return the `ranges` of a summary.json; a value that is not a number becomes None."""
    known = summary.get("metrics")
    if not isinstance(known, dict):
        return {}
    return {
        name: {key: _number(spread.get(key)) for key in ("last", "min", "max")}
        for name, spread in known.items()
        if isinstance(spread, dict)
    }


def names_in(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the names of all metrics, in the order of their first evaluation."""
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
    """Return True if a metric is a fraction of the examples, which people read in percent."""
    return "accuracy" in name.lower()


def best_of(name: str, spread: Mapping[str, float | None]) -> float | None:
    """Return the best value in the `ranges` of a metric; None if no value is finite."""
    return spread.get("max" if is_larger_better(name) else "min")


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < math.inf else None


def _merged(before: Evaluation, after: Evaluation) -> Evaluation:
    metrics = {**before.metrics, **after.metrics}
    return dataclasses.replace(after, metrics=metrics, final=before.final or after.final)
