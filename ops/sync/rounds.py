"""Rounds of one shard: its workers, their waiting pushes and their iteration counts.

A `Rounds` object records workers and waiting pushes for every synchronization rule. The rule reads
the `Rounds` object and decides only which waiting pushes are released, and whether a worker may
proceed. An agreement (`thinwire.ops.sync.agreements`) makes all shards of a run form equal rounds.

A `Rounds` object reads no clock and receives times as arguments, so a replay of a shard's journal
repeats all rounds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from thinwire.ops.sync.agreements import agreement_of
from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, SyncRule
from thinwire.ops.sync.groups import Groups, name_of
from thinwire.ops.types import State


class Rounds:
    """Workers, waiting pushes, worker groups and workers' iteration counts of one shard.

    The clock of a worker is its number of finished iterations. A live worker computes, or has a
    push that waits to be released, or is held (gets no reply) until it may proceed. A `Rounds`
    object counts workers by worker group and by clock, so that a push costs no loop over all
    workers.

    Attributes:
        rule: Synchronization rule of the run.
        follows: True on every shard but shard 0. Only shard 0 calls `SyncRule.may_proceed`.
        groups: Current worker groups; each worker id is in exactly one group.
        changed: Numbers of the worker groups whose pushes or members have changed since the last
            call of `SyncRule.ready`, ascending. Synchronization rules may skip unchanged groups.
    """

    def __init__(self, rule: SyncRule, generation: int = 0, follows: bool = False) -> None:
        """Create the rounds of a shard that has no workers yet.

        Args:
            rule: Synchronization rule of the run.
            generation: Generation of the shard, a number that grows with each restart of the shard.
            follows: True on every shard but shard 0.
        """
        self.rule, self.follows = rule, follows
        self.changed: Sequence[int] = ()
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
        self._paused = False  # True if no worker may proceed until the groups change
        self._dirty: list[int] = []  # worker groups changed since the last `advance`, ascending
        self._deadline: float | None = None  # time of the next `advance` without a new push
        self._set_groups(rule.groups)
        self._count()
        self._agreement = agreement_of(self, generation)

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

    # -- what a rule reads ------------------------------------------------------------------

    def members(self, number: int) -> Sequence[int]:
        """Return the live workers in the current round of worker group `number`, ascending."""
        return self._agreement.members(number)

    def is_complete(self, number: int) -> bool:
        """Return True if all workers of the current round of worker group `number` have pushed."""
        return self._agreement.is_complete(number)

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

    def has_submitted(self, worker: int) -> bool:
        """Return True if a push of the worker waits to be released."""
        return worker in self._submitted

    def may_proceed(self, worker: int) -> bool:
        """Return True if a worker is live, has no waiting push and is not held after a round."""
        waits = worker in self._held or worker in self._submitted
        return self.is_live(worker) and not waits

    def group_of(self, worker: int) -> int:
        """Return the number of a worker's group, which is an index into `Rounds.groups`."""
        return self._numbers[worker]

    def name_of(self, worker: int) -> str:
        """Return the name that metrics use for a worker's group."""
        return self._names[self._numbers[worker]]

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers in the same current round as a worker, including the worker."""
        return self._agreement.fellows(worker)

    # -- workers ----------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        """Add a joining worker, which becomes live when the shards' agreement admits the worker."""
        if not self.is_live(worker) and worker not in self._joining:
            bisect.insort(self._joining, worker)
            self.mark_changed(worker)

    def leave(self, worker: int) -> None:
        """Remove a worker that has left, and its waiting pushes, so that no round waits for it."""
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
        self._held[worker] = None

    def hold(self, workers: Iterable[int]) -> None:
        """Hold live workers (send no reply) until the workers may proceed."""
        self._held.update(dict.fromkeys(workers))

    def reply_in_order_of_id(self) -> None:
        """Let the held workers proceed in ascending order of their ids."""
        self._held = dict.fromkeys(sorted(self._held))

    # -- arrivals ---------------------------------------------------------------------------

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add a live worker's push, which waits to be released; a push added twice counts once."""
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
        """Remove all waiting pushes of a worker, and record the newest withdrawn step.

        Args:
            worker: Id of a worker that no longer waits for the reply to its push.
            step: Step of the worker's newest withdrawn push; no push need wait on this shard.
        """
        self._void[worker] = max(step, self._void.get(worker, 0))
        if self._drop_arrivals(worker) or self._joining:
            self.mark_changed(worker)
        self._agreement.withdrew(worker, step)

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

    # -- rounds -----------------------------------------------------------------------------

    def advance(self, now: float) -> Advance:
        """Release complete rounds, make joining workers live, and let workers proceed.

        Returns:
            Pushes of the released rounds, and workers that may proceed. A joined worker that may
            proceed may pull the weights.
        """
        agreement, newest = self._agreement, self._agreement.newest
        agreement.admit_early(self._dirty)
        num_joining = len(self._joining)
        self.changed, self._dirty = self._dirty, []
        released = self._release(now)
        # All pushes of the next round may wait already, for example after a restart of the shard.
        while agreement.begin_next():
            released += self._release(now)
        return Advance(
            released,
            self._let_proceed(),
            has_drawn=agreement.newest != newest,
            has_entered=len(self._joining) != num_joining,
        )

    def _release(self, now: float) -> list[tuple[ArrivalToken, ...]]:
        """Release late pushes; then, by group, release rounds and make joining workers live."""
        agreement = self._agreement
        released = [self.take(late) for late in agreement.late()]
        ready = agreement.ready(now)
        self._deadline = ready.look_again_at
        due: dict[int, list[tuple[ArrivalToken, ...]]] = {}  # worker group -> its released rounds
        for tokens in ready.releases:
            if not tokens:
                rule = type(self.rule).__name__
                raise ValueError(f"{rule}.ready released a round without pushes; expected some")
            due.setdefault(self._numbers[tokens[0].worker], []).append(tokens)
        for number in sorted({*self.changed, *due}):
            for tokens in due.get(number, ()):
                agreement.releases(tokens)
                released.append(self.take(tokens))
            agreement.admit(number, number in due or not self.has_waiting(number))
        return released

    def take(self, tokens: Sequence[ArrivalToken]) -> tuple[ArrivalToken, ...]:
        """Remove released pushes, add 1 to the clocks of their workers, and hold these workers."""
        for token in tokens:
            worker = token.worker
            self._submitted[worker].remove(token)
            del self._arrived_at[token]
            if self._submitted[worker]:  # another push waits for the worker's next round
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
        """Return the held workers that may proceed, and remove these workers from `_held`."""
        if self._paused:
            return []
        may_proceed, submitted = self._agreement.may_proceed, self._submitted
        proceeding = [w for w in self._held if w not in submitted and may_proceed(w)]
        for worker in proceeding:
            del self._held[worker]
        return proceeding

    def next_deadline(self) -> float | None:
        """Return the time at which `advance` must be called without a new push; None if never."""
        return self._deadline

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

    # -- agreement of the shards ------------------------------------------------------------

    def draws(self) -> tuple[Draw, ...]:
        """Return shard 0's latest announced rounds, newest last; () with `Agreement.JOINERS`."""
        return tuple(self._agreement.draws())

    def follow(self, draws: Sequence[Draw]) -> None:
        """Use the rounds that shard 0 announces; this is called on all shards except shard 0."""
        self._agreement.follow(draws)

    def joiners(self) -> tuple[Joiners, ...]:
        """Return the joined workers without a finished round, which shard 0 must announce."""
        return tuple(self._agreement.joiners())

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Store the joining workers that shard 0 announces, on a shard other than shard 0."""
        self._agreement.expect(joiners)
        for worker in self._joining:
            self.mark_changed(worker)

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest push step that was released or withdrawn on this shard.

        The mapping of workers to steps contains only live workers of worker groups in which pushes
        wait to be released.
        """
        return self._agreement.over()

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Release waiting pushes up to the steps in `over`, even if their rounds are incomplete.

        The rounds of two shards may differ by some pushes: one shard may have restarted from an
        older state, or refused a push that the other shard accepted. Each shard may then wait for a
        push of a worker that waits at the other shard.

        Args:
            over: Worker -> newest push step that shard 0 released or withdrew.

        Returns:
            For each update to apply, the tokens of the pushes in the update, in order of worker.
        """
        return [self.take(tokens) for tokens in self._agreement.late_by(over)]

    # -- changes of groups ------------------------------------------------------------------

    def pause(self) -> None:
        """Hold every worker that finishes a round until `regroup` changes the worker groups."""
        self._paused = True

    def is_quiescent(self) -> bool:
        """Return True if every live worker has finished its round and waits for a reply."""
        return len(self._held) == len(self._live)

    def regroup(self, groups: Groups) -> None:
        """Continue with the same workers in new worker groups.

        After a change of groups, a waiting push waits for the round of its worker's new group.
        Members of a worker group step together, so the clocks of all live members of a new group
        are set to the lowest of these clocks. No worker's lead over the slowest worker thus grows
        beyond the staleness bound.
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
        """Return the state of a shard's rounds.

        Args:
            soft: True to return the complete state, which a shard can use only with its journal.
                False to return, as plain data, the part of the state that stays valid after a
                restart without a journal.
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
        """Restore a state from `state_dict`; load a state with soft=False before soft=True."""
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
        """Restore the parts of the rounds' state that Thinwire 0.3 has added to the journal.

        A journal of Thinwire 0.2 has no arrival times of pushes. If workers are drawn for each
        round, a 0.2 journal also lacks the held workers and the changed worker groups. A restored
        0.2 journal with drawn workers thus holds all live workers outside the current round.
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
