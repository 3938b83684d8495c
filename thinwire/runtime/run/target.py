"""The target of a run: a metric's bound at which the run ends, for example ``val_mae<=0.3``."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

#: Metrics of an evaluation: name of a metric -> value, or None if the value is not finite.
Metrics = Mapping[str, float | None]

_SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
_FORM = re.compile(r"\s*(?P<metric>[^<>=]*[^<>=\s])\s*(?P<sign><=|>=)\s*(?P<value>[^<>=\s]+)\s*")
_OF_FIT = "val_"  # prefix of the names of validation metrics in Keras' `fit`
ACCURACY = "accuracy"
#: Stop reasons of a run that has reached a target accuracy, or a target of another metric.
ACCURACY_REACHED, REACHED = "target_accuracy", "target"


def find_name(known: Container[str], name: str) -> str | None:
    """Return the known name that equals a metric's name up to the prefix "val_"; None without one.

    >>> find_name(["loss", "mae"], "val_mae")
    'mae'
    """
    names = (name, name.removeprefix(_OF_FIT), _OF_FIT + name)
    return next((variant for variant in names if variant in known), None)


def find(metrics: Metrics, name: str) -> float | None:
    """Return a metric's value by name, with or without "val_"; None if missing or not finite."""
    known = find_name(metrics, name)
    return None if known is None else metrics[known]


def is_target(text: str) -> bool:
    """Return True if `Target.parse` accepts a text like ``val_mae<=0.3`` as a run's target."""
    try:
        Target.parse(text)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Target:
    """Target of a run: a metric of its evaluations, and the bound at which the run ends."""

    metric: str
    sign: str  # "<=" or ">=": the comparison of the metric with the bound
    bound: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse the text of a run's target, for example ``val_mae<=0.3``.

        Raises:
            ValueError: The text is not a target like ``val_mae<=0.3``.
        """
        form = _FORM.fullmatch(text)
        try:
            bound = float(form["value"]) if form else math.nan
        except ValueError:
            bound = math.nan
        if form is None or not math.isfinite(bound):
            raise ValueError(f"{text!r} is no target; expected NAME<=NUMBER or NAME>=NUMBER")
        return cls(form["metric"], form["sign"], bound)

    @classmethod
    def of_accuracy(cls, bound: float) -> Target:
        """Return the target of --target_accuracy: an accuracy of at least ``bound``."""
        return cls(ACCURACY, ">=", bound)

    def __str__(self) -> str:
        """Return the target as text, for example ``val_mae<=0.3``; `parse` accepts the text."""
        return f"{self.metric}{self.sign}{self.bound!r}".removesuffix(".0")

    @property
    def stop_reason(self) -> str:
        """Stop reason of a run that has reached this target, for summary.json."""
        return ACCURACY_REACHED if self.metric == ACCURACY and self.sign == ">=" else REACHED

    @property
    def best(self) -> Callable[..., float]:
        """Function that returns the best of several values of the target's metric: min or max."""
        return min if self.sign == "<=" else max

    def is_reached(self, metrics: Metrics) -> bool:
        """Return True if the metrics of an evaluation reach this target."""
        value = find(metrics, self.metric)
        return value is not None and _SIGNS[self.sign](value, self.bound)

    def is_reached_in(self, summary: Mapping[str, Any]) -> bool:
        """Return True if the run that a summary.json describes has reached this target."""
        key = self.best.__name__
        best = {name: spread[key] for name, spread in summary.get("metrics", {}).items()}
        return self.is_reached(best or {ACCURACY: summary["best_test_accuracy"]})

    def is_implied_by(self, earlier: str | float | None) -> bool:
        """Return True if a run that has reached an earlier target has also reached this target.

        Args:
            earlier: Text of the earlier target, or a number from an old checkpoint, which is a
                bound of the accuracy. None if there was no earlier target.
        """
        if not isinstance(earlier, str):
            return self.is_reached({ACCURACY: earlier})
        before = Target.parse(earlier)
        return before.sign == self.sign and self.is_reached({before.metric: before.bound})
