"""Counters of one shard: what the status document and summary.json are made of.

What each group has done: how stale its updates were, and how long its members waited.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from thinwire.ops.telemetry.run_status import Histogram
from thinwire.ops.types import State
from thinwire.ops.weighting.base import staleness
from thinwire.ps.core import events

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


@dataclasses.dataclass
class WorkerAccount:
    """What one worker's applied pushes add up to."""

    pushes: int = 0
    samples: int = 0
    local_steps: int = 0
    loss: float | None = None
    refused: int = 0


class Accounts:
    """Everything a shard counts; only the core writes it."""

    def __init__(self) -> None:
        """Start at zero."""
        self.staleness: collections.Counter[int] = collections.Counter()
        self.rejected: collections.Counter[str] = collections.Counter()
        self.workers: dict[int, WorkerAccount] = {}
        self.groups = GroupAccounts()
        self.lost_updates = 0
        self.num_replies = 0  # replies that carried weights
        self.first_pull_at: float | None = None
        self.last_update_at: float | None = None
        self.ended_at: float | None = None
        self.seconds_before = 0.0  # of earlier lives
        self._restored_version = 0
        self._lost_before = 0

    def applied(self, push: events.Push, version: int, group: str) -> None:
        """Count one push of a group's member, merged into the update that follows `version`."""
        self.staleness[version - push.computed_at] += 1
        self.groups.of(group).staleness[staleness(version, push.computed_at)] += 1
        account = self.worker(push.worker)
        account.pushes += 1
        account.samples += push.samples
        account.local_steps += push.local_steps
        account.loss = push.loss

    def updated(self, group: str, now: float) -> None:
        """Count one update of a group."""
        self.groups.of(group).updates += 1
        self.last_update_at = now

    def replied(self, group: str, waited_seconds: float) -> None:
        """Count a reply that carried weights, and how long it was held back."""
        self.num_replies += 1
        self.groups.of(group).wait_seconds += waited_seconds

    def worker(self, worker: int) -> WorkerAccount:
        """Return one worker's account, opening it if need be."""
        return self.workers.setdefault(worker, WorkerAccount())

    def reject(self, reason: str, worker: int) -> None:
        """Count a push that never reached the model."""
        self.rejected[reason] += 1
        self.worker(worker).refused += 1

    def note_lost_updates(self, seen_version: int) -> None:
        """Hear of a version that a crash has undone."""
        lost = self._lost_before + max(0, seen_version - self._restored_version)
        self.lost_updates = max(self.lost_updates, lost)

    def seconds(self) -> float:
        """Return seconds from the first pull to the last applied update, over all lives."""
        if self.first_pull_at is None or self.last_update_at is None:
            return self.seconds_before
        return self.seconds_before + max(0.0, self.last_update_at - self.first_pull_at)

    def save(self) -> State:
        """Return plain data."""
        return {
            "staleness": {str(delay): count for delay, count in self.staleness.items()},
            "rejected": dict(self.rejected),
            "workers": {str(w): dataclasses.asdict(a) for w, a in self.workers.items()},
            "groups": self.groups.save(),
            "lost_updates": self.lost_updates,
            "replies": self.num_replies,
            "seconds": self.seconds(),
        }

    def restore(self, state: State, version: int) -> None:
        """Take back what `save` gave, for a shard restarted at `version`."""
        self.staleness = collections.Counter({int(d): n for d, n in state["staleness"].items()})
        self.rejected = collections.Counter(state["rejected"])
        self.workers = {int(w): WorkerAccount(**a) for w, a in state["workers"].items()}
        self.groups.restore(state["groups"])
        self.lost_updates = self._lost_before = state["lost_updates"]
        self.num_replies = state["replies"]
        self.seconds_before = state["seconds"]
        self._restored_version = version
