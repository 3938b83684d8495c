"""How the shards of a run form equal rounds: shard 0 announces, and the other shards follow.

A worker sends each push to all shards, and the parts of one push may arrive in different rounds of
two shards. Each shard could then wait for a push of a worker that waits at the other shard. An
agreement excludes this deadlock. `Agreement` lists the three ways; `agreement_of` picks the object
for a shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.sync.base import (
    Agreement,
    ArrivalToken,
    Draw,
    Joiners,
    Ready,
)
from thinwire.ops.types import State

if TYPE_CHECKING:
    from thinwire.ops.sync.rounds import Rounds

#: Number of latest rounds that shard 0 announces together to the other shards, at least.
_ANNOUNCED_TOGETHER = 4
#: Largest number of rounds that shard 0 announces together, if many groups release rounds.
_MOST_ANNOUNCED = 64
#: Count of announcement numbers reserved for one generation (one process) of shard 0. A restart
#: voids the rounds that shard 0 announced after its last snapshot. The next generation must not use
#: the numbers of void announcements again.
_NUMBERS_PER_GENERATION = 1 << 32


class ShardAgreement:
    """Base of agreements: every live worker of a group takes part in each round of the group.

    Attributes:
        newest: Number of the newest round that shard 0 announced by name; 0 for joiners.
    """

    newest = 0

    def __init__(self, rounds: Rounds) -> None:
        """Start without workers.

        Args:
            rounds: The rounds of this shard. Their constructor creates this object.
        """
        self._rounds = rounds

    def members(self, number: int) -> Sequence[int]:
        """Return the workers of the current round of a group, ascending."""
        rounds = self._rounds
        return [worker for worker in rounds.groups[number] if rounds.is_live(worker)]

    def is_complete(self, number: int) -> bool:
        """Return True if a push of every member of the group's current round waits."""
        return self._rounds.has_all(number)

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers in the worker's current round, including the worker itself."""
        return self.members(self._rounds.group_of(worker))

    def ready(self, now: float) -> Ready:
        """Return the pushes to release now, by the synchronization rule."""
        return self._rounds.rule.ready(self._rounds, now)

    def may_proceed(self, worker: int) -> bool:
        """Return True if a held worker may compute its next round."""
        return self._rounds.rule.may_proceed(self._rounds, worker)

    # The methods below are called by `Rounds` when the named event happens.

    def late(self) -> Sequence[Sequence[ArrivalToken]]:
        """Return pushes of rounds that shard 0 has finished, each set a separate update."""
        return ()

    def late_by(self, over: Mapping[int, int]) -> Sequence[Sequence[ArrivalToken]]:
        """Return waiting pushes up to the steps in `over`, each set a separate update."""
        return ()

    def admit_early(self, numbers: Sequence[int]) -> None:
        """Make joining workers of changed groups live before rounds are released."""

    def admit(self, number: int, at_boundary: bool) -> None:
        """Make joining workers of a group live after rounds were released.

        Args:
            number: Number of the group, an index into `Rounds.groups`.
            at_boundary: True if a round of the group was released, or no push of the group waits.
        """

    def begin_next(self) -> bool:
        """Begin the next round if the workers of rounds are known; return True if one began."""
        return False

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record that the rule releases a complete round, before its pushes are removed."""

    def took(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record that waiting pushes were removed, as a complete round or late."""

    def submitted(self, worker: int) -> None:
        """Record that a push of a worker waits."""

    def withdrew(self, worker: int, step: int) -> None:
        """Record that a worker withdrew its pushes up to `step`."""

    def left(self, worker: int) -> None:
        """Record that a worker has left."""

    # The methods below carry announcements of shard 0 to the other shards.

    def draws(self) -> Sequence[Draw]:
        """Return the latest announced rounds, the newest last."""
        return ()

    def follow(self, draws: Sequence[Draw]) -> None:
        """Replace the known announced rounds by the rounds of shard 0."""

    def joiners(self) -> Sequence[Joiners]:
        """Return the workers that have finished no round of their group yet."""
        return ()

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Replace the expected joining workers by the joining workers of shard 0."""

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest released or withdrawn step, in groups with waiting pushes."""
        return {}

    def state_dict(self, soft: bool) -> State:
        """Return the durable state; with `soft` the whole state."""
        raise NotImplementedError

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the result of `state_dict`."""
        raise NotImplementedError


class JoinersOfShardZero(ShardAgreement):
    """Shard 0 with `Agreement.JOINERS`: a worker joins at the next round boundary of its group."""

    def __init__(self, rounds: Rounds) -> None:
        """Start without workers."""
        super().__init__(rounds)
        self._over: dict[int, int] = {}  # live worker -> newest step released or withdrawn
        self._entered: list[Joiners] = []  # live workers that have finished no round yet

    def joiners(self) -> Sequence[Joiners]:
        """Return, by group, the workers that have not finished a round of their group yet."""
        waiting = tuple(worker for worker in self._rounds.joining() if self._has_fellows(worker))
        return [*self._entered, *([Joiners(waiting)] if waiting else [])]

    def _has_fellows(self, worker: int) -> bool:
        """Return True if the worker's group has two or more members."""
        return len(self._rounds.groups[self._rounds.group_of(worker)]) > 1

    def admit(self, number: int, at_boundary: bool) -> None:
        """Make the joining workers of the group live if the group is between two rounds."""
        rounds = self._rounds
        if not at_boundary or not (rounds.rule.admits_in_round or self._is_between(number)):
            return
        workers = self._joining_of(number)
        if workers and self._has_fellows(workers[0]):
            members = tuple(member for member in rounds.groups[number] if member in self._over)
            after = tuple(self._over[member] for member in members)
            self._entered.append(Joiners(tuple(workers), True, members, after))
        for worker in workers:
            self._enter(worker)

    def _is_between(self, number: int) -> bool:
        """Return True unless live members of the group compute in a round."""
        return not self.members(number) or self._rounds.has_held()

    def _joining_of(self, number: int) -> list[int]:
        rounds = self._rounds
        return [worker for worker in rounds.joining() if rounds.group_of(worker) == number]

    def _enter(self, worker: int) -> None:
        """Make a joining worker live. The worker proceeds when the staleness bound allows it.

        A returning worker must neither hold back other workers nor run ahead of other workers, so
        its clock is at least the lowest clock. Members of a group step together, so a joining
        worker takes over the clock of a live member.
        """
        rounds = self._rounds
        peer = next(iter(self.members(rounds.group_of(worker))), None)
        own_clock = max(rounds.clock(worker), rounds.min_clock())
        rounds.enter(worker, own_clock if peer is None else rounds.clock(peer))

    def took(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record the released steps; the workers have finished a round."""
        if self._entered:
            self._entered = _without_workers(self._entered, {token.worker for token in tokens})
        for token in tokens:
            self._over[token.worker] = max(token.step, self._over.get(token.worker, 0))

    def withdrew(self, worker: int, step: int) -> None:
        """Record the newest withdrawn step of a live worker."""
        if self._rounds.is_live(worker):
            self._over[worker] = max(step, self._over.get(worker, 0))

    def left(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._over.pop(worker, None)
        self._entered = _without_workers(self._entered, {worker})

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest released or withdrawn step, in groups with waiting pushes."""
        rounds = self._rounds
        return {
            worker: max(self._over.get(worker, 0), rounds.newest_withdrawn(worker))
            for worker in rounds.live()
            if rounds.has_waiting(rounds.group_of(worker))
        }

    def late_by(self, over: Mapping[int, int]) -> Sequence[Sequence[ArrivalToken]]:
        """Return waiting pushes up to the workers' steps in `over`, as one update per group."""
        late: dict[int, list[ArrivalToken]] = {}
        for worker, step in sorted(over.items()):
            for token in self._rounds.oldest([worker]):
                if token.step <= step:
                    late.setdefault(self._rounds.group_of(worker), []).append(token)
                    self._rounds.mark_changed(worker)
        return list(late.values())

    def state_dict(self, soft: bool) -> State:
        """Return {}; with `soft` the released steps and the new workers."""
        return {"over": dict(self._over), "entered": _as_plain(self._entered)} if soft else {}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the result of `state_dict`."""
        if soft:
            self._over, self._entered = dict(state["over"]), _of_plain(state["entered"])


class JoinersOfFollower(JoinersOfShardZero):
    """A shard other than shard 0 with `Agreement.JOINERS`: workers join when they join shard 0.

    The rounds of two shards may be one push apart: one shard releases the push of worker A alone,
    and the other shard merges this push with the push of worker B, which joined in between. If a
    worker joined this shard at the end of a round, the rounds could be two pushes apart. Each shard
    would then wait for a push of a worker that waits at the other shard. So a worker joins the same
    round on this shard as on shard 0, even in the middle of the round.
    """

    def __init__(self, rounds: Rounds) -> None:
        """Start without workers."""
        super().__init__(rounds)
        self._expected: Sequence[Joiners] = ()  # new workers that finished no round at shard 0 yet

    def may_proceed(self, worker: int) -> bool:
        """Return True: only shard 0 holds workers back."""
        return True

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Replace the expected joining workers by the joining workers of shard 0."""
        self._expected = tuple(joiners)

    def admit_early(self, numbers: Sequence[int]) -> None:
        """Make joining workers live first: complete rounds need their pushes."""
        for number in numbers:
            self.admit(number, at_boundary=False)

    def admit(self, number: int, at_boundary: bool) -> None:
        """Make those joining workers live that are live at shard 0, even in mid-round."""
        for worker in self._joining_of(number):
            if self._may_enter(worker):
                self._enter(worker)

    def _may_enter(self, worker: int) -> bool:
        """Return True if the worker may become live, because this shard has caught up with shard 0.

        All pushes that shard 0 had released or withdrawn before the worker became live there must
        be released or withdrawn on this shard, too. A worker that is not in `_expected` finished a
        round at shard 0 before this shard started, and may become live.
        """
        joiners = next((item for item in self._expected if worker in item.workers), None)
        if joiners is None:
            return True
        before = zip(joiners.members, joiners.after, strict=True)
        return joiners.has_entered and all(self._is_over(member, step) for member, step in before)

    def _is_over(self, worker: int, step: int) -> bool:
        """Return True if no push of the worker up to this step may still be released on this shard.

        A worker with no released push since this shard started has no push to wait for: the shard
        refuses pushes from before its start.
        """
        if not self._rounds.is_live(worker):
            return True
        waiting = self._rounds.oldest([worker])
        return waiting[0].step > step if waiting else self._over.get(worker, step) >= step

    def state_dict(self, soft: bool) -> State:
        """Return {}; with `soft` the released steps, and the new workers of shard 0."""
        state = super().state_dict(soft)
        return state | {"expected": _as_plain(self._expected)} if soft else state

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state, soft)
        if soft:
            self._expected = _of_plain(state["expected"])


