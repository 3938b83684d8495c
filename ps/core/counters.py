"""Counters of one PS shard, in total and by worker group, for the run's status and summary.json."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from thinwire.ops.types import State
from thinwire.ops.weighting.base import staleness
from thinwire.ps.core import attributes, events
from thinwire.runtime.telemetry.run_status import Histogram

#: Staleness Y (versions) above which the weight 1/Y of a push is below a tenth.
_STALE = 10
#: Largest number of worker groups whose staleness histograms a shard reports. With more groups the
#: report omits all histograms, which bounds the report's size.
_MOST_HISTOGRAMS = 64
#: Attributes of the `Counters` that only a journal keeps.
_SOFT = ("_restored_version", "_lost_before")


@dataclasses.dataclass
class GroupTotals:
    """Counts and waiting time of one worker group, summed over all periods in which it existed."""

    updates: int = 0
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    wait_seconds: float = 0.0  # time by which the shard delayed replies, summed over the workers

    @property
    def pushes(self) -> int:
        """Number of a worker group's pushes that were merged into updates."""
        return sum(self.staleness.values())


class GroupCounters:
    """Counters by worker group; a group's key lists its worker ids in the syntax of --groups."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupTotals] = {}

    def of(self, group: str) -> GroupTotals:
        """Return the counters of a worker group; create the counters if the group is new."""
        totals = self._groups.get(group)
        if totals is None:
            totals = self._groups[group] = GroupTotals()
        return totals

    @property
    def wait_seconds(self) -> float:
        """Seconds for which the shard delayed its replies, summed over the workers of all
        groups.
        """
        return sum(totals.wait_seconds for totals in self._groups.values())

    def histograms(self) -> dict[str, dict[str, int]]:
        """Return worker group -> staleness -> number of pushes, for a shard's report to shard 0."""
        if len(self._groups) > _MOST_HISTOGRAMS:
            return {}
        return {group: _table(totals) for group, totals in self._groups.items()}

    def summary(self) -> dict[str, Any]:
        """Return worker group -> counters of the group, for the run's summary."""
        brief = len(self._groups) > _MOST_HISTOGRAMS
        return {group: _row(totals, brief) for group, totals in self._groups.items()}

    def to_plain(self) -> State:
        """Return the counts and waiting times of all worker groups as dicts and numbers, for a
        checkpoint.
        """
        return {
            group: {
                "updates": totals.updates,
                "staleness": _table(totals),
                "wait_seconds": totals.wait_seconds,
            }
            for group, totals in self._groups.items()
        }

    def load_plain(self, state: State) -> None:
        """Restore the worker groups' counts and waiting times from the plain data of `to_plain`."""
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
    """Sums over the applied pushes of one worker, its last loss, and its refused pushes."""

    pushes: int = 0
    samples: int = 0
    local_steps: int = 0
    loss: float | None = None
    refused: int = 0


class Counters:
    """All counters of a PS shard; only the shard's state machine changes them."""

    def __init__(self) -> None:
        self.staleness: collections.Counter[int] = collections.Counter()
        self.rejected: collections.Counter[str] = collections.Counter()
        self.workers: dict[int, WorkerTotals] = {}
        self.groups = GroupCounters()
        self.lost_updates = 0
        self.num_replies = 0  # number of replies that sent weights to workers
        self._restored_version = 0
        self._lost_before = 0

    def applied(self, push: events.Push, version: int, group: str) -> None:
        """Count a push of a worker in `group` that was merged into the update of model version
        `version`.
        """
        self.staleness[version - push.origin.computed_at] += 1
        self.groups.of(group).staleness[staleness(version, push.origin.computed_at)] += 1
        totals = self.worker(push.worker)
        totals.pushes += 1
        totals.samples += push.head.samples
        totals.local_steps += push.head.local_steps
        # A push without examples or with an overflow has no loss.
        if push.head.samples and not push.head.overflow:
            totals.loss = push.head.loss

    def updated(self, group: str) -> None:
        """Count one update that the shard merged from the pushes of a worker group."""
        self.groups.of(group).updates += 1

    def replied(self, group: str, waited_seconds: float) -> None:
        """Count a reply with weights, and the seconds for which the shard delayed the reply."""
        self.num_replies += 1
        self.groups.of(group).wait_seconds += waited_seconds

    def worker(self, worker: int) -> WorkerTotals:
        """Return the sums over one worker's pushes; create sums of 0 if the worker is new."""
        return self.workers.setdefault(worker, WorkerTotals())

    def reject(self, reason: str, worker: int) -> None:
        """Count a worker's refused push, separately for each reason of refusal."""
        self.rejected[reason] += 1
        self.worker(worker).refused += 1

    def note_lost_updates(self, seen_version: int) -> None:
        """Count updates lost in a crash of the shard; some worker holds a version with these
        updates.
        """
        # Several workers may hold weights from before the crash. The updates that these workers
        # have seen overlap, so the count of lost updates is a maximum over the workers and not a
        # sum.
        lost = self._lost_before + max(0, seen_version - self._restored_version)
        self.lost_updates = max(self.lost_updates, lost)

    def resumed(self, version: int) -> None:
        """Record that the restarted shard continues from a saved version of its weights."""
        self._restored_version, self._lost_before = version, self.lost_updates

    def state_dict(self, soft: bool) -> State:
        """Return all counters of the shard, or if `soft`, the model version from which a restart
        continued.
        """
        if soft:
            return attributes.saved(self, _SOFT)
        return {
            "staleness": {str(delay): count for delay, count in self.staleness.items()},
            "rejected": dict(self.rejected),
            "workers": {
                str(worker): vars(totals).copy() for worker, totals in self.workers.items()
            },
            "groups": self.groups.to_plain(),
            "lost_updates": self.lost_updates,
            "replies": self.num_replies,
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the shard's counters that `state_dict` returned."""
        if soft:
            attributes.restore(self, _SOFT, state)
            return
        self.staleness = collections.Counter({int(d): n for d, n in state["staleness"].items()})
        self.rejected = collections.Counter(state["rejected"])
        self.workers = {int(w): WorkerTotals(**totals) for w, totals in state["workers"].items()}
        self.groups.load_plain(state["groups"])
        self.lost_updates, self.num_replies = state["lost_updates"], state["replies"]
