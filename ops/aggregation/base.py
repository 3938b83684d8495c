"""Interface of aggregates: policies that merge the workers' updates of a round into one update.

Before an aggregate merges updates, a weighting policy scales each worker's update separately. The
aggregate merges the updates that the weighting policy has scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from thinwire.ops.policy import Policy
from thinwire.ops.types import Update


class Aggregate(Policy, Protocol):
    """Merges the workers' updates of a round on a shard server into one update."""

    @property
    def name(self) -> str:
        """Value of the flag --aggregate that selects this aggregate."""

    @property
    def is_robust(self) -> bool:
        """True if the aggregate lets the updates of honest workers outvote a faulty update."""

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Merge one or more updates of a shard server with `size` weights into one update."""
