"""The aggregates by their value of --aggregate."""

from __future__ import annotations

from thinwire.ops.aggregation.aggregates import Mean, Median, TrimmedMean
from thinwire.ops.aggregation.base import Aggregate

#: --aggregate value -> policy.
AGGREGATES: dict[str, type[Aggregate]] = {
    Mean.name: Mean,
    Median.name: Median,
    TrimmedMean.name: TrimmedMean,
}
