"""Instruments of a node for monitoring: counters, gauges and histograms.

Plain data: each role collects its own, and `thinwire.proto.metrics_server` exports them in
Prometheus' text format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

#: Label values -> value; the empty tuple where there are no labels.
Values = Mapping[tuple[str, ...], float]


@dataclasses.dataclass(frozen=True)
class Instrument:
    """One instrument, with a value for each combination of labels.

    Attributes:
        name: In lower case and with its unit, without prefix and without `_total`.
        kind: A counter only grows; a histogram's values are counts of whole numbers.
        text: One sentence that describes it.
        labels: Names of the labels; a histogram has none.
        values: By labels; for a histogram by the whole number, as text.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]
    values: Values


def counter(
    name: str, text: str, value: float | Mapping[str, float], label: str | None = None
) -> Instrument:
    """Return a counter, or one for each value of a label."""
    return _scalar("counter", name, text, value, label)


def gauge(
    name: str, text: str, value: float | Mapping[str, float], label: str | None = None
) -> Instrument:
    """Return a gauge, whose value rises and falls, or one for each value of a label."""
    return _scalar("gauge", name, text, value, label)


def histogram(name: str, text: str, counts: Mapping[int, int]) -> Instrument:
    """Return how often each whole number was counted."""
    values: dict[tuple[str, ...], float] = {
        (str(number),): float(count) for number, count in counts.items()
    }
    return Instrument(name, "histogram", text, (), values)


def since(instrument: Instrument, before: Instrument | None) -> Instrument:
    """Return what a counter or a histogram has counted since `before`; a gauge is unchanged.

    A node that was restarted from an older state counts again what the state does not hold. A
    scraper takes a total that decreases for a new count from 0, so totals begin with the process.

    >>> since(counter("steps", "", 7), counter("steps", "", 5)).values
    {(): 2}
    """
    if instrument.kind == "gauge" or before is None:
        return instrument
    values = {
        labels: max(0, value - before.values.get(labels, 0))
        for labels, value in instrument.values.items()
    }
    return dataclasses.replace(instrument, values=values)


def _scalar(
    kind: Literal["counter", "gauge"],
    name: str,
    text: str,
    value: float | Mapping[str, float],
    label: str | None,
) -> Instrument:
    if isinstance(value, Mapping):
        values: dict[tuple[str, ...], float] = {(each,): count for each, count in value.items()}
        return Instrument(name, kind, text, (label or "",), values)
    return Instrument(name, kind, text, (), {(): value})
