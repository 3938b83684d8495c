"""BSP, ASP, SSP and GSP as one synchronization rule with groups and a staleness bound.

Source: Jiang et al. (CCGrid 2019) for groups, Ho et al. (NIPS 2013) for the bound;
docs/methods/grouping_sgd.md.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, WorkerSets, contains
from thinwire.ops.sync.groups import (
    AutoGroups,
    Groups,
    format_groups,
    groups_of_one,
    name_of,
    one_group,
)
from thinwire.ops.types import ConfigurationError, State


@dataclasses.dataclass(frozen=True)
class GroupSync:
    """Settings of BSP, ASP, SSP or GSP: worker groups that step together, and a staleness bound.

    Attributes:
        groups: Groups of worker ids; each worker of 1..n is in exactly one group. One group of all
            workers makes the rule BSP, groups of one worker make the rule ASP.
        bound: Staleness bound. A worker that has finished c iterations may start the next iteration
            while ``c - min(c of live workers) <= bound``; None lets every worker proceed.
        auto: Settings for forming worker groups from measured speeds after the warm-up, in which
            `groups` is used. None if groups do not change.
    """

    takes_all: ClassVar[bool] = True
    groups: Groups
    bound: int | None = None
    auto: AutoGroups | None = None

    def __post_init__(self) -> None:
        """Raise an error if the groups are not a partition of 1..n, or the bound is negative."""
        ids = sorted(worker for group in self.groups for worker in group)
        if any(not group for group in self.groups):
            raise ConfigurationError(
                f"worker groups {format_groups(self.groups)!r} contain an empty group."
            )
        if ids != list(range(1, len(ids) + 1)):
            raise ConfigurationError(
                f"groups {format_groups(self.groups)!r} name the workers {ids}; expected each "
                f"worker of 1..{max(len(ids), 1)} in exactly one group (--groups, --groups_file)."
            )
        if self.bound is not None and self.bound < 0:
            raise ConfigurationError(
                f"--staleness_bound={self.bound}: expected 0 (lockstep) or more iterations."
            )

    @property
    def waits_for_start(self) -> bool:
        """True if a group has 2 or more workers: the run starts when all workers have joined."""
        return any(len(group) > 1 for group in self.groups)

    @property
    def sizes(self) -> Sequence[int]:
        """Number of workers in a round of each group, if all workers are live."""
        return [len(group) for group in self.groups]

    def start(self, generation: int = 0) -> GroupRounds:
        """Return the synchronization rule in its start state, without workers."""
        return GroupRounds(self.groups, self.bound)

    def without_bound(self) -> GroupSync:
        """Return the settings for other shards than shard 0, without a staleness bound."""
        return FollowingGroupSync(self.groups)


@dataclasses.dataclass(frozen=True)
class FollowingGroupSync(GroupSync):
    """Settings for shards other than shard 0: workers join the same round as at shard 0."""

    def start(self, generation: int = 0) -> GroupRounds:
        """Return the synchronization rule in its start state, without workers."""
        return FollowingRounds(self.groups)


@dataclasses.dataclass(frozen=True)
class ClosedGroupSync(GroupSync):
    """Settings of one group of workers that exchange data during a round, not only at its end.

    A joining worker becomes live (a participant of rounds) when a round is merged into the weights,
    never during a round.
    """

    def start(self, generation: int = 0) -> GroupRounds:
        """Return the rule with an empty state, without workers."""
        return GroupRounds(self.groups, self.bound, closed=True)


class GroupRounds(WorkerSets):
    """Running `SyncRule` of BSP, ASP, SSP or GSP, with counts of workers by group and by clock.

    The clock of a worker is its number of finished iterations. The counts of workers avoid a loop
    over all workers for each push. A synchronization round merges the oldest waiting push of each
    worker of a group.

    Attributes:
        groups: Current groups of worker ids.
        bound: Number of iterations a worker may be ahead of the slowest worker; None for no limit.
    """

    def __init__(self, groups: Groups, bound: int | None = None, closed: bool = False) -> None:
        """Start the synchronization rule without workers.

        Args:
            groups: Groups of worker ids; each worker of 1..n is in exactly one group.
            bound: Number of iterations a worker may be ahead of the slowest worker; None for no
                limit.
            closed: True if a joining worker must not become live while a worker of its group is in
                a round.
        """
        super().__init__()
        self.bound, self._closed_to_joiners = bound, closed
        self._set_groups(groups)
        # live workers, new or after a round, that must wait before their next iteration
        self._held: list[int] = []
        # numbers of the worker groups that `advance` must process, ascending
        self._dirty: list[int] = []
        self._num_live: dict[int, int] = {}  # number of a group -> number of its live workers
        # number of a group -> number of its workers with a waiting push
        self._num_submitted: dict[int, int] = {}
        # clock (number of finished iterations) -> number of live workers with this clock
        self._levels: dict[int, int] = {}
        # The first `_num_blocked` workers of `_held` have clocks above `_blocked_above`, so that
        # `_let_proceed` skips these workers while `_blocked_above` is the limit.
        self._num_blocked = 0
        self._blocked_above = -1
        # True if no worker may proceed, because the worker groups are about to change
        self._paused = False
        # live worker -> step of its newest push that was merged or withdrawn
        self._over: dict[int, int] = {}
        self._entered: list[Joiners] = []  # live workers that have not finished a round yet

    def _set_groups(self, groups: Groups) -> None:
        self.groups = groups
        self._numbers = {worker: number for number, group in enumerate(groups) for worker in group}
        self._names = [name_of(group) for group in groups]

    # -- groups -----------------------------------------------------------------------------

    @property
    def waits_for_start(self) -> bool:
        """True if a group has 2 or more workers: the run starts when all workers have joined."""
        return any(len(group) > 1 for group in self.groups)

    def group_of(self, worker: int) -> int:
        """Return the number of the worker's group."""
        return self._numbers[worker]

    def name_of(self, worker: int) -> str:
        """Return the name of the worker's group in metrics."""
        return self._names[self._numbers[worker]]

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers of the worker's group, including the worker itself."""
        return [member for member in self.groups[self._numbers[worker]] if self.is_live(member)]

    def draws(self) -> Sequence[Draw]:
        """Return (), because all live workers participate in each round."""
        return ()

    def follow(self, draws: Sequence[Draw]) -> None:
        """Do nothing, because all live workers participate in each round."""

    def pause(self) -> None:
        """Hold every worker that finishes a round until `regroup` is called."""
        self._paused = True

    def is_quiescent(self) -> bool:
        """Return True if every live worker has finished its round and waits to proceed."""
        return len(self._held) == len(self._live)

    def regroup(self, groups: Groups) -> None:
        """Assign the same workers to new groups and continue.

        A push that waits for its round now waits for the round of its worker's new group. Workers
        of a group step together, so they all get the lowest clock (number of finished iterations)
        of the new group. With the lowest clock, a worker that is computing is no further ahead of
        the slowest worker than the staleness bound.
        """
        self._set_groups(groups)
        self._num_live, self._num_submitted, self._levels = {}, {}, {}
        for number, group in enumerate(groups):
            live = [worker for worker in group if contains(self._live, worker)]
            if not live:
                continue
            clock = min(self._clocks[worker] for worker in live)
            self._clocks |= dict.fromkeys(live, clock)
            self._num_live[number] = len(live)
            self._num_submitted[number] = sum(worker in self._submitted for worker in live)
            self._levels[clock] = self._levels.get(clock, 0) + len(live)
        self._num_blocked, self._blocked_above, self._paused = 0, -1, False
        self._dirty = list(range(len(groups)))

    # -- workers ----------------------------------------------------------------------------

    def joiners(self) -> Sequence[Joiners]:
        """Return the workers that have not finished a round of their group yet."""
        waiting = tuple(worker for worker in self._joining if self._has_fellows(worker))
        return [*self._entered, *([Joiners(waiting)] if waiting else [])]

    def _has_fellows(self, worker: int) -> bool:
        """Return True if the worker's group has two or more workers."""
        return len(self.groups[self._numbers[worker]]) > 1

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Do nothing: this rule runs on shard 0, which decides when workers join a round."""

    def join(self, worker: int) -> None:
        """Announce a worker, which becomes live at the next round boundary of its group."""
        if not contains(self._live, worker) and not contains(self._joining, worker):
            bisect.insort(self._joining, worker)
            self._mark_dirty(worker)

    def leave(self, worker: int) -> None:
        """Remove a worker, its waiting pushes and its clock's effect on other workers."""
        if contains(self._live, worker):
            self._num_live[self._numbers[worker]] -= 1
            self._move_clock(self._clocks[worker], None)
        self._drop_arrivals(worker)
        self._over.pop(worker, None)
        self._entered = _without(self._entered, {worker})
        for workers in (self._live, self._joining, self._held):
            if worker in workers:
                workers.remove(worker)
        self._num_blocked = 0
        self._mark_dirty(worker)

    def waiting(self) -> set[int]:
        """Return the live workers that wait for a complete round or for permission to proceed."""
        return {*self._submitted, *self._held}

    def may_proceed(self, worker: int) -> bool:
        """Return True if a live worker may compute its next round."""
        return self.is_live(worker) and worker not in self._held

    # -- arrivals ---------------------------------------------------------------------------

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add a received push of a live worker to the waiting pushes.

        A push that is submitted twice counts once.
        """
        arrivals = self._submitted.setdefault(arrival.worker, [])
        if not arrivals:
            group = self._numbers[arrival.worker]
            self._num_submitted[group] = self._num_submitted.get(group, 0) + 1
            self._mark_dirty(arrival.worker)
        if arrival not in arrivals:
            bisect.insort(arrivals, arrival)

    def withdraw(self, worker: int, step: int) -> None:
        """Remove all waiting pushes of a worker.

        The current round waits for the next push of the worker that withdrew.
        """
        self._void[worker] = max(step, self._void.get(worker, 0))
        if self.is_live(worker):
            self._over[worker] = max(step, self._over.get(worker, 0))
        if self._drop_arrivals(worker) or self._joining:
            self._mark_dirty(worker)

    def advance(self, now: float) -> Advance:
        """Merge the pushes of complete rounds, let joining workers in, and let workers proceed.

        Returns:
            Pushes of complete rounds, and workers that may proceed; a new worker may then pull the
                weights.
        """
        released: list[tuple[ArrivalToken, ...]] = []
        dirty, self._dirty = self._dirty, []
        num_joining = len(self._joining)
        for number in dirty:
            num_submitted = self._num_submitted.get(number, 0)
            at_boundary = not num_submitted
            if num_submitted and num_submitted == self._num_live.get(number, 0):
                members = [w for w in self.groups[number] if contains(self._live, w)]
                released.append(self._finish_round(members))
                at_boundary = True
            self._admit(number, at_boundary)
        has_entered = len(self._joining) != num_joining
        return Advance(released, self._let_proceed(), has_entered=has_entered)

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest merged or withdrawn push step, in groups with waiting pushes."""
        waits = {self._numbers[worker] for worker in self._submitted}
        members = [worker for worker in self._live if self._numbers[worker] in waits]
        steps = (
            (member, self._over.get(member, 0), self._void.get(member, 0)) for member in members
        )
        return {worker: max(released, withdrawn) for worker, released, withdrawn in steps}

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Merge waiting pushes up to the workers' steps in `over`, in one update per group."""
        late: dict[int, list[int]] = {}
        for worker in sorted(self._submitted):
            if self._submitted[worker][0].step <= over.get(worker, 0):
                late.setdefault(self._numbers[worker], []).append(worker)
                self._mark_dirty(worker)
        return [self._finish_round(workers) for workers in late.values()]

    def min_clock(self) -> int:
        """Return the lowest clock (finished iterations) of live workers; 0 without live workers."""
        return min(self._levels, default=0)

    def _drop_arrivals(self, worker: int) -> bool:
        if self._submitted.pop(worker, None) is None:
            return False
        self._num_submitted[self._numbers[worker]] -= 1
        return True

    def _finish_round(self, members: Collection[int]) -> tuple[ArrivalToken, ...]:
        taken = []
        if self._entered:
            self._entered = _without(self._entered, members)
        for worker in members:
            arrivals = self._submitted[worker]
            taken.append(arrivals.pop(0))
            self._over[worker] = max(taken[-1].step, self._over.get(worker, 0))
            if arrivals:  # the worker's next push waits for the next round
                self._mark_dirty(worker)
            else:
                self._drop_arrivals(worker)
            clock = self._clocks[worker]
            self._clocks[worker] = clock + 1
            self._move_clock(clock, clock + 1)
            self._held.append(worker)
        return tuple(taken)

    def _in_round(self, number: int) -> bool:
        """Return True if live workers of the group compute in a round that is not finished."""
        return bool(self._num_live.get(number, 0)) and not self._held

    def _admit(self, number: int, at_boundary: bool) -> None:
        """Make those joining workers of the group live that may participate in a round now.

        Args:
            number: Number of the worker group, an index into `groups`.
            at_boundary: True if no push of the worker group waits to be merged.
        """
        if not at_boundary or (self._closed_to_joiners and self._in_round(number)):
            return
        workers = self._joining_of(number)
        if workers and self._has_fellows(workers[0]):
            members = tuple(member for member in self.groups[number] if member in self._over)
            after = tuple(self._over[member] for member in members)
            self._entered.append(Joiners(tuple(workers), True, members, after))
        for worker in workers:
            self._enter(worker)

    def _joining_of(self, number: int) -> list[int]:
        return [worker for worker in self._joining if self._numbers[worker] == number]

    def _enter(self, worker: int) -> None:
        """Make a joining worker live, so that synchronization rounds wait for its pushes.

        The joining worker proceeds when the staleness bound allows it.

        A returning worker must neither delay other workers nor run ahead of other workers, so its
        clock (number of finished iterations) is at least the lowest clock. Workers of a group step
        together, so a joining worker gets the clock (number of finished iterations) of a live
        worker of its group.
        """
        number = self._numbers[worker]
        group = self.groups[number]
        peer = next((peer for peer in group if contains(self._live, peer)), None)
        own_clock = max(self._clocks.get(worker, 0), self.min_clock())
        self._clocks[worker] = own_clock if peer is None else self._clocks[peer]
        self._joining.remove(worker)
        bisect.insort(self._live, worker)
        self._num_live[number] = self._num_live.get(number, 0) + 1
        self._move_clock(None, self._clocks[worker])
        self._held.append(worker)

    def _let_proceed(self) -> list[int]:
        """Return the workers that the staleness bound lets proceed to their next iteration."""
        held = self._held
        if self._paused:
            return []
        if self.bound is None:
            self._held = []
            return held
        limit = self.min_clock() + self.bound
        start = self._num_blocked if limit == self._blocked_above else 0
        proceeding = [worker for worker in held[start:] if self._clocks[worker] <= limit]
        held[start:] = [worker for worker in held[start:] if self._clocks[worker] > limit]
        self._num_blocked, self._blocked_above = len(held), limit
        return proceeding

    def _mark_dirty(self, worker: int) -> None:
        """Make the next call of `advance` process the worker's group."""
        group = self._numbers[worker]
        if not contains(self._dirty, group):
            bisect.insort(self._dirty, group)

    def _move_clock(self, old: int | None, new: int | None) -> None:
        """Count a live worker at clock `new`, not `old`; None: new or removed worker."""
        if new is not None:
            self._levels[new] = self._levels.get(new, 0) + 1
        if old is not None:
            self._levels[old] -= 1
            if not self._levels[old]:
                del self._levels[old]

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return the rule's state that survives a restart, and with `soft` the remaining state."""
        if not soft:
            return {
                "clocks": {str(worker): clock for worker, clock in self._clocks.items()},
                "void": {str(worker): step for worker, step in self._void.items()},
            }
        return {
            "live": list(self._live),
            "joining": list(self._joining),
            "submitted": {
                w: [token.step for token in tokens] for w, tokens in self._submitted.items()
            },
            "held": list(self._held),
            "clocks": dict(self._clocks),
            "dirty": list(self._dirty),
            "num_live": dict(self._num_live),
            "num_submitted": dict(self._num_submitted),
            "levels": dict(self._levels),
            "num_blocked": self._num_blocked,
            "blocked_above": self._blocked_above,
            "paused": self._paused,
            "groups": self.groups,
            "over": dict(self._over),
            "void": dict(self._void),
            "entered": _as_plain(self._entered),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the rule's state from the result of `state_dict`."""
        if not soft:
            self._clocks = {int(worker): clock for worker, clock in state["clocks"].items()}
            self._void = {int(worker): step for worker, step in state["void"].items()}
            return
        self._set_groups(state["groups"])
        self._load_workers(state)
        self._held, self._clocks = list(state["held"]), dict(state["clocks"])
        self._dirty, self._num_live = list(state["dirty"]), dict(state["num_live"])
        self._num_submitted, self._levels = dict(state["num_submitted"]), dict(state["levels"])
        self._num_blocked, self._blocked_above = state["num_blocked"], state["blocked_above"]
        self._paused = state["paused"]
        self._over, self._void = dict(state["over"]), dict(state["void"])
        self._entered = _of_plain(state["entered"])


class FollowingRounds(GroupRounds):
    """Running synchronization rule of a shard server other than shard 0.

    The rounds of two shard servers may be one push apart: one shard server merges the push of
    worker A alone, and the other shard server merges this push with the push of worker B, which
    joined in between. If a worker joined this shard server at the end of a round, the rounds of two
    shard servers could be two pushes apart. Each of the two shard servers would then wait for a
    push of a worker that waits at the other shard server. So a worker joins the same round on this
    shard server as on shard 0, even in the middle of the round.
    """

    def __init__(self, groups: Groups) -> None:
        """Start the synchronization rule without workers."""
        super().__init__(groups)
        # new workers that have not finished a round at shard 0 yet
        self._expected: Sequence[Joiners] = ()

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Replace the expected joining workers by the joining workers of shard 0."""
        self._expected = tuple(joiners)
        for worker in self._joining:
            self._mark_dirty(worker)

    def advance(self, now: float) -> Advance:
        """Let joining workers in, then merge complete rounds, which include the joining workers."""
        for number in self._dirty:
            self._admit(number, at_boundary=False)
        return super().advance(now)

    def _admit(self, number: int, at_boundary: bool) -> None:
        """Make those joining workers live that are live at shard 0, even in mid-round."""
        for worker in self._joining_of(number):
            if self._may_enter(worker):
                self._enter(worker)

    def _may_enter(self, worker: int) -> bool:
        """Return True if the worker may become live, because this shard has caught up with shard 0.

        All pushes that shard 0 had merged or withdrawn before the worker became live there must be
        merged or withdrawn on this shard server, too. A worker that is not in `_expected` finished
        a round at shard 0 before this shard server started, and may become live.
        """
        joiners = next((item for item in self._expected if worker in item.workers), None)
        if joiners is None:
            return True
        before = zip(joiners.members, joiners.after, strict=True)
        return joiners.has_entered and all(self._is_over(member, step) for member, step in before)

    def _is_over(self, worker: int, step: int) -> bool:
        """Return True if no push of the worker up to this step may still be merged on this server.

        A worker with no merged push since this shard server started has no push to wait for: the
        shard server refuses pushes from before its start.
        """
        if not self.is_live(worker):
            return True
        if worker in self._submitted:
            return self._submitted[worker][0].step > step
        return self._over.get(worker, step) >= step

    def state_dict(self, soft: bool) -> State:
        """Return the workers' clocks (finished iterations), and with `soft` the remaining state."""
        state = super().state_dict(soft)
        return state | {"expected": _as_plain(self._expected)} if soft else state

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the rule's state from the result of `state_dict`."""
        super().load_state_dict(state, soft)
        if soft:
            self._expected = _of_plain(state["expected"])


def _without(joiners: Sequence[Joiners], gone: Collection[int]) -> list[Joiners]:
    """Return the sets of joining workers without the workers in `gone`."""
    remaining = []
    for group in joiners:
        workers = tuple(worker for worker in group.workers if worker not in gone)
        if workers:
            remaining.append(dataclasses.replace(group, workers=workers))
    return remaining


def _as_plain(joiners: Sequence[Joiners]) -> list[list[Any]]:
    return [
        [list(group.workers), group.has_entered, list(group.members), list(group.after)]
        for group in joiners
    ]


def _of_plain(joiners: Sequence[Sequence[Any]]) -> list[Joiners]:
    return [
        Joiners(tuple(workers), has_entered, tuple(members), tuple(after))
        for workers, has_entered, members, after in joiners
    ]


@dataclasses.dataclass(frozen=True)
class SyncChoice:
    """A value of the flag --sync: the worker groups it forms, and the flags it accepts."""

    groups: Callable[[int], Groups]
    takes_groups: bool
    takes_bound: bool
    needs_bound: bool = False


#: Value of the flag --sync (bsp, asp, ssp, gsp) -> how `make_rule` makes its GroupSync.
SYNC_RULES: dict[str, SyncChoice] = {
    "bsp": SyncChoice(one_group, takes_groups=False, takes_bound=False),
    "asp": SyncChoice(groups_of_one, takes_groups=False, takes_bound=False),
    "ssp": SyncChoice(groups_of_one, takes_groups=False, takes_bound=True, needs_bound=True),
    "gsp": SyncChoice(one_group, takes_groups=True, takes_bound=True),
}


def make_rule(
    name: str,
    nb_workers: int,
    groups: Groups | None = None,
    bound: int | None = None,
    auto: AutoGroups | None = None,
) -> GroupSync:
    """Make the synchronization rule that --sync, --groups and --staleness_bound describe.

    Raises:
        ConfigurationError: Groups or a staleness bound are given for a --sync value that accepts
            none, a needed bound is missing, or the groups are not a partition of 1..nb_workers.
    """
    choice = SYNC_RULES[name]
    if (groups is not None or auto is not None) and not choice.takes_groups:
        raise ConfigurationError(
            f"--groups was given, but --sync={name} has no groups; use --sync=gsp."
        )
    if bound is not None and not choice.takes_bound:
        raise ConfigurationError(
            f"--staleness_bound={bound} was given, but --sync={name} has no staleness bound; use "
            "--sync=ssp or --sync=gsp."
        )
    if choice.needs_bound and bound is None:
        raise ConfigurationError(f"--sync={name} needs --staleness_bound (iterations, 0 or more).")
    form = choice.groups if auto is None else groups_of_one
    rule = GroupSync(groups or form(nb_workers), bound, auto)
    members = sum(len(group) for group in rule.groups)
    if members != nb_workers:
        raise ConfigurationError(
            f"groups {format_groups(rule.groups)!r} name {members} workers, but "
            f"--nb_workers={nb_workers}; expected every worker in exactly one group."
        )
    return rule
