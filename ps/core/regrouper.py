"""Groups formed anew while a run goes on: from what shard 0 measures, on every shard alike.

Shard 0 measures how long each worker takes from an answer to its next push, proposes groups, holds
back everybody who has finished a round, and changes groups when nobody is on the way. The other
shards hear of it with what each worker had finished: they bring those pushes through their rounds
in the old groups, and let later ones wait until they have changed groups too. So every push is
merged with the same others everywhere.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from thinwire.ops.sync.groups import (
    AutoGroups,
    Groups,
    format_groups,
    is_worth_changing,
    propose_groups,
)
from thinwire.ps.core import changes, events

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore

#: Newest cycles of a worker that its speed is the median of ...
_CYCLES = 8
#: ... and as many as it takes to have one.
_LEAST_CYCLES = 3
#: How often speeds are looked at in the time in which groups may change once ...
_LOOKS_PER_INTERVAL = 10
#: ... and how often in a row they must ask for the same groups.
_LEAST_LOOKS = 3


class Regrouping:
    """One shard's part in it; idle where groups are given."""

    def __init__(self, auto: AutoGroups | None, nb_workers: int) -> None:
        """Start with nothing measured.

        Args:
            auto: On shard 0 of a run with groups by measured speed; else None.
            nb_workers: n.
        """
        self._auto, self._nb_workers = auto, nb_workers
        self._answered: dict[int, float] = {}  # worker -> when it was let go on
        self._paces: dict[int, collections.deque[float]] = {}  # worker -> seconds per sample
        self._look_at = 0.0
        self._asked_for: tuple[Groups, int] = ((), 0)  # proposed, and how often in a row
        self._target: Groups | None = None  # shard 0: to be formed once everybody is at rest
        self._awaited: collections.deque[events.GroupAssignment] = (
            collections.deque()
        )  # other shards
        self._waits_for: dict[int, int] = {}  # worker -> step, of the first awaited
        self.formed: events.GroupAssignment | None = (
            None  # the newest, which other shards must know
        )
        self.num_formed = 0
        self._found: Mapping[int, float] = {}  # the speeds that the newest groups came from

    # -- measuring --------------------------------------------------------------------------

    def answered(self, worker: int, step: int, now: float) -> None:
        """Hear that a worker goes on; its first step also builds its functions, so leave it out."""
        if self._auto is not None and step:
            self._answered[worker] = now

    def pushed(self, push: events.Push, now: float) -> None:
        """Hear that a worker has done its next round."""
        since = self._answered.pop(push.worker, None)
        if since is not None and now > since and push.samples:
            paces = self._paces.setdefault(push.worker, collections.deque(maxlen=_CYCLES))
            paces.append((now - since) / push.samples)

    def left(self, worker: int) -> None:
        """Forget a worker; nothing more will come of it, and it may return on another machine."""
        self._answered.pop(worker, None)
        self._paces.pop(worker, None)
        self._waits_for.pop(worker, None)

    def speeds(self, workers: Collection[int]) -> dict[int, float]:
        """Return samples per second of those of the workers that are measured well enough."""
        return {
            worker: 1.0 / statistics.median(self._paces[worker])
            for worker in workers
            if len(self._paces.get(worker, ())) >= _LEAST_CYCLES
        }

    # -- changing ---------------------------------------------------------------------------

    def hear(self, epoch: events.MembershipEpoch, current: Groups) -> None:
        """Take in what shard 0 says of groups (on the other shards)."""
        formed = epoch.formed
        if formed is None or (self.formed is not None and formed.epoch <= self.formed.epoch):
            return
        alone = not self._awaited
        self.formed = formed
        if alone and formed.groups == current:
            return
        live = set(epoch.live)
        after = {worker: step for worker, step in formed.after.items() if worker in live}
        self._awaited.append(events.GroupAssignment(formed.epoch, formed.groups, after))
        if alone:
            self._waits_for = after

    def defers(self, worker: int, step: int) -> bool:
        """Return whether a push belongs to groups that this shard has not formed yet."""
        return bool(self._awaited) and step > self._waits_for.get(worker, -1)

    def turn(self, core: PsCore, now: float) -> list[events.Action] | None:
        """Do what can be done now that all complete rounds are released; None: nothing."""
        if self._awaited:
            return self._catch_up(core)
        if self._auto is None or not core.sync_state["live"]:
            return None
        if core.stop_reason is not None or core.deadlines.drain is not None:
            return self._give_up(core)
        if self._target is None:
            self._target = self._decide(core, self._auto, now)
            if self._target is None:
                return None
            core.sync_state = core.sync.close(core.sync_state)
        if not core.sync.is_at_rest(core.sync_state):
            return None
        target, self._target = self._target, None
        return self._form(core, target)

    def _give_up(self, core: PsCore) -> list[events.Action] | None:
        """Let those go on who wait for other groups: the run is at its end."""
        if self._target is None:
            return None
        self._target = None
        core.sync, core.sync_state = core.sync.regroup(core.sync.groups, core.sync_state)
        return []

    def _decide(self, core: PsCore, auto: AutoGroups, now: float) -> Groups | None:
        """Return groups that should be formed."""
        live, interval = core.sync_state["live"], auto.regroup_interval_seconds
        first = self.formed is None
        too_soon = core.version < auto.groups_warmup_updates if first else now < self._look_at
        if too_soon or core.sync_state["joining"]:
            return None
        speeds = self.speeds(live)
        if len(speeds) < len(live):
            return None
        groups = propose_groups(speeds, self._nb_workers)
        if not first and not self._insists(core, groups, speeds):
            self._look_at = now + interval / _LOOKS_PER_INTERVAL
            return None
        self._look_at = now + interval if interval else math.inf
        self._found = speeds
        return groups

    def _insists(self, core: PsCore, groups: Groups, speeds: Mapping[int, float]) -> bool:
        """Return whether other groups have been worth changing to several times in a row."""
        worth = is_worth_changing(core.sync.groups, groups, speeds)
        before, times = self._asked_for
        self._asked_for = (groups, times + 1 if groups == before else 1) if worth else ((), 0)
        return self._asked_for[1] >= _LEAST_LOOKS

    def _form(self, core: PsCore, groups: Groups) -> list[events.Action]:
        """Change groups (shard 0); everybody has finished a round and waits."""
        live = core.sync_state["live"]
        epoch = core.membership.begin_epoch()
        self._asked_for = ((), 0)
        self.formed = events.GroupAssignment(
            epoch, groups, {w: core.members[w].last_step for w in live}
        )
        self._switch(core, self.formed)
        self.num_formed += 1
        everyone = tuple(sorted([*live, *core.sync_state["joining"]]))
        told = changes.epoch_of(core, epoch, everyone)
        return [events.GroupsChanged(groups, self._found), events.NewEpoch(told)]

    def _catch_up(self, core: PsCore) -> list[events.Action] | None:
        """Change groups (other shards) once all pushes from before have come."""
        for worker, step in self._waits_for.items():
            member = core.members.get(worker)
            if member is None or member.last_step < step:
                return None
        self._switch(core, self._awaited.popleft())
        self.num_formed += 1
        present = {*core.sync_state["live"], *core.sync_state["joining"]}
        after = self._awaited[0].after if self._awaited else {}
        self._waits_for = {worker: step for worker, step in after.items() if worker in present}
        return []

    def _switch(self, core: PsCore, formed: events.GroupAssignment) -> None:
        core.sync, core.sync_state = core.sync.regroup(formed.groups, core.sync_state)
        core.group_epochs = dict.fromkeys(range(len(formed.groups)), formed.epoch)

    # -- durable state, and the summary -------------------------------------------------------

    def save(self, current: Groups) -> str:
        """Return the groups if they were formed by speed, else nothing."""
        return format_groups(current) if self.formed is not None else ""

    def restore(self, groups: Groups, core: PsCore) -> None:
        """Go on with groups of an earlier life; the speeds are measured anew."""
        formed = events.GroupAssignment(core.membership.epoch, groups, {})
        self._switch(core, formed)
        core.started = not core.sync.waits_for_start
        if core.membership.leads:  # another shard is to hear from shard 0 what holds now
            self.formed = formed

    def summary(self) -> dict[str, Any]:
        """Return what the run's summary tells of it; nothing where groups are given."""
        if self._auto is None:
            return {}
        speeds = {str(worker): speed for worker, speed in sorted(self._found.items())}
        return {"times_formed": self.num_formed, "samples_per_second": speeds}
