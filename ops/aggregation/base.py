"""The interface of aggregates: policies that merge the updates of one round into one update.

The weighting first scales each worker's update separately. The aggregate then merges the updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from thinwire.ops.types import Policy, Update


class Aggregate(Policy, Protocol):
    """Merges the workers' updates that a shard releases together into one update."""

    @property
    def name(self) -> str:
        """Value of --aggregate that selects this aggregate."""

    @property
    def is_robust(self) -> bool:
        """True if the updates of honest workers outvote the update of a faulty worker."""

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Merge one or more updates into one; `size` is the shard's number of weights."""
