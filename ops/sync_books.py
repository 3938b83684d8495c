"""What a SyncRule writes down: who is where, and counts that save looking at every worker.

Plain lists and dicts, which a checkpoint takes as they are; `ops.sync.SyncRule` decides.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ops.grouping import Groups
from ops.types import State


def empty_books() -> State:
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


def holds(ascending: Sequence[int], value: int) -> bool:
    """Return whether a sorted list holds a value."""
    place = bisect.bisect_left(ascending, value)
    return place < len(ascending) and ascending[place] == value


def touch(group: int, state: State) -> None:
    """See to it that a group is looked at next."""
    if not holds(state["touched"], group):
        bisect.insort(state["touched"], group)


def move(state: State, old: int | None, new: int | None) -> None:
    """Count a live worker at clock `new`, and no longer at `old`."""
    levels = state["levels"]
    if new is not None:
        levels[new] = levels.get(new, 0) + 1
    if old is not None:
        levels[old] -= 1
        if not levels[old]:
            del levels[old]


def count_anew(groups: Groups, state: State) -> None:
    """Count the same workers in other groups.

    Pushes that wait for their round go on waiting, in the new groups. Members of a group step
    together, so they take over the lowest of their clocks: nobody who is on the way is then
    further ahead than the bound allows.
    """
    num_live: dict[int, int] = {}
    num_pushed: dict[int, int] = {}
    levels: dict[int, int] = {}
    for number, group in enumerate(groups):
        live = [worker for worker in group if holds(state["live"], worker)]
        if not live:
            continue
        clock = min(state["clocks"][worker] for worker in live)
        state["clocks"] |= dict.fromkeys(live, clock)
        num_live[number] = len(live)
        num_pushed[number] = sum(holds(state["pushed"], worker) for worker in live)
        levels[clock] = levels.get(clock, 0) + len(live)
    state |= {"num_live": num_live, "num_pushed": num_pushed, "levels": levels}
    state |= {"blocked": 0, "blocked_above": -1, "closed": False}
    state["touched"] = list(range(len(groups)))
