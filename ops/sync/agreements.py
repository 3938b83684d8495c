"""How all shards of a run form equal rounds from the announcements of shard 0.

A worker sends a part of each push to every shard, and the parts of one push may arrive in different
rounds of two shards. Each shard could then wait for a push of a worker that waits at the other
shard. A `ShardAgreement` object prevents that two shards wait for each other. The enum `Agreement`
lists the three kinds of agreement, and `agreement_of` creates the agreement object of a shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from thinwire.ops.sync.base import (
    Agreement,
    ArrivalToken,
    Draw,
    Joiners,
    Ready,
)
from thinwire.ops.sync.records import RoundRecords
from thinwire.ops.types import State

#: Number of latest rounds in each announcement of shard 0, if few worker groups release rounds.
_ANNOUNCED_TOGETHER = 4
#: Largest number of latest rounds in an announcement of shard 0, for many worker groups.
_MOST_ANNOUNCED = 64
#: Count of announcement numbers reserved for one generation (one process) of shard 0. If shard 0
#: restarts, the rounds that shard 0 announced after its last snapshot become void. The next
#: generation of shard 0 must not use the numbers of void announcements again.
_NUMBERS_PER_GENERATION = 1 << 32


_Item = TypeVar("_Item", Draw, Joiners)


class ShardAgreement:
    """Base class of agreements: each round of a worker group has all live workers of the group.

    Attributes:
        newest: Number of the newest `Draw` (announced round) of shard 0; 0 with
            `Agreement.JOINERS`.
    """

    newest = 0

    def __init__(self, rounds: RoundRecords) -> None:
        """Create the agreement object of a shard that has no workers yet.

        Args:
            rounds: Records of the shard's workers and pushes.
        """
        self._rounds = rounds

    def members(self, number: int) -> Sequence[int]:
        """Return the ids of the workers in the current round of a worker group, ascending."""
        rounds = self._rounds
        return [worker for worker in rounds.groups[number] if rounds.is_live(worker)]

    def is_complete(self, number: int) -> bool:
        """Return True if all workers of the current round of a worker group have pushed."""
        return self._rounds.has_all(number)

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers in the same current round as a worker, including the worker."""
        return self.members(self._rounds.group_of(worker))

    def ready(self) -> Ready | None:
        """Return the pushes to release now; None if the synchronization rule decides."""
        return None

    def may_proceed(self, worker: int) -> bool:
        """Return False if the agreement alone holds a worker that has finished its round."""
        return True

    # `Rounds` calls the methods from `late` to `left` to process a round or to report an event.

    def late(self) -> Sequence[Sequence[ArrivalToken]]:
        """Return waiting pushes of rounds that shard 0 has finished: each set is one update."""
        return ()

    def late_by(self, over: Mapping[int, int]) -> Sequence[Sequence[ArrivalToken]]:
        """Return waiting pushes up to the workers' steps in `over`: each set is one update."""
        return ()

    def admit_early(self, numbers: Sequence[int]) -> None:
        """Make joining workers of the worker groups `numbers` live before rounds are released."""

    def admit(self, number: int, at_boundary: bool) -> None:
        """Make joining workers of a worker group live after rounds were released.

        Args:
            number: Number of the worker group, which is an index into `Rounds.groups`.
            at_boundary: True if a round of the worker group was released, or none of its pushes
                waits.
        """

    def begin_next(self) -> bool:
        """Begin the next round with its known workers; return True if a round has begun."""
        return False

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record that the rule releases a complete round, before the round's pushes are removed."""

    def took(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record that waiting pushes were removed: pushes of a complete round, or late pushes."""

    def submitted(self, worker: int) -> None:
        """Record that a worker's push has arrived and waits to be released."""

    def withdrew(self, worker: int, step: int) -> None:
        """Record that a worker has withdrawn its pushes up to the step `step`."""

    def left(self, worker: int) -> None:
        """Record that a worker has left the run."""

    # The methods `draws`, `joiners` and `over` return what shard 0 announces to the other shards,
    # and the other shards receive announcements by `follow` and `expect`.

    def draws(self) -> Sequence[Draw]:
        """Return the latest rounds that shard 0 has announced, the newest round last."""
        return ()

    def follow(self, draws: Sequence[Draw]) -> None:
        """Use the rounds that shard 0 announces, on a shard other than shard 0."""

    def joiners(self) -> Sequence[Joiners]:
        """Return the joined workers that have finished no round of their worker group yet."""
        return ()

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Store the joining workers that shard 0 announces, on a shard other than shard 0."""

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest released or withdrawn step, for groups with waiting pushes."""
        return {}

    def state_dict(self, soft: bool) -> State:
        """Return the state that is valid after a restart of the shard; with `soft`, all state."""
        raise NotImplementedError

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the agreement's state that `state_dict` has returned."""
        raise NotImplementedError


class JoinersOfShardZero(ShardAgreement):
    """Shard 0 with `Agreement.JOINERS`: workers become live between two rounds of their group."""

    def __init__(self, rounds: RoundRecords) -> None:
        """Create the agreement object of a shard that has no workers yet."""
        super().__init__(rounds)
        self._over: dict[int, int] = {}  # live worker -> newest released or withdrawn step
        self._entered: list[Joiners] = []  # live workers without a finished round

    def joiners(self) -> Sequence[Joiners]:
        """Return the joined workers that have finished no round of their worker group yet."""
        waiting = tuple(worker for worker in self._rounds.joining() if self._has_fellows(worker))
        return [*self._entered, *([Joiners(waiting)] if waiting else [])]

    def _has_fellows(self, worker: int) -> bool:
        """Return True if a worker's group has two or more members."""
        return len(self._rounds.groups[self._rounds.group_of(worker)]) > 1

    def admit(self, number: int, at_boundary: bool) -> None:
        """Make the joining workers of a worker group live if the group is between two rounds."""
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
        """Return True if a group has no live member, or a live worker is held after a round."""
        return not self.members(number) or self._rounds.has_held()

    def _joining_of(self, number: int) -> list[int]:
        rounds = self._rounds
        return [worker for worker in rounds.joining() if rounds.group_of(worker) == number]

    def _enter(self, worker: int) -> None:
        """Make a joining worker live, and set its clock (number of finished iterations).

        A returning worker must not delay other workers by a staleness bound, so its clock is at
        least the lowest clock of live workers. Members of a worker group step together, so a
        joining worker gets the clock of a live member of its group.
        """
        rounds = self._rounds
        peer = next(iter(self.members(rounds.group_of(worker))), None)
        own_clock = max(rounds.clock(worker), rounds.min_clock())
        rounds.enter(worker, own_clock if peer is None else rounds.clock(peer))

    def took(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record the steps of released pushes, whose workers have thus finished a round."""
        if self._entered:
            self._entered = _without_workers(self._entered, {token.worker for token in tokens})
        for token in tokens:
            self._over[token.worker] = max(token.step, self._over.get(token.worker, 0))

    def withdrew(self, worker: int, step: int) -> None:
        """Record the step of a live worker's newest withdrawn push."""
        if self._rounds.is_live(worker):
            self._over[worker] = max(step, self._over.get(worker, 0))

    def left(self, worker: int) -> None:
        """Forget the steps of a worker that has left the run."""
        self._over.pop(worker, None)
        self._entered = _without_workers(self._entered, {worker})

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest released or withdrawn step, for groups with waiting pushes."""
        rounds = self._rounds
        return {
            worker: max(self._over.get(worker, 0), rounds.newest_withdrawn(worker))
            for worker in rounds.live()
            if rounds.has_waiting(rounds.group_of(worker))
        }

    def late_by(self, over: Mapping[int, int]) -> Sequence[Sequence[ArrivalToken]]:
        """Return waiting pushes up to the steps in `over`, as one update for each worker group."""
        late: dict[int, list[ArrivalToken]] = {}
        for worker, step in sorted(over.items()):
            for token in self._rounds.oldest([worker]):
                if token.step <= step:
                    late.setdefault(self._rounds.group_of(worker), []).append(token)
                    self._rounds.mark_changed(worker)
        return list(late.values())

    def state_dict(self, soft: bool) -> State:
        """Return {}; with `soft`, the workers' released steps and the newly joined workers."""
        return {"over": dict(self._over), "entered": _as_plain(self._entered)} if soft else {}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the agreement's state that `state_dict` has returned."""
        if soft:
            self._over, self._entered = dict(state["over"]), _of_plain(Joiners, state["entered"])


class JoinersOfFollower(JoinersOfShardZero):
    """A shard with `Agreement.JOINERS` that adds workers to the same round as shard 0.

    The rounds of two shards may differ by one push: one shard releases the push of worker A alone,
    and another shard merges this push with a push of worker B, which has joined in the meantime. If
    workers became live only at the end of a round, the rounds of two shards could differ by two
    pushes, and each shard would wait for a worker that waits at the other shard. A worker therefore
    joins the same round on all shards, even in the middle of the round.
    """

    def __init__(self, rounds: RoundRecords) -> None:
        """Create the agreement object of a shard that has no workers yet."""
        super().__init__(rounds)
        self._expected: Sequence[Joiners] = ()  # joined workers without finished round at shard 0

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Store the joining workers that shard 0 announces, on a shard other than shard 0."""
        self._expected = tuple(joiners)

    def admit_early(self, numbers: Sequence[int]) -> None:
        """Make joining workers live before rounds are released, which may need their pushes."""
        for number in numbers:
            self.admit(number, at_boundary=False)

    def admit(self, number: int, at_boundary: bool) -> None:
        """Make joining workers live that are live at shard 0, even in the middle of a round."""
        for worker in self._joining_of(number):
            if self._may_enter(worker):
                self._enter(worker)

    def _may_enter(self, worker: int) -> bool:
        """Return True if a joining worker may become live on this shard.

        This shard must first have released or withdrawn all pushes that shard 0 had released or
        withdrawn before the joining worker became live at shard 0. A joining worker that is not in
        `_expected` has already finished a round at shard 0, or is alone in its group, and may
        become live.
        """
        joiners = next((item for item in self._expected if worker in item.workers), None)
        if joiners is None:
            return True
        before = zip(joiners.members, joiners.after, strict=True)
        return joiners.has_entered and all(self._is_over(member, step) for member, step in before)

    def _is_over(self, worker: int, step: int) -> bool:
        """Return True if this shard will release no further push of a worker up to step `step`.

        The shard waits for no push of a worker without a released push since the shard's start,
        because the shard refuses pushes from before its start.
        """
        if not self._rounds.is_live(worker):
            return True
        waiting = self._rounds.oldest([worker])
        return waiting[0].step > step if waiting else self._over.get(worker, step) >= step

    def state_dict(self, soft: bool) -> State:
        """Return {}; with `soft`, the workers' released steps and newly joined workers."""
        state = super().state_dict(soft)
        return state | {"expected": _as_plain(self._expected)} if soft else state

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the agreement's state that `state_dict` has returned."""
        super().load_state_dict(state, soft)
        if soft:
            self._expected = _of_plain(Joiners, state["expected"])


class Announced(ShardAgreement):
    """Base class of agreements in which shard 0 announces the workers and steps of each round.

    A joining worker becomes live at the next `Rounds.advance`, even in the middle of a round.
    """

    def __init__(self, rounds: RoundRecords, newest: int) -> None:
        """Create the agreement object of a shard that has no workers and no announcements yet.

        Args:
            rounds: Records of the shard's workers and pushes.
            newest: Number below the numbers of all rounds that shard 0 announces in the future.
        """
        super().__init__(rounds)
        self.newest = newest
        self._steps: dict[int, int] = {}  # worker -> step of its newest released push
        self._num_rounds = 0  # number of rounds released so far
        self._announced: list[Draw] = []  # rounds that shard 0 announced, the newest last

    def draws(self) -> Sequence[Draw]:
        """Return the latest rounds that shard 0 has announced, the newest round last."""
        return self._announced

    def admit_early(self, numbers: Sequence[int]) -> None:
        """Make the joining workers of all worker groups live before rounds are released."""
        rounds = self._rounds
        for worker in rounds.joining():
            rounds.enter(worker, rounds.clock(worker))

    def took(self, tokens: Sequence[ArrivalToken]) -> None:
        """Record the steps of released pushes, by worker."""
        for token in tokens:
            self._steps[token.worker] = token.step

    def _past(self, workers: Sequence[int]) -> tuple[int, ...]:
        """Return each worker's newest released or withdrawn step, in the order of `workers`."""
        withdrawn = self._rounds.newest_withdrawn
        return tuple(max(self._steps.get(worker, 0), withdrawn(worker)) for worker in workers)

    def _announce(self, announced: Draw) -> None:
        # A worker group may release more than one round between two announcements of shard 0.
        wanted = min(2 * len(self._rounds.groups), _MOST_ANNOUNCED)
        number = max(_ANNOUNCED_TOGETHER, wanted)
        self._announced = [*self._announced[1 - number :], announced]

    def _finished(self, tokens: Sequence[ArrivalToken]) -> Draw:
        """Return the announcement, with number `newest`, of a round that is released now.

        `_finished` must be called before the round's pushes are removed, so that `Draw.after` does
        not contain the steps that the round releases. If `Draw.after` contained the steps of a
        round, other shards would release the round's pushes as late pushes, in a separate update.
        """
        workers = tuple(token.worker for token in tokens)
        steps = tuple(token.step for token in tokens)
        return Draw(self.newest, self._num_rounds, workers, steps, self._past(workers))

    def state_dict(self, soft: bool) -> State:
        """Return the workers' released steps and the number of rounds; with `soft`, all state."""
        state: State = {"rounds": self._num_rounds}
        if not soft:
            steps = {str(worker): step for worker, step in self._steps.items()}
            return state | {"steps": steps, "followed": 0}
        return state | {
            "steps": dict(self._steps),
            "newest": self.newest,
            "announced": _as_plain(self._announced),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the agreement's state that `state_dict` has returned."""
        self._steps = {int(worker): step for worker, step in state["steps"].items()}
        self._num_rounds = state["rounds"]
        if soft:
            self.newest = state["newest"]
            self._announced = _of_plain(Draw, state["announced"])


class ReleasesOfShardZero(Announced):
    """Shard 0 with `Agreement.RELEASES`: the rule releases rounds, and shard 0 announces them.

    A worker that withdraws its push here, for example after a restart of shard 0, may have the same
    push waiting on another shard. Shard 0 announces the withdrawn push as a round of its own, so
    that the other shards release the push instead of waiting forever.
    """

    def __init__(self, rounds: RoundRecords, newest: int) -> None:
        """Create the agreement object of a shard that has no workers and no announcements yet."""
        super().__init__(rounds, newest)
        self._withdrawn: list[ArrivalToken] = []  # withdrawn pushes that are not announced yet

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """Announce a round that is released, with the steps of the released pushes."""
        self.newest += 1
        self._announce(self._finished(sorted(tokens)))
        self._num_rounds += 1

    def withdrew(self, worker: int, step: int) -> None:
        """Record a withdrawn push, which the next `begin_next` announces."""
        if step > self._steps.get(worker, 0):
            self._withdrawn.append(ArrivalToken(worker, step))

    def begin_next(self) -> bool:
        """Announce the withdrawn pushes; return False, because no round begins."""
        for token in self._withdrawn:
            self.newest += 1
            before = self._steps.get(token.worker, 0)
            workers, steps = (token.worker,), (token.step,)
            self._announce(Draw(self.newest, self._num_rounds, workers, steps, (before,)))
        self._withdrawn = []
        return False

    def _announce(self, announced: Draw) -> None:
        """Add an announcement, and keep those with the newest step of a worker.

        A worker waits on each shard for the release of its newest step, even if the worker has left
        and returned, so a shard that was away must still learn of that release.
        """
        everything = [*self._announced, announced]
        newest = _newest_steps(everything)
        self._announced = [
            item
            for item in everything
            if item is announced or any(newest[w] == step for w, step in _steps_of(item))
        ]

    def state_dict(self, soft: bool) -> State:
        """Return the workers' released steps and the number of rounds; with `soft`, all state."""
        state = super().state_dict(soft)
        pending = [[token.worker, token.step] for token in self._withdrawn]
        return state | {"withdrawn": pending} if soft else state

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the agreement's state that `state_dict` has returned."""
        super().load_state_dict(state, soft)
        if soft:
            self._withdrawn = [ArrivalToken(*pair) for pair in state.get("withdrawn", ())]


def _steps_of(item: Draw) -> Iterator[tuple[int, int]]:
    return zip(item.workers, item.steps, strict=True)


def _newest_steps(items: Iterable[Draw]) -> dict[int, int]:
    """Return worker -> newest step that announcements of released rounds, oldest first, name."""
    return {worker: step for item in items for worker, step in _steps_of(item)}


class NamedRounds(Announced):
    """Base class of agreements: a shard knows a round's workers before it releases the round."""

    def __init__(self, rounds: RoundRecords, newest: int) -> None:
        """Create the agreement object of a shard that has no workers and no announcements yet.

        Args:
            rounds: Records of the shard's workers and pushes.
            newest: Number below the numbers of all rounds that shard 0 announces in the future.
        """
        super().__init__(rounds, newest)
        self._drawn: Draw | None = None  # current round; None between two rounds
        self._open: set[int] = set()  # workers of the current round that neither left nor withdrew

    def members(self, number: int) -> Sequence[int]:
        """Return the ids of the workers whose pushes the current round waits for, ascending."""
        return sorted(self._open)

    def is_complete(self, number: int) -> bool:
        """Return True if all workers of the current round have pushed."""
        return bool(self._open) and all(map(self._rounds.has_submitted, self._open))

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the ids of the current round's workers; [] if `worker` is not in the round."""
        return sorted(self._open) if worker in self._open else []

    def late(self) -> Sequence[Sequence[ArrivalToken]]:
        """Return waiting pushes of the current round's workers that are older than the round.

        Shard 0 has already released or withdrawn pushes that are older than the current round. This
        shard merges such older pushes into one separate update.
        """
        if self._drawn is None:
            return ()
        after = dict(zip(self._drawn.workers, self._drawn.after, strict=False))
        waiting = self._rounds.oldest(sorted(self._open))
        late = [token for token in waiting if token.step <= after.get(token.worker, 0)]
        return [late] if late else ()

    def begin_next(self) -> bool:
        """Begin the next known round if no worker of the current round is waited for any more."""
        if self._open:
            return False
        self._drawn = self._next()
        if self._drawn is None:
            return False
        self._begin(self._drawn)
        self._rounds.reply_in_order_of_id()
        return True

    def _next(self) -> Draw | None:
        """Return the next round with its workers; None if the next round is not known yet."""
        raise NotImplementedError

    def _begin(self, drawn: Draw) -> None:
        """Begin a round: store the workers whose pushes the round waits for."""
        self._open = {worker for worker in drawn.workers if self._rounds.is_live(worker)}

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """End the current round, whose pushes are released now."""
        self._open = set()
        self._num_rounds += 1

    def left(self, worker: int) -> None:
        """Remove a worker that has left the run from announced rounds that are not released yet."""
        self._open.discard(worker)
        self._announced = [_without(item, worker) for item in self._announced]

    def state_dict(self, soft: bool) -> State:
        """Return the workers' released steps and the number of rounds; with `soft`, all state."""
        state = super().state_dict(soft)
        if not soft:
            return state
        drawn = _as_plain([self._drawn] if self._drawn else [])
        return state | {"drawn": drawn, "open": sorted(self._open)}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the agreement's state that `state_dict` has returned."""
        super().load_state_dict(state, soft)
        if soft:
            self._drawn = next(iter(_of_plain(Draw, state["drawn"])), None)
            self._open = set(state["open"])


class DrawsOfShardZero(NamedRounds):
    """Shard 0 with `Agreement.DRAWS`: it draws the next round's workers when a round is released.

    A shard holds (sends no reply to) a worker that is not drawn for the current round. When a held
    worker is drawn, the shard replies to the worker's request with the current weights. After a
    restart, a push may come from a worker that is not drawn, and then waits until the worker is
    drawn.
    """

    def may_proceed(self, worker: int) -> bool:
        """Return True if a worker is drawn for the current round."""
        return worker in self._open

    def _next(self) -> Draw | None:
        """Draw and announce the workers of the next round; return None if no worker is live."""
        rounds = self._rounds
        if not rounds.live():
            return None
        workers = rounds.rule.draw(self._num_rounds, rounds.live())
        self.newest += 1
        drawn = Draw(self.newest, self._num_rounds, workers, after=self._past(workers))
        self._announce(drawn)
        return drawn

    def releases(self, tokens: Sequence[ArrivalToken]) -> None:
        """End the current round, and add the released steps to the round's announcement."""
        self._announced[-1:] = [self._finished(tokens)]
        super().releases(tokens)

    def withdrew(self, worker: int, step: int) -> None:
        """Continue the current round without a worker that has withdrawn its push; hold the worker.

        Other shards may have accepted the worker's push, so shard 0 does not wait for another push.
        """
        if worker in self._open:
            self._open.discard(worker)
            self._rounds.hold([worker])


class AnnouncedByShardZero(NamedRounds):
    """A shard that forms the rounds that shard 0 announces, with `Agreement.RELEASES`.

    The announcement of a round may arrive before or after the pushes of the round's workers. In a
    round that shard 0 has released, this shard waits only for the pushes that shard 0 has released.
    This shard does not wait for pushes that it has already released, or for workers that have
    withdrawn their push. A push for a round that this shard has missed is merged into a separate
    update in the next round of the push's worker.
    """

    def __init__(self, rounds: RoundRecords) -> None:
        """Create the agreement object of a shard that has no workers and no announcements yet."""
        super().__init__(rounds, newest=0)
        self._gave_up: set[int] = set()  # workers that withdrew their newest push
        self._awaited: list[Draw] = []  # announced rounds that have not begun on this shard

    def late(self) -> Sequence[Sequence[ArrivalToken]]:
        """Return waiting pushes that shard 0 has released or withdrawn in earlier rounds.

        A worker may have been away from this shard when the round of its push was announced.
        """
        late = [token for tokens in super().late() for token in tokens]
        rounds, not_begun = self._rounds, {item.number for item in self._awaited}
        others = sorted(rounds.with_pushes() - self._open)
        if not others:
            return [late] if late else ()
        past = [item for item in self._announced if item.steps and item.number not in not_begun]
        over = _newest_steps(past)
        late += [each for each in rounds.oldest(others) if each.step <= over.get(each.worker, 0)]
        return [sorted(late)] if late else ()

    def ready(self) -> Ready | None:
        """Return the oldest waiting pushes of the current round's workers if all have pushed."""
        complete = self.is_complete(0)
        return Ready([self._rounds.oldest(self.members(0))] if complete else ())

    def follow(self, draws: Sequence[Draw]) -> None:
        """Add announced rounds to the known rounds; drop rounds voided by a restart of shard 0."""
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
        """Return True if shard 0 has restarted from a state in which a round was not announced yet.

        This shard may be many rounds behind shard 0. An old round of the current generation of
        shard 0 is thus not void, although shard 0 announces only its newest rounds.

        Args:
            known: A round that shard 0 has announced earlier.
            draws: Rounds that shard 0 announces now.
        """
        is_announced = any(item.number == known.number for item in draws)
        newest = draws[-1].number
        same = known.number // _NUMBERS_PER_GENERATION == newest // _NUMBERS_PER_GENERATION
        return not is_announced and (not same or known.number > newest)

    def _to_wait_for(self, drawn: Draw) -> set[int]:
        """Return the live workers of a round whose pushes this shard must receive or release."""
        waited = {worker for worker in drawn.workers if self._rounds.is_live(worker)}
        if self._is_open_at_shard_zero(drawn):
            return waited
        released = dict(zip(drawn.workers, drawn.steps, strict=False))
        waited -= self._gave_up
        return {worker for worker in waited if self._steps.get(worker, 0) < released.get(worker, 0)}

    def _is_open_at_shard_zero(self, drawn: Draw) -> bool:
        """Return True if shard 0 has drawn a round's workers but has not released the round."""
        return drawn.number == self.newest and not drawn.steps

    def _next(self) -> Draw | None:
        """Return the next announced round; None if shard 0 has announced no further round."""
        return self._awaited.pop(0) if self._awaited else None

    def _begin(self, drawn: Draw) -> None:
        if self._is_open_at_shard_zero(drawn):
            # A worker may push for a new draw, so forget the pushes that the worker has withdrawn
            # before the draw. A push withdrawn after the draw stays withdrawn.
            withdrawn = self._rounds.newest_withdrawn
            after = zip(drawn.workers, drawn.after, strict=True)
            self._gave_up -= {worker for worker, step in after if withdrawn(worker) <= step}
        self._open = self._to_wait_for(drawn)

    def submitted(self, worker: int) -> None:
        """Record that a worker has sent a push, after which the worker may be waited for again."""
        self._gave_up.discard(worker)

    def withdrew(self, worker: int, step: int) -> None:
        """Stop waiting for a worker that withdrew its push, unless the round is open at shard 0."""
        self._gave_up.add(worker)
        is_open = self._drawn is not None and self._is_open_at_shard_zero(self._drawn)
        if worker in self._open and not is_open:
            self._open.discard(worker)
            self._rounds.hold([worker])

    def left(self, worker: int) -> None:
        """Remove a worker that has left the run from all rounds that are not released yet."""
        super().left(worker)
        self._gave_up.discard(worker)
        self._awaited = [_without(item, worker) for item in self._awaited]

    def state_dict(self, soft: bool) -> State:
        """Return the released steps and the newest finished round; with `soft`, all state."""
        state = super().state_dict(soft)
        if not soft:
            finished = self.newest if self._drawn is None else self._drawn.number - 1
            return state | {"followed": finished}
        awaited = _as_plain(self._awaited)
        return state | {"gave_up": sorted(self._gave_up), "awaited": awaited}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the agreement's state that `state_dict` has returned."""
        super().load_state_dict(state, soft)
        if not soft:
            self.newest = max(self.newest, state["followed"])
            return
        self._gave_up = set(state["gave_up"])
        self._awaited = _of_plain(Draw, state["awaited"])


class DrawsOfFollower(AnnouncedByShardZero):
    """A shard other than shard 0 with `Agreement.DRAWS`: it uses the workers that shard 0 draws."""

    def may_proceed(self, worker: int) -> bool:
        """Return True if a worker is drawn for the current round."""
        return worker in self._open


def agreement_of(rounds: RoundRecords, generation: int) -> ShardAgreement:
    """Return a new agreement object of a shard, by the agreement kind of its synchronization rule.

    Args:
        rounds: Records of the shard's workers and pushes.
        generation: Generation of the shard, a number that grows with each restart of the shard.
    """
    agreement, numbers = rounds.rule.agreement, generation * _NUMBERS_PER_GENERATION
    if agreement is Agreement.JOINERS:
        return JoinersOfFollower(rounds) if rounds.follows else JoinersOfShardZero(rounds)
    if agreement is Agreement.DRAWS:
        return DrawsOfFollower(rounds) if rounds.follows else DrawsOfShardZero(rounds, numbers)
    return AnnouncedByShardZero(rounds) if rounds.follows else ReleasesOfShardZero(rounds, numbers)


def _without_workers(joiners: Sequence[Joiners], gone: Collection[int]) -> list[Joiners]:
    """Return the sets of joining workers without the workers in `gone` and without empty sets."""
    remaining = []
    for group in joiners:
        workers = tuple(worker for worker in group.workers if worker not in gone)
        if workers:
            remaining.append(dataclasses.replace(group, workers=workers))
    return remaining


def _without(drawn: Draw, worker: int) -> Draw:
    if drawn.steps or worker not in drawn.workers:  # a released round keeps its workers
        return drawn
    pairs = [pair for pair in zip(drawn.workers, drawn.after, strict=True) if pair[0] != worker]
    workers, after = tuple(member for member, _ in pairs), tuple(step for _, step in pairs)
    return dataclasses.replace(drawn, workers=workers, after=after)


def _as_plain(items: Sequence[Draw | Joiners]) -> list[list[Any]]:
    """Return the fields of each item as a list, with lists in place of tuples."""
    fields = [vars(item).values() for item in items]
    return [[list(v) if isinstance(v, tuple) else v for v in values] for values in fields]


def _of_plain(kind: type[_Item], rows: Sequence[Sequence[Any]]) -> list[_Item]:
    """Return the items of class `kind` whose fields `_as_plain` has returned."""
    make: Callable[..., _Item] = kind
    return [make(*(tuple(v) if isinstance(v, list) else v for v in row)) for row in rows]