class Announced(ShardAgreement):
    """Base of agreements in which shard 0 announces each round: its workers and released steps.

    A joining worker becomes live immediately.
    """

    def __init__(self, rounds: Rounds, newest: int) -> None:
        """Start without workers and announcements; `newest` is the number of the newest one."""
        super().__init__(rounds)
        self.newest = newest
        self._steps: dict[int, int] = {}  # worker -> newest step that was released
        self._num_rounds = 0  # number of released rounds
        self._announced: list[Draw] = []  # rounds that shard 0 announced, the newest last

    def draws(self) -> Sequence[Draw]:
        """Return the latest announced rounds, the newest last."""
        return self._announced

    def admit_early(self, numbers: Sequence[int]) -> None:
        """Make all joining workers live."""
        rounds = self._rounds
        for worker in rounds.joining():
            rounds.enter(worker, rounds.clock(worker))

    def took(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record the released steps."""
        for token in tokens:
            self._steps[token.worker] = token.step

    def _past(self, workers: Sequence[int]) -> tuple[int, ...]:
        """Return each worker's newest released or withdrawn step, in the order of `workers`."""
        withdrawn = self._rounds.newest_withdrawn
        return tuple(max(self._steps.get(worker, 0), withdrawn(worker)) for worker in workers)

    def _announce(self, announced: Draw) -> None:
        # Each group may release more than one round between two announcements.
        wanted = min(2 * len(self._rounds.groups), _MOST_ANNOUNCED)
        number = max(_ANNOUNCED_TOGETHER, wanted)
        self._announced = [*self._announced[1 - number :], announced]

    def _finished(self, tokens: Sequence[ArrivalToken]) -> Draw:
        """Return the announcement of a round that is released now, as number `newest`.

        `after` must not contain the steps that this round releases, so this method is called before
        the pushes are removed. With these steps in `after`, other shards would release the pushes
        of this round as late pushes, in a separate update.
        """
        workers = tuple(token.worker for token in tokens)
        steps = tuple(token.step for token in tokens)
        return Draw(self.newest, self._num_rounds, workers, steps, self._past(workers))

    def state_dict(self, soft: bool) -> State:
        """Return the released steps and the number of rounds; with `soft` the whole state."""
        state: State = {"rounds": self._num_rounds}
        if not soft:
            steps = {str(worker): step for worker, step in self._steps.items()}
            return state | {"steps": steps, "followed": 0}
        return state | {
            "steps": dict(self._steps),
            "newest": self.newest,
            "announced": _draws_as_plain(self._announced),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the result of `state_dict`."""
        self._steps = {int(worker): step for worker, step in state["steps"].items()}
        self._num_rounds = state["rounds"]
        if soft:
            self.newest = state["newest"]
            self._announced = _draws_of_plain(state["announced"])


class ReleasesOfShardZero(Announced):
    """Shard 0 with `Agreement.RELEASES`: the rule decides, and each release is announced."""

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """Announce a round, with the steps that are released."""
        self.newest += 1
        self._announce(self._finished(sorted(tokens)))
        self._num_rounds += 1


class NamedRounds(Announced):
    """Base of agreements in which a shard knows the workers of a round before it releases them."""

    def __init__(self, rounds: Rounds, newest: int) -> None:
        """Start without workers and announcements; `newest` is the number of the newest one."""
        super().__init__(rounds, newest)
        self._drawn: Draw | None = None  # the current round; None between rounds
        self._open: set[int] = set()  # workers of the current round that neither left nor withdrew

    def members(self, number: int) -> Sequence[int]:
        """Return the workers of the current round, ascending."""
        return sorted(self._open)

    def is_complete(self, number: int) -> bool:
        """Return True if a push of every worker of the current round waits."""
        return bool(self._open) and all(map(self._rounds.has_submitted, self._open))

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the current round's workers, ascending; [] if `worker` is not in the round."""
        return sorted(self._open) if worker in self._open else []

    def late(self) -> Sequence[Sequence[ArrivalToken]]:
        """Return the pushes of the round's workers that are older than the round.

        Shard 0 had released or withdrawn these pushes before the round began. They become one
        separate update.
        """
        if self._drawn is None:
            return ()
        after = dict(zip(self._drawn.workers, self._drawn.after, strict=False))
        waiting = self._rounds.oldest(sorted(self._open))
        late = [token for token in waiting if token.step <= after.get(token.worker, 0)]
        return [late] if late else ()

    def begin_next(self) -> bool:
        """Begin the next known round if the current round is over or all its workers have left."""
        if self._open:
            return False
        self._drawn = self._next()
        if self._drawn is None:
            return False
        self._begin(self._drawn)
        self._rounds.reply_in_order_of_id()
        return True

    def _next(self) -> Draw | None:
        """Return the next round; None if it is not known."""
        raise NotImplementedError

    def _begin(self, drawn: Draw) -> None:
        """Begin a round: set the workers that the round waits for."""
        self._open = {worker for worker in drawn.workers if self._rounds.is_live(worker)}

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """End the current round."""
        self._open = set()
        self._num_rounds += 1

    def left(self, worker: int) -> None:
        """Forget a worker that has left: announced rounds that are not released wait without it."""
        self._open.discard(worker)
        self._announced = [_without(item, worker) for item in self._announced]

    def state_dict(self, soft: bool) -> State:
        """Return the released steps and the number of rounds; with `soft` the whole state."""
        state = super().state_dict(soft)
        if not soft:
            return state
        drawn = _draws_as_plain([self._drawn] if self._drawn else [])
        return state | {"drawn": drawn, "open": sorted(self._open)}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state, soft)
        if soft:
            self._drawn = next(iter(_draws_of_plain(state["drawn"])), None)
            self._open = set(state["open"])


class DrawsOfShardZero(NamedRounds):
    """Shard 0 with `Agreement.DRAWS`: draws the next workers as soon as a round is released.

    A shard holds a worker that is not drawn. The shard replies to the worker's request when the
    worker is drawn, with the weights at that time. A push of a worker that is not drawn (from
    before a restart) waits until the worker is drawn.
    """

    def may_proceed(self, worker: int) -> bool:
        """Return True if the worker is in the current round and the rule lets it proceed."""
        return worker in self._open and super().may_proceed(worker)

    def _next(self) -> Draw | None:
        """Draw the workers of the next round; return None if no worker is live."""
        rounds = self._rounds
        if not rounds.live():
            return None
        workers = rounds.rule.draw(self._num_rounds, rounds.live())
        self.newest += 1
        drawn = Draw(self.newest, self._num_rounds, workers, after=self._past(workers))
        self._announce(drawn)
        return drawn

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """End the current round; announce its steps in place of its draw."""
        self._announced[-1:] = [self._finished(tokens)]
        super().releases(tokens)

    def withdrew(self, worker: int, step: int) -> None:
        """Continue the round without the worker: other shards may have accepted its push."""
        if worker in self._open:
            self._open.discard(worker)
            self._rounds.hold([worker])


class AnnouncedByShardZero(NamedRounds):
    """A shard that follows the rounds that shard 0 announces, with `Agreement.RELEASES`.

    An announcement may arrive before or after the pushes of its workers. For a round that shard 0
    has released, a shard waits only for the pushes that shard 0 has released. A shard does not wait
    for pushes that it has released itself, or for workers that have withdrawn their push. A push
    for a round that a shard has missed becomes a separate update in its worker's next round.
    """

    def __init__(self, rounds: Rounds) -> None:
        """Start without workers and announcements."""
        super().__init__(rounds, newest=0)
        self._gave_up: set[int] = set()  # workers with a withdrawn push that sent no other push
        self._awaited: list[Draw] = []  # announced rounds that have not begun here yet

    def may_proceed(self, worker: int) -> bool:
        """Return True: only shard 0 holds workers back."""
        return True

    def ready(self, now: float) -> Ready:
        """Return the oldest waiting pushes of the current round if the round is complete."""
        complete = self.is_complete(0)
        return Ready([self._rounds.oldest(self.members(0))] if complete else ())

    def follow(self, draws: Sequence[Draw]) -> None:
        """Add the announced rounds to the known rounds; drop rounds that a restart made void."""
        if not draws:
            return
        announced = {item.number: item for item in draws}
        known = [item for item in self._awaited if not self._is_void(item, draws)]
        self._awaited = [announced.get(item.number, item) for item in known]
        self._awaited += [item for item in draws if item.number > self.newest]
        self._announced, self.newest = list(draws), max(self.newest, draws[-1].number)
        if self._drawn is not None:
            void = self._is_void(self._drawn, draws)
            current = announced.get(self._drawn.number, self._drawn)
            before = set(self._open)
            self._open &= set() if void else self._to_wait_for(current)
            self._rounds.hold(sorted(before - self._open))

    def _is_void(self, known: Draw, draws: Sequence[Draw]) -> bool:
        """Return True if shard 0 restarted from a state before a known round was announced.

        This shard may be many rounds behind, so an old round of the same generation is not void
        although shard 0 announces only its newest rounds.
        """
        is_announced = any(item.number == known.number for item in draws)
        newest = draws[-1].number
        same = known.number // _NUMBERS_PER_GENERATION == newest // _NUMBERS_PER_GENERATION
        return not is_announced and (not same or known.number > newest)

    def _to_wait_for(self, drawn: Draw) -> set[int]:
        """Return the live workers of a round whose pushes wait here, or may still arrive."""
        waited = {worker for worker in drawn.workers if self._rounds.is_live(worker)}
        if self._is_open_at_shard_zero(drawn):
            return waited
        released = dict(zip(drawn.workers, drawn.steps, strict=False))
        waited -= self._gave_up
        return {worker for worker in waited if self._steps.get(worker, 0) < released.get(worker, 0)}

    def _is_open_at_shard_zero(self, drawn: Draw) -> bool:
        """Return True if shard 0 still waits for pushes of the round."""
        return drawn.number == self.newest and not drawn.steps

    def _next(self) -> Draw | None:
        """Return the next announced round; None if shard 0 has announced no other round."""
        return self._awaited.pop(0) if self._awaited else None

    def _begin(self, drawn: Draw) -> None:
        if self._is_open_at_shard_zero(drawn):
            # Forget withdrawals from before this draw, because the worker may push for this draw.
            # A withdrawn push for this draw stays withdrawn.
            withdrawn = self._rounds.newest_withdrawn
            after = zip(drawn.workers, drawn.after, strict=True)
            self._gave_up -= {worker for worker, step in after if withdrawn(worker) <= step}
        self._open = self._to_wait_for(drawn)

    def submitted(self, worker: int) -> None:
        """Record that a worker has sent another push since it withdrew one."""
        self._gave_up.discard(worker)

    def withdrew(self, worker: int, step: int) -> None:
        """Wait for a new push of the worker only if the same round at shard 0 waits for it."""
        self._gave_up.add(worker)
        is_open = self._drawn is not None and self._is_open_at_shard_zero(self._drawn)
        if worker in self._open and not is_open:
            self._open.discard(worker)
            self._rounds.hold([worker])

    def left(self, worker: int) -> None:
        """Forget a worker that has left."""
        super().left(worker)
        self._gave_up.discard(worker)
        self._awaited = [_without(item, worker) for item in self._awaited]

    def state_dict(self, soft: bool) -> State:
        """Return the released steps and the newest finished round; with `soft` everything."""
        state = super().state_dict(soft)
        if not soft:
            finished = self.newest if self._drawn is None else self._drawn.number - 1
            return state | {"followed": finished}
        awaited = _draws_as_plain(self._awaited)
        return state | {"gave_up": sorted(self._gave_up), "awaited": awaited}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state, soft)
        if not soft:
            self.newest = max(self.newest, state["followed"])
            return
        self._gave_up = set(state["gave_up"])
        self._awaited = _draws_of_plain(state["awaited"])


