"""What each group has done: how stale its updates were, and how long its members waited."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from ops.metrics import Histogram
from ops.types import State

#: 1/Y falls below a tenth beyond this Y.
_STALE = 10
#: With more groups only the figures are told, not the histograms.
_MOST_HISTOGRAMS = 64


@dataclasses.dataclass
class GroupAccount:
    """Totals of one group, whenever it existed."""

    updates: int = 0
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    wait_seconds: float = 0.0  # of all members together

    @property
    def pushes(self) -> int:
        """How many of its members' updates were merged."""
        return sum(self.staleness.values())


class GroupAccounts:
    """Totals of every group, by its members as ``--groups`` writes them."""

    def __init__(self) -> None:
        """Start without groups."""
        self._groups: dict[str, GroupAccount] = {}

    def of(self, group: str) -> GroupAccount:
        """Return a group's account, opening it if need be."""
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = GroupAccount()
        return found

    @property
    def wait_seconds(self) -> float:
        """How long replies to members of all groups were held back."""
        return sum(account.wait_seconds for account in self._groups.values())

    def histograms(self) -> dict[str, dict[str, int]]:
        """Return group -> Y -> pushes, for the other shards' reports to shard 0."""
        if len(self._groups) > _MOST_HISTOGRAMS:
            return {}
        return {group: _table(account) for group, account in self._groups.items()}

    def summary(self) -> dict[str, Any]:
        """Return every group's row of the run's summary."""
        brief = len(self._groups) > _MOST_HISTOGRAMS
        return {group: _row(account, brief) for group, account in self._groups.items()}

    def save(self) -> State:
        """Return plain data."""
        return {
            group: {
                "updates": account.updates,
                "staleness": _table(account),
                "wait_seconds": account.wait_seconds,
            }
            for group, account in self._groups.items()
        }

    def restore(self, state: State) -> None:
        """Take back what `save` gave."""
        for group, row in state.items():
            counts = collections.Counter({int(y): count for y, count in row["staleness"].items()})
            self._groups[group] = GroupAccount(row["updates"], counts, row["wait_seconds"])


def _table(account: GroupAccount) -> dict[str, int]:
    return {str(y): count for y, count in sorted(account.staleness.items())}


def _row(account: GroupAccount, brief: bool) -> dict[str, Any]:
    histogram = Histogram(dict(account.staleness))
    row: dict[str, Any] = {
        "updates": account.updates,
        "pushes": account.pushes,
        "staleness": {"mean": histogram.mean, "p95": histogram.p95, "max": histogram.max},
        "pushes_worth_below_tenth": sum(
            count for y, count in account.staleness.items() if y > _STALE
        ),
        "wait_seconds": account.wait_seconds,
    }
    return row if brief else row | {"histogram": _table(account)}
