"""Changes the worker groups during a run, by measured speeds, consistently on all shards.

Shard 0 (RegroupPlanner) measures the time from a reply to the worker's next push and proposes
groups of workers with similar times. To change the worker groups, shard 0 delays its reply to each
worker that has finished a round, and changes the groups when no worker is computing. All shards
except shard 0 (RegroupFollower) receive the new groups with the last step of each worker in the old
groups. A shard other than 0 merges the pushes up to the last steps in the old groups, and defers
later pushes until it has changed the groups too. Every shard merges its part of a worker's push
with the pushes of the same group of workers.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Collection, Mapping
from typing import Any

from thinwire.ops.sync.groups import (
    AutoGroups,
    Groups,
    format_groups,
    is_worth_changing,
    parse_groups,
    propose_groups,
)
from thinwire.ops.types import State
from thinwire.ps.core import attributes, events

#: Largest number of a worker's newest cycles (from a reply to the next push) that determine its
#: speed. The speed is the median over these cycles.
_CYCLES = 8
#: Smallest number of measured cycles (from a reply to the next push) that gives a worker a speed.
_LEAST_CYCLES = 3
#: Number of times per regroup interval that shard 0 compares the workers' speeds.
_LOOKS_PER_INTERVAL = 10
#: Number of consecutive comparisons of speeds that must propose the same groups before shard 0
#: changes the groups.
_LEAST_LOOKS = 3
#: Attributes of the planner and of the follower that only a journal keeps.
_SOFT_OF_PLANNER = (
    *("_replied_at", "_paces", "_look_at", "_proposed", "_target"),
    *("formed", "num_formed", "speeds_found"),
)
_SOFT_OF_FOLLOWER = ("formed", "num_formed", "_awaited", "_waits_for")


class RegroupPlanner:
    """Measures workers' speeds and plans the worker groups on shard 0, if groups may change.

    Attributes:
        formed: Newest worker groups formed during the run, which the membership epochs announce;
            None: the groups of the run's start are in force.
        num_formed: Number of times that shard 0 has changed the worker groups.
        speeds_found: Worker id -> examples per second, from which the newest groups were formed.
    """

    def __init__(self, auto: AutoGroups | None, nb_workers: int) -> None:
        """Start the planner of worker groups without measured speeds of workers.

        Args:
            auto: Settings for worker groups by measured speed; None if the run has fixed groups.
            nb_workers: Number of workers in the run.
        """
        self._auto, self._nb_workers = auto, nb_workers
        # Computing worker's id -> time of the shard's reply to the worker.
        self._replied_at: dict[int, float] = {}
        # Worker id -> newest measurements of seconds per example.
        self._paces: dict[int, collections.deque[float]] = {}
        self._look_at = 0.0  # time of the next comparison of the workers' speeds
        # Newest proposed worker groups, and number of consecutive comparisons of speeds that
        # proposed them.
        self._proposed: tuple[Groups, int] = ((), 0)
        # Planned worker groups, which are formed when no worker computes.
        self._target: Groups | None = None
        self.formed: events.GroupAssignment | None = None
        self.num_formed = 0
        self.speeds_found: Mapping[int, float] = {}

    @property
    def is_on(self) -> bool:
        """True if the run forms its worker groups from measured speeds."""
        return self._auto is not None

    @property
    def has_target(self) -> bool:
        """True if shard 0 will form new worker groups as soon as no worker is computing."""
        return self._target is not None

    # -- measuring --------------------------------------------------------------------------

    def replied(self, worker: int, step: int, now: float) -> None:
        """Start the measurement of a worker's cycle (reply to next push): the shard has replied."""
        # The worker's cycle after a pull (step 0) is not measured, because the worker traces
        # TensorFlow functions in it.
        if self._auto is not None and step:
            self._replied_at[worker] = now

    def pushed(self, push: events.Push, now: float) -> None:
        """End the measurement of a worker's cycle (reply to next push): the push has arrived."""
        since = self._replied_at.pop(push.worker, None)
        if since is not None and now > since and push.head.samples:
            paces = self._paces.setdefault(push.worker, collections.deque(maxlen=_CYCLES))
            paces.append((now - since) / push.head.samples)

    def left(self, worker: int) -> None:
        """Remove a worker's measured speeds, because the worker may return on another machine."""
        self._replied_at.pop(worker, None)
        self._paces.pop(worker, None)

    def _speeds(self, workers: Collection[int]) -> dict[int, float]:
        """Return worker id -> examples per second, for the workers with enough measured cycles."""
        return {
            worker: 1.0 / statistics.median(self._paces[worker])
            for worker in workers
            if len(self._paces.get(worker, ())) >= _LEAST_CYCLES
        }

    # -- changing ---------------------------------------------------------------------------

    def propose(self, now: float, live: Collection[int], version: int, current: Groups) -> bool:
        """Plan new worker groups if the measured speeds require it; return whether there is a
        plan.
        """
        if self._auto is None:
            return False
        interval, first = self._auto.regroup_interval_seconds, self.formed is None
        if version < self._auto.groups_warmup_updates if first else now < self._look_at:
            return False
        speeds = self._speeds(live)
        if len(speeds) < len(live):
            return False
        groups = propose_groups(speeds, self._nb_workers)
        if not first and not self._insists(current, groups, speeds):
            self._look_at = now + interval / _LOOKS_PER_INTERVAL
            return False
        self._look_at = now + interval if interval else math.inf
        self.speeds_found, self._target = speeds, groups
        return True

    def _insists(self, current: Groups, groups: Groups, speeds: Mapping[int, float]) -> bool:
        """Return whether `_LEAST_LOOKS` consecutive comparisons of speeds proposed the same
        groups.
        """
        worth = is_worth_changing(current, groups, speeds)
        before, times = self._proposed
        self._proposed = (groups, times + 1 if groups == before else 1) if worth else ((), 0)
        return self._proposed[1] >= _LEAST_LOOKS

    def abandon(self) -> bool:
        """Drop the planned worker groups, as the run is ending; return whether there was a plan."""
        target, self._target = self._target, None
        return target is not None

    def form(self, epoch: int, last_steps: Mapping[int, int]) -> events.GroupAssignment:
        """Return the planned worker groups, which come into force now, while all live workers wait.

        Args:
            epoch: Number of the membership epoch in which the groups come into force.
            last_steps: Live worker id -> newest step of the worker that the shard has accepted.
        """
        groups, self._target = self._target or (), None
        self._proposed = ((), 0)
        self.formed = events.GroupAssignment(epoch, groups, dict(last_steps))
        self.num_formed += 1
        return self.formed

    # -- state ------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return worker speeds and changes of worker groups, for the summary; {} if groups are
        fixed.
        """
        if self._auto is None:
            return {}
        speeds = {str(worker): speed for worker, speed in sorted(self.speeds_found.items())}
        return {"times_formed": self.num_formed, "samples_per_second": speeds}

    def resumed(self, epoch: int) -> events.GroupAssignment | None:
        """Return the worker groups formed before a restart, as groups of membership epoch `epoch`;
        None if no groups were formed.
        """
        # The other shards accept worker groups only from a newer membership epoch than their own.
        # All workers join again after a restart, so the shards await no push for the old groups
        # (`after` is {}).
        if self.formed is not None:
            self.formed = events.GroupAssignment(epoch, self.formed.groups, {})
        return self.formed

    def state_dict(self, soft: bool) -> State:
        """Return the formed worker groups; if `soft`, also the measured speeds and the planned
        groups.
        """
        if not soft:
            return {"formed_groups": format_groups(self.formed.groups) if self.formed else ""}
        return attributes.saved(self, _SOFT_OF_PLANNER)

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the saved worker groups and speeds; if no speeds are saved, measure speeds
        again.
        """
        if not soft:
            text = state["formed_groups"]
            self.formed = events.GroupAssignment(0, parse_groups(text), {}) if text else None
            return
        attributes.restore(self, _SOFT_OF_PLANNER, state)


