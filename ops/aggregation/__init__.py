"""Aggregates merge the workers' updates of one round; guards reject faulty updates.

An `Aggregate` merges all updates that a shard releases together into one update: their mean, or a
value per entry that a single outlier cannot move. The module `outliers` limits the magnitude and
the norm of an update, and holds the limits for quarantining a worker. `AGGREGATES` has a row for
each value of the flag --aggregate.
"""

from thinwire.ops.aggregation.base import Aggregate
from thinwire.ops.aggregation.registry import AGGREGATES

__all__ = ["AGGREGATES", "Aggregate"]
