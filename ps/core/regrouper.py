"""Groups formed anew while a run goes on: from the speeds shard 0 measures, on every shard alike.

Shard 0 (RegroupPlanner) measures how long each worker takes from a reply to its next push, proposes
groups, holds back everybody who has finished a round, and changes groups when nobody is computing.
The other shards (RegroupFollower) receive the groups with the step that each worker had finished:
they bring those pushes through their rounds in the old groups, and let later ones wait until they
have changed groups too. So every push is merged with the same others everywhere.
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

#: A worker's speed is the median of this many of its newest cycles ...
_CYCLES = 8
#: ... and of no fewer than these.
_LEAST_CYCLES = 3
#: How often speeds are compared in the time in which groups may change once ...
_LOOKS_PER_INTERVAL = 10
#: ... and how often in a row the same groups must be proposed.
_LEAST_LOOKS = 3


class RegroupPlanner:
    """Shard 0's half; idle where groups are given.

    Attributes:
        formed: The newest groups, which the other shards must know; None: those at the start.
        num_formed: How often groups were formed.
        speeds_found: Worker -> samples per second, from which the newest groups were formed.
    """

    def __init__(self, auto: AutoGroups | None, nb_workers: int) -> None:
        """Start with nothing measured.

        Args:
            auto: Of a run with groups by measured speed; else None.
            nb_workers: n.
        """
        self._auto, self._nb_workers = auto, nb_workers
        self._replied_at: dict[int, float] = {}  # worker -> when it was let proceed
        self._paces: dict[int, collections.deque[float]] = {}  # worker -> seconds per sample
        self._look_at = 0.0
        self._proposed: tuple[Groups, int] = ((), 0)  # and how often in a row
        self._target: Groups | None = None  # to be formed once everybody is at rest
        self.formed: events.GroupAssignment | None = None
        self.num_formed = 0
        self.speeds_found: Mapping[int, float] = {}

    @property
    def is_on(self) -> bool:
        """Whether groups are formed by speed."""
        return self._auto is not None

    @property
    def has_target(self) -> bool:
        """Whether groups are to be formed once everybody is at rest."""
        return self._target is not None

    # -- measuring --------------------------------------------------------------------------

    def replied(self, worker: int, step: int, now: float) -> None:
        """Note that a worker proceeds; its first step, which builds its functions, is left out."""
        if self._auto is not None and step:
            self._replied_at[worker] = now

    def pushed(self, push: events.Push, now: float) -> None:
        """Note that a worker has done its next round."""
        since = self._replied_at.pop(push.worker, None)
        if since is not None and now > since and push.samples:
            paces = self._paces.setdefault(push.worker, collections.deque(maxlen=_CYCLES))
            paces.append((now - since) / push.samples)

    def left(self, worker: int) -> None:
        """Forget a worker: it may return on another machine."""
        self._replied_at.pop(worker, None)
        self._paces.pop(worker, None)

    def _speeds(self, workers: Collection[int]) -> dict[int, float]:
        """Return samples per second of those of the workers that are measured well enough."""
        return {
            worker: 1.0 / statistics.median(self._paces[worker])
            for worker in workers
            if len(self._paces.get(worker, ())) >= _LEAST_CYCLES
        }

    # -- changing ---------------------------------------------------------------------------

    def propose(self, now: float, live: Collection[int], version: int, current: Groups) -> bool:
        """Return whether other groups should be formed, which then are the target."""
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
        """Return whether other groups have been worth changing to several times in a row."""
        worth = is_worth_changing(current, groups, speeds)
        before, times = self._proposed
        self._proposed = (groups, times + 1 if groups == before else 1) if worth else ((), 0)
        return self._proposed[1] >= _LEAST_LOOKS

    def abandon(self) -> bool:
        """Form no more groups: the run is at its end; return whether some were to be formed."""
        target, self._target = self._target, None
        return target is not None

    def form(self, epoch: int, last_steps: Mapping[int, int]) -> events.GroupAssignment:
        """Return the target, to be formed now: everybody has finished a round and waits.

        Args:
            epoch: That the groups begin with.
            last_steps: Live worker -> newest step accepted.
        """
        groups, self._target = self._target or (), None
        self._proposed = ((), 0)
        self.formed = events.GroupAssignment(epoch, groups, dict(last_steps))
        self.num_formed += 1
        return self.formed

    # -- state ------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run's summary; nothing where groups are given."""
        if self._auto is None:
            return {}
        speeds = {str(worker): speed for worker, speed in sorted(self.speeds_found.items())}
        return {"times_formed": self.num_formed, "samples_per_second": speeds}

    def resumed(self, epoch: int) -> events.GroupAssignment | None:
        """Return the groups of before a restart, which go on in this epoch; None: none."""
        if self.formed is not None:  # the other shards are to be sent what holds now
            self.formed = events.GroupAssignment(epoch, self.formed.groups, {})
        return self.formed

    def state_dict(self, soft: bool) -> State:
        """Return the groups, which outlive a restart, or what was measured."""
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
        """Take back what `state_dict` gave; without the soft state speeds are measured anew."""
        if not soft:
            text = state["formed_groups"]
            self.formed = events.GroupAssignment(0, parse_groups(text), {}) if text else None
            return
        self._replied_at, self._paces = dict(state["replied_at"]), dict(state["paces"])
        self._look_at, self._proposed = state["look_at"], state["proposed"]
        self._target, self.formed = state["target"], state["formed"]
        self.num_formed, self.speeds_found = state["num_formed"], state["speeds_found"]


