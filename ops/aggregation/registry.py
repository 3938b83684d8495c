"""Registry of aggregates, which merge workers' updates, by value of the flag --aggregate."""

from __future__ import annotations

from thinwire.ops.aggregation.aggregates import Mean, Median, TrimmedMean
from thinwire.ops.aggregation.base import Aggregate

#: Value of the flag --aggregate -> class of the aggregate, which merges workers' updates.
AGGREGATES: dict[str, type[Aggregate]] = {
    Mean.name: Mean,
    Median.name: Median,
    TrimmedMean.name: TrimmedMean,
}
