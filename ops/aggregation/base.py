"""The interface of aggregates: what the updates of one release are merged into.

A policy beside the weighting: the weighting scales each update, this makes one of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from thinwire.ops.types import Policy, Update


class Aggregate(Policy, Protocol):
    """What makes one update of a release's."""

    @property
    def name(self) -> str:
        """Its value of --aggregate."""

    @property
    def is_robust(self) -> bool:
        """Whether a faulty worker is outvoted."""

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Return one update of one or more; `size` is the shard's number of entries."""
