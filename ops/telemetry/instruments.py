"""What a node tells those who watch it from outside: counters, gauges and histograms.

Plain data: a role says what it counts, `thinwire.proto.metrics_server` says it in a language for
machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

#: Label values -> value; the empty tuple where there are no labels.
Values = Mapping[tuple[str, ...], float]


@dataclasses.dataclass(frozen=True)
class Instrument:
    """One meter, with a value for each combination of labels.

    Attributes:
        name: In small letters and with its unit, without prefix and without `_total`.
        kind: A counter only grows; a histogram's values are counts of whole numbers.
        text: What it is, in a sentence.
        labels: Names of the labels; of a histogram none.
        values: By labels; of a histogram by the whole number, as text.
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
    return _figure("counter", name, text, value, label)


def gauge(
    name: str, text: str, value: float | Mapping[str, float], label: str | None = None
) -> Instrument:
    """Return a value that goes up and down, or one for each value of a label."""
    return _figure("gauge", name, text, value, label)


def histogram(name: str, text: str, counts: Mapping[int, int]) -> Instrument:
    """Return how often each whole number was seen."""
    values: dict[tuple[str, ...], float] = {
        (str(number),): float(count) for number, count in counts.items()
    }
    return Instrument(name, "histogram", text, (), values)


def since(meter: Instrument, before: Instrument | None) -> Instrument:
    """Return what a counter or a histogram has counted since; a gauge stays as it is.

    A node that was restarted from an older state counts again what the state does not hold. A
    watcher who sees a total go down takes it for a new count from 0, so totals begin with the
    process.

    >>> since(counter("steps", "", 7), counter("steps", "", 5)).values
    {(): 2}
    """
    if meter.kind == "gauge" or before is None:
        return meter
    values = {
        labels: max(0, value - before.values.get(labels, 0))
        for labels, value in meter.values.items()
    }
    return dataclasses.replace(meter, values=values)


def _figure(
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