class DrawsOfFollower(AnnouncedByShardZero):
    """A shard other than shard 0 with `Agreement.DRAWS`: it follows the draws of shard 0."""

    def may_proceed(self, worker: int) -> bool:
        """Return True if the worker is drawn for the current round."""
        return worker in self._open


def agreement_of(rounds: Rounds, generation: int) -> ShardAgreement:
    """Return the agreement object of a shard for the rule's kind of agreement."""
    agreement, numbers = rounds.rule.agreement, generation * _NUMBERS_PER_GENERATION
    if agreement is Agreement.JOINERS:
        return JoinersOfFollower(rounds) if rounds.follows else JoinersOfShardZero(rounds)
    if agreement is Agreement.DRAWS:
        return DrawsOfFollower(rounds) if rounds.follows else DrawsOfShardZero(rounds, numbers)
    return AnnouncedByShardZero(rounds) if rounds.follows else ReleasesOfShardZero(rounds, numbers)


def _without_workers(joiners: Sequence[Joiners], gone: Collection[int]) -> list[Joiners]:
    """Return the sets of joining workers without the workers in `gone`."""
    remaining = []
    for group in joiners:
        workers = tuple(worker for worker in group.workers if worker not in gone)
        if workers:
            remaining.append(dataclasses.replace(group, workers=workers))
    return remaining


def _without(drawn: Draw, worker: int) -> Draw:
    if drawn.steps or worker not in drawn.workers:  # a released round does not change
        return drawn
    pairs = [pair for pair in zip(drawn.workers, drawn.after, strict=True) if pair[0] != worker]
    workers, after = tuple(member for member, _ in pairs), tuple(step for _, step in pairs)
    return dataclasses.replace(drawn, workers=workers, after=after)


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


def _draws_as_plain(draws: Sequence[Draw]) -> list[list[Any]]:
    return [
        [item.number, item.of_round, list(item.workers), list(item.steps), list(item.after)]
        for item in draws
    ]


def _draws_of_plain(draws: Sequence[Sequence[Any]]) -> list[Draw]:
    return [
        Draw(number, of_round, tuple(workers), tuple(steps), tuple(after))
        for number, of_round, workers, steps, after in draws
    ]
