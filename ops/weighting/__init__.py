"""Weightings of stale updates: full weight, less with age, less per entry, or compensated.

A `Weighting` scales the updates of a release before they are merged. The scale depends on the
number of updates that the shard has applied since the weights at which the update was computed.
`WEIGHTINGS` has a row for each value of --weighting.
"""

from thinwire.ops.weighting.base import Arrival, ReleaseContext, Weighting, staleness
from thinwire.ops.weighting.registry import WEIGHTINGS

__all__ = ["WEIGHTINGS", "Arrival", "ReleaseContext", "Weighting", "staleness"]
