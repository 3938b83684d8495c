"""Changes of the groups during a run, from measured speeds, consistently on all shards.

Shard 0 (RegroupPlanner) measures the time from a reply to a worker's next push and proposes groups.
It then holds back each worker that has finished a round, and changes the groups when no worker is
computing. The following shards (RegroupFollower) receive the groups with the last step of each
worker in the old groups. They release the pushes up to these steps in the old groups, and defer
later pushes until they have changed the groups too. A push is thus merged with the pushes of the
same workers on every shard.
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
from thinwire.ps.core import events

#: A worker's speed is the median of at most this many of its newest cycles (reply to next push).
_CYCLES = 8
#: With fewer cycles than this a worker has no measured speed.
_LEAST_CYCLES = 3
#: Number of comparisons of the speeds in one regroup interval.
_LOOKS_PER_INTERVAL = 10
#: Number of consecutive comparisons that must propose the same groups before the groups change.
_LEAST_LOOKS = 3


class RegroupPlanner:
    """Measures speeds and plans the groups, on shard 0; idle if the run has fixed groups.

    Attributes:
        formed: Newest groups formed, which the epochs announce; None: the groups of the start.
        num_formed: Number of changes of the groups.
        speeds_found: Worker -> samples per second, from which the newest groups were formed.
    """

    def __init__(self, auto: AutoGroups | None, nb_workers: int) -> None:
        """Start without measurements.

        Args:
            auto: Settings of groups by measured speed; None if the run has fixed groups.
            nb_workers: Number of workers.
        """
        self._auto, self._nb_workers = auto, nb_workers
        self._replied_at: dict[int, float] = {}  # worker -> time of its reply, while it computes
        self._paces: dict[int, collections.deque[float]] = {}  # worker -> seconds per sample
        self._look_at = 0.0  # time of the next comparison
        self._proposed: tuple[Groups, int] = ((), 0)  # groups, number of consecutive proposals
        self._target: Groups | None = None  # groups to form when no worker is computing
        self.formed: events.GroupAssignment | None = None
        self.num_formed = 0
        self.speeds_found: Mapping[int, float] = {}

    @property
    def is_on(self) -> bool:
        """Whether the run forms its groups from measured speeds."""
        return self._auto is not None

    @property
    def has_target(self) -> bool:
        """Whether groups are to be formed when no worker is computing."""
        return self._target is not None

    # -- measuring --------------------------------------------------------------------------

    def replied(self, worker: int, step: int, now: float) -> None:
        """Record that a worker proceeds; start the measurement of its cycle."""
        # The cycle after a pull (step 0) is not measured: it contains the tracing of functions.
        if self._auto is not None and step:
            self._replied_at[worker] = now

    def pushed(self, push: events.Push, now: float) -> None:
        """Record a push; end the measurement of its worker's cycle."""
        since = self._replied_at.pop(push.worker, None)
        if since is not None and now > since and push.samples:
            paces = self._paces.setdefault(push.worker, collections.deque(maxlen=_CYCLES))
            paces.append((now - since) / push.samples)

    def left(self, worker: int) -> None:
        """Remove the measurements of a worker: it may return on another machine."""
        self._replied_at.pop(worker, None)
        self._paces.pop(worker, None)

    def _speeds(self, workers: Collection[int]) -> dict[int, float]:
        """Return worker -> samples per second, for the workers with enough measured cycles."""
        return {
            worker: 1.0 / statistics.median(self._paces[worker])
            for worker in workers
            if len(self._paces.get(worker, ())) >= _LEAST_CYCLES
        }

    # -- changing ---------------------------------------------------------------------------

    def propose(self, now: float, live: Collection[int], version: int, current: Groups) -> bool:
        """Return whether to form other groups; if so, set them as the target."""
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
        """Return whether the same proposal was worth a change several times in a row."""
        worth = is_worth_changing(current, groups, speeds)
        before, times = self._proposed
        self._proposed = (groups, times + 1 if groups == before else 1) if worth else ((), 0)
        return self._proposed[1] >= _LEAST_LOOKS

    def abandon(self) -> bool:
        """Drop the target because the run is ending; return whether there was a target."""
        target, self._target = self._target, None
        return target is not None

    def form(self, epoch: int, last_steps: Mapping[int, int]) -> events.GroupAssignment:
        """Return the assignment of the target groups, to be formed while all workers wait.

        Args:
            epoch: Number of the epoch in which the groups come into force.
            last_steps: Live worker -> newest accepted step.
        """
        groups, self._target = self._target or (), None
        self._proposed = ((), 0)
        self.formed = events.GroupAssignment(epoch, groups, dict(last_steps))
        self.num_formed += 1
        return self.formed

    # -- state ------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the figures for the run's summary; {} if the run has fixed groups."""
        if self._auto is None:
            return {}
        speeds = {str(worker): speed for worker, speed in sorted(self.speeds_found.items())}
        return {"times_formed": self.num_formed, "samples_per_second": speeds}

    def resumed(self, epoch: int) -> events.GroupAssignment | None:
        """Return the groups formed before a restart, now in this epoch; None: none were formed."""
        # The other shards accept only groups of a newer epoch than their own. All workers join
        # again after a restart, so no push for the old groups is awaited (`after` is {}).
        if self.formed is not None:
            self.formed = events.GroupAssignment(epoch, self.formed.groups, {})
        return self.formed

    def state_dict(self, soft: bool) -> State:
        """Return the formed groups (durable), or measurements, target and groups (soft)."""
        if not soft:
            return {"formed_groups": format_groups(self.formed.groups) if self.formed else ""}
        return {
            "replied_at": dict(self._replied_at),
            "paces": {worker: paces.copy() for worker, paces in self._paces.items()},
            "look_at": self._look_at,
            "proposed": self._proposed,
            "target": self._target,
            "formed": self.formed,
            "num_formed": self.num_formed,
            "speeds_found": dict(self.speeds_found),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore a saved state; without the soft state the speeds must be measured again."""
        if not soft:
            text = state["formed_groups"]
            self.formed = events.GroupAssignment(0, parse_groups(text), {}) if text else None
            return
        self._replied_at, self._paces = dict(state["replied_at"]), dict(state["paces"])
        self._look_at, self._proposed = state["look_at"], state["proposed"]
        self._target, self.formed = state["target"], state["formed"]
        self.num_formed, self.speeds_found = state["num_formed"], state["speeds_found"]


class RegroupFollower:
    """Changes the groups on a following shard after shard 0 has changed them.

    Attributes:
        formed: Newest groups that shard 0 has announced; None: the groups of the start.
        num_formed: Number of changes of the groups on this shard.
    """

    def __init__(self) -> None:
        """Start with the groups of the start and no announced change."""
        self.formed: events.GroupAssignment | None = None
        self.num_formed = 0
        self._in_force: Groups | None = None  # None: the groups of the start
        # Announced changes that are not made yet, oldest first.
        self._awaited: collections.deque[events.GroupAssignment] = collections.deque()
        # Worker -> step that must arrive before the oldest announced change can be made.
        self._waits_for: dict[int, int] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether an announced change of the groups is not made yet."""
        return bool(self._awaited)

    def receive(self, epoch: events.MembershipEpoch, current: Groups) -> None:
        """Record the groups that shard 0 announces.

        Args:
            epoch: Announcement of shard 0.
            current: Groups in force on this shard.
        """
        formed = epoch.formed
        # Every epoch repeats the newest groups: only a newer assignment is a change.
        if formed is None or (self.formed is not None and formed.epoch <= self.formed.epoch):
            return
        alone = not self._awaited
        self.formed, self._in_force = formed, current
        if alone and formed.groups == current:
            return
        # A worker that has left since the change pushes nothing more, so its last step is not
        # awaited: the change would wait for ever.
        live = set(epoch.live)
        after = {worker: step for worker, step in formed.after.items() if worker in live}
        self._awaited.append(events.GroupAssignment(formed.epoch, formed.groups, after))
        if alone:
            self._waits_for = dict(after)

    def defers(self, worker: int, step: int) -> bool:
        """Return whether a push belongs to groups that this shard has not formed yet.

        Args:
            worker: Id of the worker.
            step: Step of the push.
        """
        return self.is_waiting and step > self._waits_for.get(worker, -1)

    def left(self, worker: int) -> None:
        """Wait no longer for pushes of a worker that has left."""
        self._waits_for.pop(worker, None)

    def ready(
        self, last_steps: Mapping[int, int], present: Collection[int]
    ) -> events.GroupAssignment | None:
        """Return the groups to form now, if all pushes for the old groups have arrived.

        Args:
            last_steps: Worker -> newest accepted step.
            present: Ids of the live and joining workers.
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
        """Return the groups in force before a restart, now in this epoch; None: none formed."""
        return events.GroupAssignment(epoch, self._in_force, {}) if self._in_force else None

    def state_dict(self, soft: bool) -> State:
        """Return the groups in force (durable), or the announced changes (soft)."""
        if not soft:
            return {"formed_groups": format_groups(self._in_force) if self._in_force else ""}
        return {
            "formed": self.formed,
            "num_formed": self.num_formed,
            "awaited": self._awaited.copy(),
            "waits_for": dict(self._waits_for),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the state that `state_dict` returned."""
        if not soft:
            text = state["formed_groups"]
            self._in_force = parse_groups(text) if text else None
            return
        self.formed, self.num_formed = state["formed"], state["num_formed"]
        self._awaited, self._waits_for = state["awaited"], dict(state["waits_for"])
