"""What the updates of one release are merged into, and guards against faulty ones.

An `Aggregate` makes one update of all: their mean, or something that no outlier can move. The
module `outliers` limits the norm of an update, and decides which workers are quarantined. A value
of --aggregate is a row of `AGGREGATES`.
"""

from thinwire.ops.aggregation.base import Aggregate
from thinwire.ops.aggregation.registry import AGGREGATES

__all__ = ["AGGREGATES", "Aggregate"]
