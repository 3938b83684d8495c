"""Workers, waiting pushes, worker groups and clocks of one shard, without decisions.

`Rounds` (`thinwire.ops.sync.rounds`) and the agreements of shards read and change these records.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence, Set

from thinwire.ops.sync.base import ArrivalToken, SyncRule
from thinwire.ops.sync.groups import Groups, name_of
from thinwire.ops.types import State


class RoundRecords:
    """Workers, waiting pushes, worker groups and workers' iteration counts of one shard.

    The clock of a worker is its number of finished iterations. A live worker computes, or has a
    push that waits to be released, or is held (gets no reply) until it may proceed. The records
    count workers by worker group and by clock, so that a push costs no loop over all workers.

    Attributes:
        rule: Synchronization rule of the run.
        follows: True on every shard but shard 0. Only shard 0 calls `SyncRule.may_proceed`.
        groups: Current worker groups; each worker id is in exactly one group.
        changed: Numbers of the worker groups whose pushes or members have changed since the last
            call of `SyncRule.ready`, ascending. Synchronization rules may skip unchanged groups.
        state: State of the rule itself, plain data that only `SyncRule.ready` changes.
    """

    def __init__(self, rule: SyncRule, follows: bool = False) -> None:
        """Create the records of a shard that has no workers yet.

        Args:
            rule: Synchronization rule of the run.
            follows: True on every shard but shard 0.
        """
        self.rule, self.follows = rule, follows
        self.changed: Sequence[int] = ()
        self.state: State = {}
        self._live: list[int] = []  # ids of live workers, ascending
        self._joining: list[int] = []  # ids of joined workers that are not live yet, ascending
        # Live worker -> tokens of its waiting pushes, oldest first; no worker has an empty list.
        self._submitted: dict[int, list[ArrivalToken]] = {}
        self._arrived_at: dict[ArrivalToken, float] = {}  # waiting push -> time of its arrival
        self._clocks: dict[int, int] = {}  # worker, live or not -> finished iterations
        self._void: dict[int, int] = {}  # worker, live or not -> newest withdrawn step
        # The keys of `_held` are live workers that wait for permission to proceed, oldest first. A
        # dict keeps the order of its keys and removes a key without a search.
        self._held: dict[int, None] = {}
        # Held workers whose permission to proceed must be examined at the next `advance`, because
        # they were held, or lost a waiting push, after the last `advance`.
        self._unexamined: set[int] = set()
        self._dirty: list[int] = []  # worker groups changed since the last `advance`, ascending
        self._set_groups(rule.groups)
        self._count()

    def _set_groups(self, groups: Groups) -> None:
        self.groups = groups
        self._numbers = {worker: number for number, group in enumerate(groups) for worker in group}
        self._names = [name_of(group) for group in groups]

    def _count(self) -> None:
        """Count the live workers per group and per clock, and the workers with waiting pushes."""
        self._num_live: dict[int, int] = {}  # worker group -> number of live members
        self._num_submitted: dict[int, int] = {}  # worker group -> members with a waiting push
        self._levels: dict[int, int] = {}  # clock value -> number of live workers
        for worker in self._live:
            number = self._numbers[worker]
            self._num_live[number] = self._num_live.get(number, 0) + 1
            self._move_clock(None, self._clocks[worker])
        for worker in self._submitted:
            number = self._numbers[worker]
            self._num_submitted[number] = self._num_submitted.get(number, 0) + 1

    @property
    def waits_for_start(self) -> bool:
        """True if a group has 2 or more workers; the run then starts when all workers joined."""
        return any(len(group) > 1 for group in self.groups)

    def oldest(self, workers: Iterable[int]) -> tuple[ArrivalToken, ...]:
        """Return each worker's oldest waiting push; skip workers without a waiting push."""
        return tuple(self._submitted[worker][0] for worker in workers if worker in self._submitted)

    def arrived_at(self, arrival: ArrivalToken) -> float:
        """Return the time at which a waiting push arrived, in seconds of the shard's clock."""
        return self._arrived_at[arrival]

    def lead(self, worker: int) -> int:
        """Return how many iterations a live worker is ahead of the slowest live worker."""
        return self._clocks[worker] - self.min_clock()

    def min_clock(self) -> int:
        """Return the fewest iterations that a live worker has finished; 0 without live workers."""
        return min(self._levels, default=0)

    def clocks(self) -> dict[int, int]:
        """Return worker -> number of finished iterations, including workers that have left."""
        return dict(self._clocks)

    def clock(self, worker: int) -> int:
        """Return how many iterations a worker has finished; 0 for an unknown worker."""
        return self._clocks.get(worker, 0)

    def live(self) -> tuple[int, ...]:
        """Return the ids of live workers (whose pushes rounds wait for), ascending."""
        return tuple(self._live)

    def joining(self) -> tuple[int, ...]:
        """Return the ids of workers that have joined but are not live yet, ascending."""
        return tuple(self._joining)

    def present(self) -> tuple[int, ...]:
        """Return the ids of the live and the joining workers, ascending."""
        return tuple(sorted([*self._live, *self._joining]))

    def waiting(self) -> set[int]:
        """Return the live workers that wait for a complete round or for permission to proceed."""
        return {*self._submitted, *self._held}

    def is_live(self, worker: int) -> bool:
        """Return True if a worker is live: rounds wait for its pushes."""
        place = bisect.bisect_left(self._live, worker)
        return place < len(self._live) and self._live[place] == worker

    def with_pushes(self) -> Set[int]:
        """Return the ids of the workers of which a push waits to be released."""
        return self._submitted.keys()

    def has_submitted(self, worker: int) -> bool:
        """Return True if a push of the worker waits to be released."""
        return worker in self._submitted

    def group_of(self, worker: int) -> int:
        """Return the number of a worker's group, which is an index into `Rounds.groups`."""
        return self._numbers[worker]

    def name_of(self, worker: int) -> str:
        """Return the name that metrics use for a worker's group."""
        return self._names[self._numbers[worker]]

    def enter(self, worker: int, clock: int) -> None:
        """Make a joining worker live, and hold the worker until it may proceed.

        Args:
            worker: Id of a joining worker.
            clock: Number of finished iterations that the worker starts with.
        """
        self._joining.remove(worker)
        bisect.insort(self._live, worker)
        self._clocks[worker] = clock
        number = self._numbers[worker]
        self._num_live[number] = self._num_live.get(number, 0) + 1
        self._move_clock(None, clock)
        self.hold([worker])

    def hold(self, workers: Iterable[int]) -> None:
        """Hold live workers (send no reply) until the workers may proceed."""
        for worker in workers:
            self._held[worker] = None
            self._unexamined.add(worker)

    def reply_in_order_of_id(self) -> None:
        """Let the held workers proceed in ascending order of their ids."""
        self._held = dict.fromkeys(sorted(self._held))

    def has_waiting(self, number: int) -> bool:
        """Return True if a push of a member of worker group `number` waits to be released."""
        return bool(self._num_submitted.get(number))

    def has_all(self, number: int) -> bool:
        """Return True if all live members of worker group `number` have a waiting push."""
        waiting = self._num_submitted.get(number, 0)
        return bool(waiting) and waiting == self._num_live.get(number, 0)

    def newest_withdrawn(self, worker: int) -> int:
        """Return the newest withdrawn step of a worker; 0 if the worker withdrew no push."""
        return self._void.get(worker, 0)

    def has_held(self) -> bool:
        """Return True if a live worker waits for permission to proceed."""
        return bool(self._held)

    def mark_changed(self, worker: int) -> None:
        """Make the next call of `advance` process a worker's group."""
        group = self._numbers[worker]
        place = bisect.bisect_left(self._dirty, group)
        if place == len(self._dirty) or self._dirty[place] != group:
            self._dirty.insert(place, group)

    def _drop_arrivals(self, worker: int) -> bool:
        arrivals = self._submitted.pop(worker, None)
        if arrivals is None:
            return False
        for arrival in arrivals:
            del self._arrived_at[arrival]
        if worker in self._held:
            self._unexamined.add(worker)
        self._num_submitted[self._numbers[worker]] -= 1
        return True

    def _move_clock(self, old: int | None, new: int | None) -> None:
        """Update the number of live workers per clock value, as a worker's clock changes.

        Args:
            old: Worker's clock before the change; None if the worker was not live.
            new: Worker's clock after the change; None if the worker is no longer live.
        """
        if new is not None:
            self._levels[new] = self._levels.get(new, 0) + 1
        if old is not None:
            self._levels[old] -= 1
            if not self._levels[old]:
                del self._levels[old]
