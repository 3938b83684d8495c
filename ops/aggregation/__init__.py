"""Aggregates merge the updates of one release; guards reject faulty updates.

An `Aggregate` merges all updates of a release into one: their mean, or a value per entry that a
single outlier cannot move. The module `outliers` limits the magnitude and the norm of an update,
and holds the limits for quarantining a worker. `AGGREGATES` has a row for each value of
--aggregate.
"""

from thinwire.ops.aggregation.base import Aggregate
from thinwire.ops.aggregation.registry import AGGREGATES

__all__ = ["AGGREGATES", "Aggregate"]
