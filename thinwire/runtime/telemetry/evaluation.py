"""Evaluations of the central model: metrics by name, and what training had cost up to then.

Who evaluates names the metrics: the built-in tasks, a script's compiled metrics, or a function of
its own. A value that is not finite is written as null.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.runtime.persistence.documents import Document

#: Metrics that were fields of an evaluation before they had names of their own.
#: Words in the names of metrics that are the better the larger they are.
_LARGER_IS_BETTER = re.compile(
    r"acc|auc|precision|recall|sensitivity|specificity|f1|f_?beta|fscore|iou|dice|r2|similarity"
    r"|hit|top_?[k\d]|ndcg|bleu|rouge|psnr|ssim|score|reward"
)
_SMALLER_IS_BETTER = re.compile(r"loss|err|divergence|perplexity|false_|m[as]p?e$|rmse")


@dataclasses.dataclass(frozen=True)
class Evaluation(Document):
    """The central model at one version, by one set of metrics."""

    version: int  # updates applied
    samples: int  # examples consumed by them
    seconds: float  # training time, as in RunStatus
    metrics: dict[str, float | None]  # by name; None: not finite
    bytes_up: int
    bytes_down: int
    versions: list[int] = dataclasses.field(default_factory=list)  # of each shard
    final: bool = False  # of the version the run ended with


def standing(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Drop evaluations of versions that a server restart undid, and merge those of one version.

    Args:
        evaluations: in the order they were made.

    Returns:
        One of each version that still belongs to the run, versions ascending. Of a metric that was
        recorded twice the later value counts.
    """
    kept: list[Evaluation] = []
    for evaluation in evaluations:
        undone = False
        while kept and kept[-1].version > evaluation.version:
            kept.pop()
            undone = True
        if kept and kept[-1].version == evaluation.version:
            before = kept.pop()
            evaluation = evaluation if undone else _merged(before, evaluation)
        kept.append(evaluation)
    return kept


def latest(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the newest evaluation, with all metrics of its version; None: there is none."""
    found: Evaluation | None = None
    for evaluation in reversed(evaluations):
        if found is not None and evaluation.version != found.version:
            break
        found = evaluation if found is None else _merged(evaluation, found)
    return found


def latest_until(version: int, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the newest evaluation that a run as far as this can have had; None: there is none.

    What a former run left in the same directory is of a later version.
    """
    found = latest(evaluations)
    return found if found is not None and found.version <= version else None


def ranges(evaluations: Sequence[Evaluation]) -> dict[str, dict[str, float | None]]:
    """Return what a summary has of each metric: the ``last`` value, the ``min`` and the ``max``.

    Args:
        evaluations: Those of the run, versions ascending.
    """
    found: dict[str, dict[str, float | None]] = {}
    for name in names_in(evaluations):
        values = [each.metrics[name] for each in evaluations if name in each.metrics]
        finite = [value for value in values if value is not None]
        found[name] = {
            "last": values[-1],
            "min": min(finite, default=None),
            "max": max(finite, default=None),
        }
    return found


def ranges_in(summary: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the `ranges` of a summary.json, which an older version may have written.

    What is no number there is None.
    """
    known = summary.get("metrics")
    if not isinstance(known, dict):
        accuracy = {"last": summary.get("test_accuracy"), "max": summary.get("best_test_accuracy")}
        known = {"accuracy": accuracy, "loss": {"last": summary.get("test_loss")}}
        known = {name: each for name, each in known.items() if each["last"] is not None}
    return {
        name: {key: _number(each.get(key)) for key in ("last", "min", "max")}
        for name, each in known.items()
        if isinstance(each, dict)
    }


def names_in(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the names of all metrics, in the order in which they came up."""
    return list(dict.fromkeys(name for each in evaluations for name in each.metrics))


def is_larger_better(name: str) -> bool:
    """Return whether a metric improves by growing, as far as its name shows.

    >>> is_larger_better("val_auc"), is_larger_better("mean_absolute_error")
    (True, False)
    """
    lower = name.lower()
    if _SMALLER_IS_BETTER.search(lower):
        return False
    return _LARGER_IS_BETTER.search(lower) is not None


def is_share(name: str) -> bool:
    """Return whether a metric is a share of the examples, which people read in percent."""
    return "accuracy" in name.lower()


def best_of(name: str, spread: Mapping[str, float | None]) -> float | None:
    """Return the best value of a metric in its `ranges`; None: there is none."""
    return spread.get("max" if is_larger_better(name) else "min")


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < math.inf else None


def _merged(before: Evaluation, after: Evaluation) -> Evaluation:
    metrics = {**before.metrics, **after.metrics}
    return dataclasses.replace(after, metrics=metrics, final=before.final or after.final)
