"""The interface of aggregates: policies that merge the updates of one release.

The weighting first scales each update separately. The aggregate then merges them into one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from thinwire.ops.types import Policy, Update


class Aggregate(Policy, Protocol):
    """Merges the updates of one release into one update."""

    @property
    def name(self) -> str:
        """Value of --aggregate that selects this aggregate."""

    @property
    def is_robust(self) -> bool:
        """True if the honest workers outvote a faulty worker."""

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Merge one or more updates into one; `size` is the shard's number of entries."""
