"""Instruments for monitoring a node: counters, gauges and histograms, as plain data.

Every role collects its own instruments, and `thinwire.proto.metrics_server` exports the
instruments in Prometheus' text format.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

#: Label values -> value of an instrument. The key of an instrument without labels is ().
Values = Mapping[tuple[str, ...], float]


@dataclasses.dataclass(frozen=True)
class Instrument:
    """Instrument: a monitored quantity with a value for each combination of label values.

    Attributes:
        name: Name of the instrument in lower case with the unit, without the exported prefix and
            without `_total`.
        kind: Kind of the instrument: a counter only grows, a gauge rises and falls, a histogram
            counts whole numbers.
        text: Sentence that describes the monitored quantity.
        labels: Names of the instrument's labels; empty for a histogram.
        values: Label values -> value of the instrument. For a histogram: whole number as text ->
            count of the number.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]
    values: Values


def _scalar(
    kind: Literal["counter", "gauge"],
    name: str,
    text: str,
    value: float | Mapping[str, float],
    label: str | None = None,
) -> Instrument:
    """Return an instrument with one value, or with one value per label value."""
    if isinstance(value, Mapping):
        values: dict[tuple[str, ...], float] = {(key,): count for key, count in value.items()}
        return Instrument(name, kind, text, (label or "",), values)
    return Instrument(name, kind, text, (), {(): value})


#: Return a counter, an instrument that only grows, with one value or one per label value.
counter = functools.partial(_scalar, "counter")
#: Return a gauge, an instrument that rises and falls, with one value or one per label value.
gauge = functools.partial(_scalar, "gauge")


def histogram(name: str, text: str, counts: Mapping[int, int]) -> Instrument:
    """Return a histogram; ``counts`` maps a whole number to its number of occurrences."""
    values: dict[tuple[str, ...], float] = {
        (str(number),): float(count) for number, count in counts.items()
    }
    return Instrument(name, "histogram", text, (), values)


def since(instrument: Instrument, before: Instrument | None) -> Instrument:
    """Return the increase of a counter or histogram since `before`; return a gauge unchanged.

    A node that restarts from a checkpoint counts the events after the checkpoint a second time, so
    its totals would decrease at the restart. A metrics scraper would interpret a decreasing total
    as a counter that restarted at 0. So exported totals start at 0 with the node's process.

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
