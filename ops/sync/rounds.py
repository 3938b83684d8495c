"""Rounds of one shard: its workers, the pushes that wait to be released, and clocks.

A `Rounds` object does the bookkeeping for every synchronization rule. The rule only answers two
questions about the object: which waiting pushes are released now, and may a worker proceed. An
agreement (`thinwire.ops.sync.agreements`) gives all shards of a run the same rounds.

Times enter only as arguments, so a replay of a shard's journal repeats all rounds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from thinwire.ops.sync.agreements import agreement_of
from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, SyncRule
from thinwire.ops.sync.groups import Groups, name_of
from thinwire.ops.types import State


class Rounds:
    """Workers, waiting pushes, groups and clocks of one shard.

    The clock of a worker is its number of finished iterations. A live worker is in one of three
    states: it computes, its push waits to be released, or it is held until it may proceed. The
    object counts workers by group and by clock, so that a push costs no loop over all workers.

    Attributes:
        rule: The synchronization rule.
        follows: True on every shard but shard 0. Only shard 0 holds workers back by the rule.
        groups: Current groups of worker ids; each worker id is in exactly one group.
        changed: Numbers of the groups with new pushes, new members or fewer members since the last
            call of `SyncRule.ready`, ascending. Rules need not look at other groups.
    """

    def __init__(self, rule: SyncRule, generation: int = 0, follows: bool = False) -> None:
        """Start without workers.

        Args:
            rule: The synchronization rule.
            generation: Generation of the shard, a number that grows with each restart of the shard.
            follows: True on every shard but shard 0.
        """
        self.rule, self.follows = rule, follows
        self.changed: Sequence[int] = ()
        self._live: list[int] = []  # ids of live workers, ascending
        self._joining: list[int] = []  # workers that become live at a round boundary, ascending
        # Live worker -> its arrivals that are not released, oldest first; never an empty list.
        self._submitted: dict[int, list[ArrivalToken]] = {}
        self._arrived_at: dict[ArrivalToken, float] = {}  # waiting push -> time of its arrival
        self._clocks: dict[int, int] = {}  # finished iterations; stays when a worker leaves
        self._void: dict[int, int] = {}  # worker, live or not -> newest step withdrawn
        # Live workers that wait for permission to proceed, oldest first. A dict keeps the order of
        # its keys and removes a key without a search. The values are not used.
        self._held: dict[int, None] = {}
        self._paused = False  # True if no worker may proceed, because groups are about to change
        self._dirty: list[int] = []  # groups that changed since the last `advance`, ascending
        self._deadline: float | None = None  # `Ready.look_again_at` of the last `advance`
        self._set_groups(rule.groups)
        self._count()
        self._agreement = agreement_of(self, generation)

    def _set_groups(self, groups: Groups) -> None:
        self.groups = groups
        self._numbers = {worker: number for number, group in enumerate(groups) for worker in group}
        self._names = [name_of(group) for group in groups]

    def _count(self) -> None:
        """Count the live workers by group and by clock, and the workers with a waiting push."""
        self._num_live: dict[int, int] = {}  # group -> number of live members
        self._num_submitted: dict[int, int] = {}  # group -> number of members with a waiting push
        self._levels: dict[int, int] = {}  # clock -> number of live workers with this clock
        for worker in self._live:
            number = self._numbers[worker]
            self._num_live[number] = self._num_live.get(number, 0) + 1
            self._move_clock(None, self._clocks[worker])
        for worker in self._submitted:
            number = self._numbers[worker]
            self._num_submitted[number] = self._num_submitted.get(number, 0) + 1

    @property
    def waits_for_start(self) -> bool:
        """True if a group has 2 or more workers: the run starts when all workers have joined."""
        return any(len(group) > 1 for group in self.groups)

    # -- what a rule reads ------------------------------------------------------------------

    def members(self, number: int) -> Sequence[int]:
        """Return the live workers in the current round of group `number`, ascending."""
        return self._agreement.members(number)

    def is_complete(self, number: int) -> bool:
        """Return True if a push of every member of the group's current round waits."""
        return self._agreement.is_complete(number)

    def oldest(self, workers: Iterable[int]) -> tuple[ArrivalToken, ...]:
        """Return the oldest waiting push of each worker; a worker without one is skipped."""
        return tuple(self._submitted[worker][0] for worker in workers if worker in self._submitted)

    def arrived_at(self, arrival: ArrivalToken) -> float:
        """Return the time at which a waiting push arrived, in seconds."""
        return self._arrived_at[arrival]

    def lead(self, worker: int) -> int:
        """Return how many iterations a live worker is ahead of the slowest live worker."""
        return self._clocks[worker] - self.min_clock()

    def min_clock(self) -> int:
        """Return the lowest clock of live workers; 0 if there are no live workers."""
        return min(self._levels, default=0)

    def clocks(self) -> dict[int, int]:
        """Return worker -> number of finished iterations. Workers that have left are included."""
        return dict(self._clocks)

    def clock(self, worker: int) -> int:
        """Return the number of iterations that a live or former worker has finished; else 0."""
        return self._clocks.get(worker, 0)

    def live(self) -> tuple[int, ...]:
        """Return the ids of workers that take part in the run's rounds, ascending."""
        return tuple(self._live)

    def joining(self) -> tuple[int, ...]:
        """Return ids of workers that become live at their group's next round, ascending."""
        return tuple(self._joining)

    def present(self) -> tuple[int, ...]:
        """Return the ids of the live and the joining workers, ascending."""
        return tuple(sorted([*self._live, *self._joining]))

    def waiting(self) -> set[int]:
        """Return the live workers that wait for a complete round or for permission to proceed."""
        return {*self._submitted, *self._held}

    def is_live(self, worker: int) -> bool:
        """Return True if rounds wait for the worker's pushes."""
        place = bisect.bisect_left(self._live, worker)
        return place < len(self._live) and self._live[place] == worker

    def has_submitted(self, worker: int) -> bool:
        """Return True if a push of the worker waits to be released."""
        return worker in self._submitted

    def may_proceed(self, worker: int) -> bool:
        """Return True if a live worker computes, or may compute, its next round."""
        waits = worker in self._held or worker in self._submitted
        return self.is_live(worker) and not waits

    def group_of(self, worker: int) -> int:
        """Return the number of the worker's group, an index into `groups`."""
        return self._numbers[worker]

    def name_of(self, worker: int) -> str:
        """Return the name of the worker's group in metrics."""
        return self._names[self._numbers[worker]]

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers in the worker's current round, including the worker itself."""
        return self._agreement.fellows(worker)

    # -- workers ----------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        """Announce a worker, which becomes live when the agreement admits it."""
        if not self.is_live(worker) and worker not in self._joining:
            bisect.insort(self._joining, worker)
            self.mark_changed(worker)

    def leave(self, worker: int) -> None:
        """Remove a worker and its waiting pushes. Rounds do not wait for a removed worker."""
        if self.is_live(worker):
            self._num_live[self._numbers[worker]] -= 1
            self._move_clock(self._clocks[worker], None)
        self._drop_arrivals(worker)
        for workers in (self._live, self._joining):
            if worker in workers:
                workers.remove(worker)
        self._held.pop(worker, None)
        self._agreement.left(worker)
        self.mark_changed(worker)

    def enter(self, worker: int, clock: int) -> None:
        """Make a joining worker live; it is held until it may proceed."""
        self._joining.remove(worker)
        bisect.insort(self._live, worker)
        self._clocks[worker] = clock
        number = self._numbers[worker]
        self._num_live[number] = self._num_live.get(number, 0) + 1
        self._move_clock(None, clock)
        self._held[worker] = None

    def hold(self, workers: Iterable[int]) -> None:
        """Hold live workers until the rule lets them proceed."""
        self._held.update(dict.fromkeys(workers))

    def reply_in_order_of_id(self) -> None:
        """Let the held workers proceed in ascending order of their ids."""
        self._held = dict.fromkeys(sorted(self._held))

    # -- arrivals ---------------------------------------------------------------------------

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add a push of a live worker. A push that is added twice counts once."""
        arrivals = self._submitted.setdefault(arrival.worker, [])
        if not arrivals:
            group = self._numbers[arrival.worker]
            self._num_submitted[group] = self._num_submitted.get(group, 0) + 1
            self.mark_changed(arrival.worker)
        if arrival not in arrivals:
            bisect.insort(arrivals, arrival)
            self._arrived_at[arrival] = now
        self._agreement.submitted(arrival.worker)

    def withdraw(self, worker: int, step: int) -> None:
        """Remove all waiting pushes of a worker; do nothing if no push of the worker waits.

        Args:
            worker: Id of a worker that does not wait for the result of its push any more.
            step: Step of the newest push that is withdrawn, at least on this shard.
        """
        self._void[worker] = max(step, self._void.get(worker, 0))
        if self._drop_arrivals(worker) or self._joining:
            self.mark_changed(worker)
        self._agreement.withdrew(worker, step)

    def has_waiting(self, number: int) -> bool:
        """Return True if a push of a member of group `number` waits to be released."""
        return bool(self._num_submitted.get(number))

    def has_all(self, number: int) -> bool:
        """Return True if pushes of all live members of group `number` wait to be released."""
        waiting = self._num_submitted.get(number, 0)
        return bool(waiting) and waiting == self._num_live.get(number, 0)

    def newest_withdrawn(self, worker: int) -> int:
        """Return the newest step of the worker that was withdrawn; 0 if none was."""
        return self._void.get(worker, 0)

    def has_held(self) -> bool:
        """Return True if a live worker waits for permission to proceed."""
        return bool(self._held)

    # -- rounds -----------------------------------------------------------------------------

    def advance(self, now: float) -> Advance:
        """Release complete rounds, make joining workers live, and let workers proceed.

        Returns:
            Released rounds, and workers that may proceed: a new worker may then pull the weights.
        """
        agreement, newest = self._agreement, self._agreement.newest
        agreement.admit_early(self._dirty)
        num_joining = len(self._joining)
        self.changed, self._dirty = self._dirty, []
        released = self._release(now)
        # All pushes of the next round may wait already, for example after a restart.
        while agreement.begin_next():
            released += self._release(now)
        return Advance(
            released,
            self._let_proceed(),
            has_drawn=agreement.newest != newest,
            has_entered=len(self._joining) != num_joining,
        )

    def _release(self, now: float) -> list[tuple[ArrivalToken, ...]]:
        """Release late pushes and complete rounds; admit joining workers to groups in between."""
        agreement = self._agreement
        released = [self.take(late) for late in agreement.late()]
        ready = agreement.ready(now)
        self._deadline = ready.look_again_at
        finished = set()
        for tokens in ready.releases:
            finished |= {self._numbers[token.worker] for token in tokens}
            agreement.releases(tokens)
            released.append(self.take(tokens))
        for number in self.changed:
            agreement.admit(number, number in finished or not self.has_waiting(number))
        return released

    def take(self, tokens: Sequence[ArrivalToken]) -> tuple[ArrivalToken, ...]:
        """Remove pushes that are released, count their workers' iterations, hold the workers."""
        for token in tokens:
            worker = token.worker
            self._submitted[worker].remove(token)
            del self._arrived_at[token]
            if self._submitted[worker]:  # the worker's next push waits for the next round
                self.mark_changed(worker)
            else:
                self._drop_arrivals(worker)
            clock = self._clocks[worker]
            self._clocks[worker] = clock + 1
            self._move_clock(clock, clock + 1)
            self._held[worker] = None
        self._agreement.took(tokens)
        return tuple(tokens)

    def _let_proceed(self) -> list[int]:
        """Return the held workers that may proceed, and hold them no longer."""
        if self._paused:
            return []
        may_proceed, submitted = self._agreement.may_proceed, self._submitted
        proceeding = [w for w in self._held if w not in submitted and may_proceed(w)]
        for worker in proceeding:
            del self._held[worker]
        return proceeding

    def next_deadline(self) -> float | None:
        """Return the time when `advance` is due even without a new push; None if never."""
        return self._deadline

    def mark_changed(self, worker: int) -> None:
        """Make the next `advance` process the worker's group."""
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
        self._num_submitted[self._numbers[worker]] -= 1
        return True

    def _move_clock(self, old: int | None, new: int | None) -> None:
        """Count a live worker at clock `new` instead of `old`; None: new or removed worker."""
        if new is not None:
            self._levels[new] = self._levels.get(new, 0) + 1
        if old is not None:
            self._levels[old] -= 1
            if not self._levels[old]:
                del self._levels[old]

    # -- agreement of the shards ------------------------------------------------------------

    def draws(self) -> tuple[Draw, ...]:
        """Return the latest rounds that shard 0 announces, the newest last; () for JOINERS."""
        return tuple(self._agreement.draws())

    def follow(self, draws: Sequence[Draw]) -> None:
        """Replace the known rounds by the rounds of shard 0. Called on all shards but shard 0."""
        self._agreement.follow(draws)

    def joiners(self) -> tuple[Joiners, ...]:
        """Return the group members that have not finished a round yet. Called on shard 0."""
        return tuple(self._agreement.joiners())

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Replace the expected new workers by shard 0's. Called on all shards but shard 0."""
        self._agreement.expect(joiners)
        for worker in self._joining:
            self.mark_changed(worker)

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest push step that was released or withdrawn on this shard.

        The result contains only the live workers of groups in which pushes wait to be released.
        """
        return self._agreement.over()

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Release waiting pushes up to the steps in `over`, before their round is complete.

        The rounds of two shards may be some pushes apart: one shard may have restarted from an
        older state, or refused a push that the other shard accepted. Each shard may then wait for a
        push of a worker that waits at the other shard.

        Args:
            over: Worker -> newest push step that another shard released or withdrew.

        Returns:
            The tokens of the pushes of each update, in order of worker.
        """
        return [self.take(tokens) for tokens in self._agreement.late_by(over)]

    # -- changes of groups ------------------------------------------------------------------

    def pause(self) -> None:
        """Hold every worker that finishes a round until `regroup` is called."""
        self._paused = True

    def is_quiescent(self) -> bool:
        """Return True if every live worker has finished its round and waits to proceed."""
        return len(self._held) == len(self._live)

    def regroup(self, groups: Groups) -> None:
        """Continue with the same workers in new groups.

        A push that waits for its round now waits for the round of its worker's new group. Members
        of a group step together, so all members take over the lowest clock of the new group. A
        worker that is computing is then no further ahead of the slowest worker than the bound.
        """
        self._set_groups(groups)
        for group in groups:
            live = [worker for worker in group if self.is_live(worker)]
            clock = min((self._clocks[worker] for worker in live), default=0)
            self._clocks |= dict.fromkeys(live, clock)
        self._count()
        self._paused = False
        self._dirty = list(range(len(groups)))

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return the state of the rounds.

        Args:
            soft: True for the complete state, which only an uninterrupted run of the shard can use.
                False for the part that stays valid after a restart, as plain data.
        """
        if not soft:
            return {
                "clocks": {str(worker): clock for worker, clock in self._clocks.items()},
                "void": {str(worker): step for worker, step in self._void.items()},
                **self._agreement.state_dict(soft),
            }
        return {
            "live": list(self._live),
            "joining": list(self._joining),
            "submitted": {
                worker: [token.step for token in tokens]
                for worker, tokens in self._submitted.items()
            },
            "arrived_at": {
                worker: [self._arrived_at[token] for token in tokens]
                for worker, tokens in self._submitted.items()
            },
            "held": list(self._held),
            "clocks": dict(self._clocks),
            "void": dict(self._void),
            "dirty": list(self._dirty),
            "deadline": self._deadline,
            "paused": self._paused,
            "groups": self.groups,
            **self._agreement.state_dict(soft),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore a state from `state_dict`. Load the state with soft=True after soft=False."""
        self._clocks = {int(worker): clock for worker, clock in state["clocks"].items()}
        self._void = {int(worker): step for worker, step in state["void"].items()}
        if soft:
            self._set_groups(state.get("groups", self.groups))
            self._live, self._joining = list(state["live"]), list(state["joining"])
            self._submitted = {
                worker: [ArrivalToken(worker, step) for step in steps]
                for worker, steps in state["submitted"].items()
            }
            self._load_since_0_3(state)
            self._count()
        self._agreement.load_state_dict(state, soft)

    def _load_since_0_3(self, state: State) -> None:
        """Restore what version 0.3 added to the state of some rules.

        A journal of version 0.2 has no arrival times. For drawn workers it has neither held workers
        nor changed groups: all live workers outside the round are held.
        """
        times = state.get("arrived_at", {})
        self._arrived_at = {
            token: when
            for worker, tokens in self._submitted.items()
            for token, when in zip(tokens, times.get(worker, [0.0] * len(tokens)), strict=True)
        }
        outside = [worker for worker in self._live if worker not in state.get("open", ())]
        self._held = dict.fromkeys(state.get("held", outside))
        self._dirty = list(state.get("dirty", range(len(self.groups))))
        self._deadline, self._paused = state.get("deadline"), state.get("paused", False)