class RegroupFollower:
    """Changes the worker groups on a shard other than 0, after shard 0 has changed the groups.

    Attributes:
        formed: Newest worker groups that shard 0 has announced; None: the groups of the run's start
            are in force.
        num_formed: Number of times that this shard has changed the worker groups.
    """

    def __init__(self) -> None:
        """Start with the worker groups of the run's start, and without an announced change."""
        self.formed: events.GroupAssignment | None = None
        self.num_formed = 0
        # Worker groups in force on this shard; None: the groups of the run's start.
        self._in_force: Groups | None = None
        # Announced changes of the worker groups that this shard has not made yet, oldest first.
        self._awaited: collections.deque[events.GroupAssignment] = collections.deque()
        # Worker id -> step whose push must arrive before this shard can make the oldest announced
        # change of the groups.
        self._waits_for: dict[int, int] = {}

    @property
    def is_waiting(self) -> bool:
        """True if shard 0 has announced a change of the worker groups that this shard must still
        make.
        """
        return bool(self._awaited)

    def receive(self, epoch: events.MembershipEpoch, current: Groups) -> None:
        """Record the worker groups that shard 0 announces.

        Args:
            epoch: Membership epoch (numbered list of live workers) that shard 0 announces.
            current: Worker groups in force on this shard.
        """
        formed = epoch.formed
        # Every membership epoch repeats the newest worker groups of shard 0. Only groups of a later
        # epoch than the newest known groups are a change.
        if formed is None or (self.formed is not None and formed.epoch <= self.formed.epoch):
            return
        alone = not self._awaited
        self.formed, self._in_force = formed, current
        if alone and formed.groups == current:
            return
        # A worker that has left since shard 0 changed the groups sends no push. If this shard
        # waited for the worker's last step, the change would wait for ever.
        live = set(epoch.live)
        after = {worker: step for worker, step in formed.after.items() if worker in live}
        self._awaited.append(events.GroupAssignment(formed.epoch, formed.groups, after))
        if alone:
            self._waits_for = dict(after)

    def defers(self, worker: int, step: int) -> bool:
        """Return whether a push belongs to worker groups that this shard has not formed yet.

        Args:
            worker: Id of the worker that pushes.
            step: Training step of the worker that the push belongs to.
        """
        return self.is_waiting and step > self._waits_for.get(worker, -1)

    def left(self, worker: int) -> None:
        """Record that a worker has left, so that a change of the groups does not wait for its
        push.
        """
        self._waits_for.pop(worker, None)

    def ready(
        self, last_steps: Mapping[int, int], present: Collection[int]
    ) -> events.GroupAssignment | None:
        """Return the worker groups to form now; None if a push for the old groups is still missing.

        Args:
            last_steps: Worker id -> newest step of the worker that this shard has accepted.
            present: Ids of the workers that are live or about to join the run.
        """
        if any(last_steps.get(worker, -1) < step for worker, step in self._waits_for.items()):
            return None
        formed = self._awaited.popleft()
        self._in_force = formed.groups
        self.num_formed += 1
        after = self._awaited[0].after if self._awaited else {}
        self._waits_for = {worker: step for worker, step in after.items() if worker in present}
        return formed

    def resumed(self, epoch: int) -> events.GroupAssignment | None:
        """Return the worker groups in force before a restart, as groups of membership epoch
        `epoch`; None if no groups were formed.
        """
        return events.GroupAssignment(epoch, self._in_force, {}) if self._in_force else None

    def state_dict(self, soft: bool) -> State:
        """Return the worker groups in force, or if `soft`, the announced changes of these
        groups.
        """
        if not soft:
            return {"formed_groups": format_groups(self._in_force) if self._in_force else ""}
        return attributes.saved(self, _SOFT_OF_FOLLOWER)

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the worker groups or their announced changes that `state_dict` returned."""
        if not soft:
            text = state["formed_groups"]
            self._in_force = parse_groups(text) if text else None
            return
        attributes.restore(self, _SOFT_OF_FOLLOWER, state)
