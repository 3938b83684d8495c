"""What a stale update is worth: all, less by its age, less entry by entry, or compensated.

A `Weighting` scales the updates of a release before they are merged, by how far the shard has gone
on since the weights that they were computed at. A value of --weighting is a row of `WEIGHTINGS`.
"""

from thinwire.ops.weighting.base import Arrival, ReleaseContext, Weighting, staleness
from thinwire.ops.weighting.registry import WEIGHTINGS

__all__ = ["WEIGHTINGS", "Arrival", "ReleaseContext", "Weighting", "staleness"]
