"""Counters of one shard, over all and by group, for the status document and summary.json."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from thinwire.ops.types import State
from thinwire.ops.weighting.base import staleness
from thinwire.ps.core import events
from thinwire.runtime.telemetry.run_status import Histogram

#: 1/Y falls below a tenth beyond this Y.
_STALE = 10
#: With more groups only the figures are reported, not the histograms.
_MOST_HISTOGRAMS = 64


@dataclasses.dataclass
class GroupTotals:
    """Totals of one group, whenever it existed."""

    updates: int = 0
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    wait_seconds: float = 0.0  # of all members together

    @property
    def pushes(self) -> int:
        """How many of its members' updates were merged."""
        return sum(self.staleness.values())


class GroupCounters:
    """Totals of every group, by its members as ``--groups`` writes them."""

    def __init__(self) -> None:
        """Start without groups."""
        self._groups: dict[str, GroupTotals] = {}

    def of(self, group: str) -> GroupTotals:
        """Return a group's totals, opening them if need be."""
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = GroupTotals()
        return found

    @property
    def wait_seconds(self) -> float:
        """How long replies to members of all groups were held back."""
        return sum(totals.wait_seconds for totals in self._groups.values())

    def histograms(self) -> dict[str, dict[str, int]]:
        """Return group -> Y -> pushes, for the other shards' reports to shard 0."""
        if len(self._groups) > _MOST_HISTOGRAMS:
            return {}
        return {group: _table(totals) for group, totals in self._groups.items()}

    def summary(self) -> dict[str, Any]:
        """Return every group's row of the run's summary."""
        brief = len(self._groups) > _MOST_HISTOGRAMS
        return {group: _row(totals, brief) for group, totals in self._groups.items()}

    def to_plain(self) -> State:
        """Return plain data."""
        return {
            group: {
                "updates": totals.updates,
                "staleness": _table(totals),
                "wait_seconds": totals.wait_seconds,
            }
            for group, totals in self._groups.items()
        }

    def load_plain(self, state: State) -> None:
        """Take back what `to_plain` gave."""
        for group, row in state.items():
            counts = collections.Counter({int(y): count for y, count in row["staleness"].items()})
            self._groups[group] = GroupTotals(row["updates"], counts, row["wait_seconds"])


def _table(totals: GroupTotals) -> dict[str, int]:
    return {str(y): count for y, count in sorted(totals.staleness.items())}


def _row(totals: GroupTotals, brief: bool) -> dict[str, Any]:
    histogram = Histogram(dict(totals.staleness))
    row: dict[str, Any] = {
        "updates": totals.updates,
        "pushes": totals.pushes,
        "staleness": {"mean": histogram.mean, "p95": histogram.p95, "max": histogram.max},
        "pushes_worth_below_tenth": sum(
            count for y, count in totals.staleness.items() if y > _STALE
        ),
        "wait_seconds": totals.wait_seconds,
    }
    return row if brief else row | {"histogram": _table(totals)}


@dataclasses.dataclass
class WorkerTotals:
    """Sums over the applied pushes of one worker."""

    pushes: int = 0
    samples: int = 0
    local_steps: int = 0
    loss: float | None = None
    refused: int = 0

    def to_plain(self) -> State:
        """Return plain data."""
        return {
            "pushes": self.pushes,
            "samples": self.samples,
            "local_steps": self.local_steps,
            "loss": self.loss,
            "refused": self.refused,
        }


class Counters:
    """Everything a shard counts; only the core writes it."""

    def __init__(self) -> None:
        """Start at zero."""
        self.staleness: collections.Counter[int] = collections.Counter()
        self.rejected: collections.Counter[str] = collections.Counter()
        self.workers: dict[int, WorkerTotals] = {}
        self.groups = GroupCounters()
        self.lost_updates = 0
        self.num_replies = 0  # replies that carried weights
        self._restored_version = 0
        self._lost_before = 0

    def applied(self, push: events.Push, version: int, group: str) -> None:
        """Count one push of a group's member, merged into the update that follows `version`."""
        self.staleness[version - push.computed_at] += 1
        self.groups.of(group).staleness[staleness(version, push.computed_at)] += 1
        totals = self.worker(push.worker)
        totals.pushes += 1
        totals.samples += push.samples
        totals.local_steps += push.local_steps
        if push.samples and not push.overflow:  # else the loss means nothing
            totals.loss = push.loss

    def updated(self, group: str) -> None:
        """Count one update of a group."""
        self.groups.of(group).updates += 1

    def replied(self, group: str, waited_seconds: float) -> None:
        """Count a reply that carried weights, and how long it was held back."""
        self.num_replies += 1
        self.groups.of(group).wait_seconds += waited_seconds

    def worker(self, worker: int) -> WorkerTotals:
        """Return one worker's totals, opening them if need be."""
        return self.workers.setdefault(worker, WorkerTotals())

    def reject(self, reason: str, worker: int) -> None:
        """Count a push that never reached the model."""
        self.rejected[reason] += 1
        self.worker(worker).refused += 1

    def note_lost_updates(self, seen_version: int) -> None:
        """Count updates up to a version that somebody has seen, and that a crash has undone."""
        lost = self._lost_before + max(0, seen_version - self._restored_version)
        self.lost_updates = max(self.lost_updates, lost)

    def resumed(self, version: int) -> None:
        """Go on from a saved version: later ones that somebody has seen are lost."""
        self._restored_version, self._lost_before = version, self.lost_updates

    def state_dict(self, soft: bool) -> State:
        """Return all counters, which outlive a restart, or since which version they count."""
        if soft:
            return {"restored_version": self._restored_version, "lost_before": self._lost_before}
        return {
            "staleness": {str(delay): count for delay, count in self.staleness.items()},
            "rejected": dict(self.rejected),
            "workers": {str(worker): totals.to_plain() for worker, totals in self.workers.items()},
            "groups": self.groups.to_plain(),
            "lost_updates": self.lost_updates,
            "replies": self.num_replies,
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        if soft:
            self._restored_version = state["restored_version"]
            self._lost_before = state["lost_before"]
            return
        self.staleness = collections.Counter({int(d): n for d, n in state["staleness"].items()})
        self.rejected = collections.Counter(state["rejected"])
        self.workers = {int(w): WorkerTotals(**totals) for w, totals in state["workers"].items()}
        self.groups.load_plain(state["groups"])
        self.lost_updates, self.num_replies = state["lost_updates"], state["replies"]
