"""Aggregates merge the workers' updates of one round; guards reject faulty updates.

An `Aggregate` merges all updates of a round into one update: their mean, or a value per weight that
a single outlier cannot move. The module `outliers` limits the magnitude and the norm of a worker's
update, and holds the limits for quarantining a worker. The dict `AGGREGATES` has an entry for each
value of the flag --aggregate.
"""

from thinwire.ops.aggregation.base import Aggregate
from thinwire.ops.aggregation.registry import AGGREGATES

__all__ = ["AGGREGATES", "Aggregate"]
