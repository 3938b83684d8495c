"""The SyncRule seam: when is an update released, and who may go on?

BSP, ASP, SSP and GSP are one rule with two parameters. The rule only orders worker ids; it never
sees an update, so one bookkeeping serves every shard, the simulator and the tests.

Source: Jiang et al. (CCGrid 2019) for groups, Ho et al. (NIPS 2013) for the bound;
docs/methods/grouping_sgd.md.

What a SyncRule writes down: who is where, and counts that save looking at every worker.

Plain lists and dicts, which a checkpoint takes as they are; `thinwire.ops.sync.rule.SyncRule`
decides.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

from thinwire.ops.sync.groups import AutoGroups, Groups, format_groups, groups_of_one, one_group
from thinwire.ops.types import ConfigurationError, State


def initial_state() -> State:
    """Return the books of an empty cluster."""
    return {
        "live": [],  # ids whose pushes a round waits for, ascending
        "joining": [],  # ids that enter at their group's next round boundary, ascending
        "pushed": [],  # live ids whose push is not yet released, ascending
        "held": [],  # live ids, new or with their round released, that may not go on yet
        "clocks": {},  # id -> finished iterations; kept when a worker leaves
        # What follows saves looking at every worker for each push.
        "touched": [],  # groups that may have something to settle, ascending
        "num_live": {},  # group -> live ids in it
        "num_pushed": {},  # group -> pushed ids in it
        "levels": {},  # clock -> live ids at it
        "blocked": 0,  # the first so many of `held` have clocks above ...
        "blocked_above": -1,  # ... this one
        "closed": False,  # nobody may go on, because groups are about to change
    }


def contains(ascending: Sequence[int], value: int) -> bool:
    """Return whether a sorted list holds a value."""
    place = bisect.bisect_left(ascending, value)
    return place < len(ascending) and ascending[place] == value


def mark_dirty(group: int, state: State) -> None:
    """See to it that a group is looked at next."""
    if not contains(state["touched"], group):
        bisect.insort(state["touched"], group)


def move_clock(state: State, old: int | None, new: int | None) -> None:
    """Count a live worker at clock `new`, and no longer at `old`."""
    levels = state["levels"]
    if new is not None:
        levels[new] = levels.get(new, 0) + 1
    if old is not None:
        levels[old] -= 1
        if not levels[old]:
            del levels[old]


def recount(groups: Groups, state: State) -> None:
    """Count the same workers in other groups.

    Pushes that wait for their round go on waiting, in the new groups. Members of a group step
    together, so they take over the lowest of their clocks: nobody who is on the way is then
    further ahead than the bound allows.
    """
    num_live: dict[int, int] = {}
    num_pushed: dict[int, int] = {}
    levels: dict[int, int] = {}
    for number, group in enumerate(groups):
        live = [worker for worker in group if contains(state["live"], worker)]
        if not live:
            continue
        clock = min(state["clocks"][worker] for worker in live)
        state["clocks"] |= dict.fromkeys(live, clock)
        num_live[number] = len(live)
        num_pushed[number] = sum(contains(state["pushed"], worker) for worker in live)
        levels[clock] = levels.get(clock, 0) + len(live)
    state |= {"num_live": num_live, "num_pushed": num_pushed, "levels": levels}
    state |= {"blocked": 0, "blocked_above": -1, "closed": False}
    state["touched"] = list(range(len(groups)))


@dataclasses.dataclass(frozen=True)
class SyncRule:
    """Groups of workers that step together, and how far a worker may run ahead.

    Attributes:
        groups: Every worker id 1..n exactly once. One group is BSP, groups of one are ASP.
        bound: A worker that has finished c iterations may start the next one while
            ``c - min(c of live workers) <= bound``; None lets everybody go on.
        auto: `groups` are those of a warm-up; others are formed from measured speeds.
    """

    groups: Groups
    bound: int | None = None
    auto: AutoGroups | None = None

    def __post_init__(self) -> None:
        """Refuse groups that are not a partition of 1..n, and negative bounds."""
        ids = sorted(worker for group in self.groups for worker in group)
        if any(not group for group in self.groups):
            raise ConfigurationError(f"groups {format_groups(self.groups)!r} hold an empty group.")
        if ids != list(range(1, len(ids) + 1)):
            raise ConfigurationError(
                f"groups {format_groups(self.groups)!r} name workers {ids}; each of "
                f"1..{max(len(ids), 1)} must stand in exactly one group (--groups, --groups_file)."
            )
        if self.bound is not None and self.bound < 0:
            raise ConfigurationError(
                f"--staleness_bound={self.bound}: expected 0 (lockstep) or more iterations."
            )

    @property
    def waits_for_start(self) -> bool:
        """Whether the run begins only when all workers are there (any group of several)."""
        return any(len(group) > 1 for group in self.groups)

    @functools.cached_property
    def _group_numbers(self) -> dict[int, int]:
        return {worker: number for number, group in enumerate(self.groups) for worker in group}

    @functools.cached_property
    def _names(self) -> list[str]:
        return [format_groups([group]) for group in self.groups]

    def group_of(self, worker: int) -> int:
        """Return the number of the worker's group."""
        return self._group_numbers[worker]

    def members_of(self, worker: int) -> tuple[int, ...]:
        """Return the worker's group: itself and its fellows, live or not."""
        return self.groups[self._group_numbers[worker]]

    def name_of(self, worker: int) -> str:
        """Return the worker's group as --groups writes it."""
        return self._names[self._group_numbers[worker]]

    def init(self) -> State:
        """Return the state of an empty cluster."""
        return initial_state()

    def join(self, worker: int, state: State) -> State:
        """Announce a worker; it becomes live at its group's next round boundary."""
        if not contains(state["live"], worker) and not contains(state["joining"], worker):
            bisect.insort(state["joining"], worker)
            mark_dirty(self.group_of(worker), state)
        return state

    def leave(self, worker: int, state: State) -> State:
        """Forget a worker; its clock no longer holds anybody back."""
        group = self.group_of(worker)
        if contains(state["live"], worker):
            state["num_live"][group] -= 1
            move_clock(state, state["clocks"][worker], None)
        if contains(state["pushed"], worker):
            state["num_pushed"][group] -= 1
        for field in ("live", "joining", "pushed", "held"):
            state[field] = [other for other in state[field] if other != worker]
        state["blocked"] = 0
        mark_dirty(group, state)
        return state

    def push(self, worker: int, state: State) -> State:
        """Note that a live worker has handed in its update for this round."""
        if not contains(state["pushed"], worker):
            bisect.insort(state["pushed"], worker)
            pushed = state["num_pushed"]
            pushed[self.group_of(worker)] = pushed.get(self.group_of(worker), 0) + 1
            mark_dirty(self.group_of(worker), state)
        return state

    def withdraw(self, worker: int, state: State) -> State:
        """Forget that a worker has handed in its update; its round waits for another one."""
        if contains(state["pushed"], worker):
            state["pushed"].remove(worker)
            state["num_pushed"][self.group_of(worker)] -= 1
            mark_dirty(self.group_of(worker), state)
        return state

    def close(self, state: State) -> State:
        """Let nobody go on who finishes a round from now on, until `regroup`."""
        state["closed"] = True
        return state

    def is_at_rest(self, state: State) -> bool:
        """Return whether every live worker has finished its round and may not go on."""
        return len(state["held"]) == len(state["live"])

    def regroup(self, groups: Groups, state: State) -> tuple[SyncRule, State]:
        """Return the rule of other groups, and the state of the same workers in them."""
        rule = dataclasses.replace(self, groups=groups)
        recount(rule.groups, state)
        return rule, state

    def is_live(self, worker: int, state: State) -> bool:
        """Return whether a round waits for the worker's push."""
        return contains(state["live"], worker)

    def goes_on(self, worker: int, state: State) -> bool:
        """Return whether a live worker may do its next round."""
        return self.is_live(worker, state) and worker not in state["held"]

    def advance(self, state: State) -> tuple[list[tuple[int, ...]], list[int], State]:
        """Settle everything that can be settled now.

        Returns:
            Rounds released (each the merged workers in order of id), workers that may go on
            (including new ones, which may now pull), and the state.
        """
        released: list[tuple[int, ...]] = []
        for number in state["touched"]:
            num_pushed = state["num_pushed"].get(number, 0)
            if num_pushed and num_pushed == state["num_live"].get(number, 0):
                members = [w for w in self.groups[number] if contains(state["live"], w)]
                released.append(tuple(members))
                self._finish_round(number, members, state)
                num_pushed = 0
            if not num_pushed:
                self._admit(number, state)
        state["touched"] = []
        return released, self._let_go(state), state

    def min_clock(self, state: State) -> int:
        """Return the smallest number of finished iterations over live workers (0 if none)."""
        return min(state["levels"], default=0)

    def _finish_round(self, number: int, workers: Collection[int], state: State) -> None:
        done = set(workers)
        state["pushed"] = [worker for worker in state["pushed"] if worker not in done]
        state["num_pushed"][number] = 0
        for worker in workers:
            clock = state["clocks"][worker]
            state["clocks"][worker] = clock + 1
            move_clock(state, clock, clock + 1)
            state["held"].append(worker)

    def _admit(self, number: int, state: State) -> None:
        """Make the group's joiners live; they go on when the bound lets them.

        A returning worker must not hold back the others, nor run ahead of them; members of a
        group step together, so it takes over its group's clock.
        """
        for worker in [each for each in state["joining"] if self.group_of(each) == number]:
            group = self.groups[number]
            peer = next((peer for peer in group if contains(state["live"], peer)), None)
            own = max(state["clocks"].get(worker, 0), self.min_clock(state))
            state["clocks"][worker] = own if peer is None else state["clocks"][peer]
            state["joining"].remove(worker)
            bisect.insort(state["live"], worker)
            state["num_live"][number] = state["num_live"].get(number, 0) + 1
            move_clock(state, None, state["clocks"][worker])
            state["held"].append(worker)

    def _let_go(self, state: State) -> list[int]:
        """Return who may go on; whoever was blocked stays so until the slowest gets on."""
        held: list[int] = state["held"]
        if state["closed"]:
            return []
        if self.bound is None:
            state["held"] = []
            return held
        limit = self.min_clock(state) + self.bound
        start = state["blocked"] if limit == state["blocked_above"] else 0
        free = [worker for worker in held[start:] if state["clocks"][worker] <= limit]
        held[start:] = [worker for worker in held[start:] if state["clocks"][worker] > limit]
        state["blocked"], state["blocked_above"] = len(held), limit
        return free