class RegroupFollower:
    """The other shards' half.

    Attributes:
        formed: The newest groups that shard 0 has announced; None: those at the start.
        num_formed: How often this shard has changed groups.
    """

    def __init__(self) -> None:
        """Wait for nothing."""
        self.formed: events.GroupAssignment | None = None
        self.num_formed = 0
        self._in_force: Groups | None = None  # None: those at the start
        self._awaited: collections.deque[events.GroupAssignment] = collections.deque()
        self._waits_for: dict[int, int] = {}  # worker -> step, of the first awaited

    @property
    def is_waiting(self) -> bool:
        """Whether groups are to be formed here."""
        return bool(self._awaited)

    def receive(self, epoch: events.MembershipEpoch, current: Groups) -> None:
        """Take the groups that shard 0 announces; `current` are in force here."""
        formed = epoch.formed
        if formed is None or (self.formed is not None and formed.epoch <= self.formed.epoch):
            return
        alone = not self._awaited
        self.formed, self._in_force = formed, current
        if alone and formed.groups == current:
            return
        live = set(epoch.live)
        after = {worker: step for worker, step in formed.after.items() if worker in live}
        self._awaited.append(events.GroupAssignment(formed.epoch, formed.groups, after))
        if alone:
            self._waits_for = dict(after)

    def defers(self, worker: int, step: int) -> bool:
        """Return whether a push belongs to groups that this shard has not formed yet."""
        return self.is_waiting and step > self._waits_for.get(worker, -1)

    def left(self, worker: int) -> None:
        """Forget a worker: nothing more will arrive from it."""
        self._waits_for.pop(worker, None)

    def ready(
        self, last_steps: Mapping[int, int], present: Collection[int]
    ) -> events.GroupAssignment | None:
        """Return the groups to be formed now: all pushes from before have arrived.

        Args:
            last_steps: Worker -> newest step accepted.
            present: Live and joining workers.
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
        """Return the groups of before a restart, which go on in this epoch; None: none."""
        return events.GroupAssignment(epoch, self._in_force, {}) if self._in_force else None

    def state_dict(self, soft: bool) -> State:
        """Return the groups in force, which outlive a restart, or what is awaited."""
        if not soft:
            return {"formed_groups": format_groups(self._in_force) if self._in_force else ""}
        return {
            "formed": self.formed,
            "num_formed": self.num_formed,
            "awaited": self._awaited.copy(),
            "waits_for": dict(self._waits_for),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        if not soft:
            text = state["formed_groups"]
            self._in_force = parse_groups(text) if text else None
            return
        self.formed, self.num_formed = state["formed"], state["num_formed"]
        self._awaited, self._waits_for = state["awaited"], dict(state["waits_for"])
