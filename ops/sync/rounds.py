"""Rounds of one shard: releases of waiting pushes, by a synchronization rule and an agreement.

The rule (`SyncRule`) reads a `Rounds` object and decides only which waiting pushes are released,
and whether a worker may proceed. An agreement (`thinwire.ops.sync.agreements`) makes all shards of
a run form equal rounds.

A `Rounds` object reads no clock and receives times as arguments, so a replay of a shard's journal
repeats all rounds.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Collection, Mapping, Sequence

from thinwire.ops.policy import PolicyFailed
from thinwire.ops.sync.agreements import agreement_of
from thinwire.ops.sync.base import (
    Advance,
    Agreement,
    ArrivalToken,
    Draw,
    Joiners,
    Ready,
    SyncRule,
)
from thinwire.ops.sync.groups import Groups
from thinwire.ops.sync.records import RoundRecords
from thinwire.ops.types import State


class Rounds(RoundRecords):
    """Rounds of one shard: the rule's decisions applied to the records of workers and pushes."""

    def __init__(self, rule: SyncRule, generation: int = 0, follows: bool = False) -> None:
        """Create the rounds of a shard that has no workers yet.

        Args:
            rule: Synchronization rule of the run.
            generation: Generation of the shard, a number that grows with each restart of the shard.
            follows: True on every shard but shard 0.
        """
        super().__init__(rule, follows)
        self._paused = False  # True if no worker may proceed until the groups change
        self._deadline: float | None = None  # time of the next `advance` without a new push
        # Lowest clock of live workers when all held workers were examined; None: examine them all.
        self._examined_at: int | None = None
        self._permits_by_bound = type(rule).may_proceed is SyncRule.may_proceed
        self._agreement = agreement_of(self, generation)

    # -- what a rule reads ------------------------------------------------------------------

    def members(self, number: int) -> Sequence[int]:
        """Return the live workers in the current round of worker group `number`, ascending."""
        return self._agreement.members(number)

    def is_complete(self, number: int) -> bool:
        """Return True if all workers of the current round of worker group `number` have pushed."""
        return self._agreement.is_complete(number)

    def may_proceed(self, worker: int) -> bool:
        """Return True if a worker is live, has no waiting push and is not held after a round."""
        waits = worker in self._held or worker in self._submitted
        return self.is_live(worker) and not waits

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
        self._unexamined.discard(worker)
        self._agreement.left(worker)
        self.mark_changed(worker)

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
            self._examined_at = None
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
        ready = agreement.ready() or self.rule.ready(self, now)
        self._deadline = ready.look_again_at
        self._check_progress(ready)
        due: dict[int, list[tuple[ArrivalToken, ...]]] = {}  # worker group -> its released rounds
        for tokens in ready.releases:
            due.setdefault(self._numbers[tokens[0].worker], []).append(tokens)
        for number in sorted({*self.changed, *due}):
            for tokens in due.get(number, ()):
                agreement.releases(tokens)
                released.append(self.take(tokens))
            agreement.admit(number, number in due or not self.has_waiting(number))
        return released

    def _check_progress(self, ready: Ready) -> None:
        """Raise an error if the rule releases a round without pushes, or can never release one.

        If all workers of the run wait, no further push arrives, so a rule that releases nothing and
        names no time to look again would stop the run.
        """
        if all(ready.releases) and (ready.releases or ready.look_again_at is not None):
            return
        name = f"{type(self.rule).__name__}.ready"
        if ready.releases:
            raise PolicyFailed(f"{name} released a round without pushes; expected some pushes.")
        decides = self.rule.agreement is Agreement.RELEASES and not self.follows
        if decides and len(self._submitted) == len(self._numbers):
            raise PolicyFailed(
                f"{name} released nothing although all {len(self._numbers)} workers wait; expected "
                "a release, or a time at which to look again (Ready(look_again_at=...))."
            )

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
        self.hold(token.worker for token in tokens)
        self._agreement.took(tokens)
        return tuple(tokens)

    def _let_proceed(self) -> list[int]:
        """Return the held workers that may proceed, and remove these workers from `_held`."""
        if self._paused:
            return []
        proceeding = [worker for worker in self._to_examine() if self._proceeds(worker)]
        self._unexamined.clear()
        for worker in proceeding:
            del self._held[worker]
        return proceeding

    def _to_examine(self) -> Collection[int]:
        """Return the held workers whose permission may have changed since the last `advance`.

        Hundreds of workers may be held, so a push must not cost a loop over all of them. The
        permission by a staleness bound changes only with the lowest clock of live workers. A rule
        with its own `may_proceed` may read anything, so all held workers are examined.
        """
        lowest = self.min_clock()
        has_changed = self._examined_at != lowest or not self._permits_by_bound
        self._examined_at = lowest
        if has_changed or len(self._unexamined) > 1:  # the workers proceed in the order of `_held`
            return [w for w in self._held if has_changed or w in self._unexamined]
        return self._unexamined

    def _proceeds(self, worker: int) -> bool:
        """Return True if a held worker may proceed; the rule decides on shard 0 only."""
        if worker in self._submitted or not self._agreement.may_proceed(worker):
            return False
        return self.follows or self.rule.may_proceed(self, worker)

    def next_deadline(self) -> float | None:
        """Return the time at which `advance` must be called without a new push; None if never."""
        return self._deadline

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
        self._paused, self._examined_at = False, None
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
                **({"rule": copy.deepcopy(self.state)} if self.state else {}),
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
            "rule": copy.deepcopy(self.state),
            **self._agreement.state_dict(soft),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore a state from `state_dict`; load a state with soft=False before soft=True."""
        self._clocks = {int(worker): clock for worker, clock in state["clocks"].items()}
        self._void = {int(worker): step for worker, step in state["void"].items()}
        self.state = copy.deepcopy(state.get("rule", {}))
        if soft:
            self._set_groups(state.get("groups", self.groups))
            self._live, self._joining = list(state["live"]), list(state["joining"])
            self._submitted = {
                worker: [ArrivalToken(worker, step) for step in steps]
                for worker, steps in state["submitted"].items()
            }
            self._load_parts_that_may_lack(state)
            self._count()
        self._agreement.load_state_dict(state, soft)

    def _load_parts_that_may_lack(self, state: State) -> None:
        """Restore the parts of the rounds' state that an older journal of the same format lacks.

        An older journal has no arrival times of pushes. If workers are drawn for each round, an
        older journal also lacks the held workers and the changed worker groups. A restored older
        journal with drawn workers thus holds all live workers outside the current round.
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
        self._examined_at = None
