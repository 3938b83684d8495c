"""Interface of aggregates: policies that merge the workers' updates of one round into one update.

A weighting policy first scales each worker's update separately. The aggregate then merges the
scaled updates of the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from thinwire.ops.types import Policy, Update


class Aggregate(Policy, Protocol):
    """Merges the workers' updates of a round on a shard server into one update."""

    @property
    def name(self) -> str:
        """Value of the flag --aggregate that selects this aggregate."""

    @property
    def is_robust(self) -> bool:
        """True if the updates of honest workers outvote the update of a faulty worker."""

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Merge one or more updates into one; `size` is the shard server's number of weights."""