@dataclasses.dataclass(frozen=True)
class SyncChoice:
    """A value of --sync: the groups it forms by itself, and what it takes from flags."""

    groups: Callable[[int], Groups]
    takes_groups: bool
    takes_bound: bool
    needs_bound: bool = False


#: --sync value -> how it becomes a SyncRule.
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
) -> SyncRule:
    """Compose the rule that --sync, --groups and --staleness_bound ask for.

    Raises:
        ConfigurationError: Groups or a bound given to a rule that has none, a missing bound, or
            groups that are not a partition of 1..nb_workers.
    """
    choice = SYNC_RULES[name]
    if (groups is not None or auto is not None) and not choice.takes_groups:
        raise ConfigurationError(
            f"--groups was given, but --sync={name} has no groups; use --sync=gsp."
        )
    if bound is not None and not choice.takes_bound:
        raise ConfigurationError(
            f"--staleness_bound={bound} was given, but --sync={name} has no bound; "
            "use --sync=ssp or --sync=gsp."
        )
    if choice.needs_bound and bound is None:
        raise ConfigurationError(f"--sync={name} needs --staleness_bound (iterations, 0 or more).")
    form = choice.groups if auto is None else groups_of_one
    rule = SyncRule(groups or form(nb_workers), bound, auto)
    members = sum(len(group) for group in rule.groups)
    if members != nb_workers:
        raise ConfigurationError(
            f"groups {format_groups(rule.groups)!r} name {members} workers, "
            f"--nb_workers={nb_workers}; every worker needs exactly one group."
        )
    return rule
