"""The metric at which a run ends: ``--target=val_mae<=0.3``."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

#: Metrics by name; None: not finite.
Metrics = Mapping[str, float | None]

_SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
_FORM = re.compile(r"\s*(?P<metric>[^<>=]*[^<>=\s])\s*(?P<sign><=|>=)\s*(?P<value>[^<>=\s]+)\s*")
_OF_FIT = "val_"  # what Keras' `fit` puts before the names of a validation
ACCURACY = "accuracy"
#: Why a run ended that has reached its target: an accuracy, or any other.
ACCURACY_REACHED, REACHED = "target_accuracy", "target"


def find_name(known: Container[str], name: str) -> str | None:
    """Return under which name a metric is known: as it is, without, or with the prefix of `fit`.

    >>> find_name(["loss", "mae"], "val_mae")
    'mae'
    """
    names = (name, name.removeprefix(_OF_FIT), _OF_FIT + name)
    return next((each for each in names if each in known), None)


def find(metrics: Metrics, name: str) -> float | None:
    """Return a metric of any of these names; None: there is none, or it is not finite."""
    known = find_name(metrics, name)
    return None if known is None else metrics[known]


def is_target(text: str) -> bool:
    """Return whether a text is one that `Target.parse` reads."""
    try:
        Target.parse(text)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Target:
    """A metric of the evaluations, and the bound at which the run has reached its goal."""

    metric: str
    sign: str  # <= or >=
    bound: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that a text such as ``val_mae<=0.3`` stands for.

        Raises:
            ValueError: It is none.
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
        """Return the target that --target_accuracy stands for."""
        return cls(ACCURACY, ">=", bound)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.metric}{self.sign}{self.bound!r}".removesuffix(".0")

    @property
    def stop_reason(self) -> str:
        """Why a run ends that has reached it."""
        return ACCURACY_REACHED if self.metric == ACCURACY and self.sign == ">=" else REACHED

    @property
    def best(self) -> Callable[..., float]:
        """What picks the value that is nearest to the goal, or furthest beyond: min or max."""
        return min if self.sign == "<=" else max

    def is_reached(self, metrics: Metrics) -> bool:
        """Return whether an evaluation has reached it."""
        value = find(metrics, self.metric)
        return value is not None and _SIGNS[self.sign](value, self.bound)

    def is_reached_in(self, summary: Mapping[str, Any]) -> bool:
        """Return whether the run of a summary.json has reached it."""
        which = self.best.__name__
        best = {name: each[which] for name, each in summary.get("metrics", {}).items()}
        return self.is_reached(best or {ACCURACY: summary["best_test_accuracy"]})

    def is_implied_by(self, earlier: str | float | None) -> bool:
        """Return whether a run that has reached the earlier target has reached this one.

        Args:
            earlier: The text of a target; a number: an accuracy, as older checkpoints have it;
                None: there was none.
        """
        if not isinstance(earlier, str):
            return self.is_reached({ACCURACY: earlier})
        before = Target.parse(earlier)
        return before.sign == self.sign and self.is_reached({before.metric: before.bound})
