"""Partial participation: each round is that of a few workers, drawn from those that are live.

Source: McMahan et al., AISTATS 2017, algorithm 1: a random set of max(C K, 1) clients a round.
Differences: the clients are drawn of the live ones, by a rank that each has in each round, so that
one that leaves changes no other draw than those it was in.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners
from thinwire.ops.sync.groups import AutoGroups, Groups, name_of
from thinwire.ops.types import OWN, ConfigurationError, State

#: Draws that shard 0 announces together, the newest last.
_KEPT = 4
#: Numbers of draws reserved for a generation of shard 0: what it announced after its last snapshot
#: is void when it comes back.
_DRAWS_PER_GENERATION = 1 << 32


def draw(seed: int, number: int, live: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Draw the workers of a round: a pure function of its arguments.

    Args:
        seed: Of the run.
        number: Of the round, from 0.
        live: Ids to draw from; at least one.
        fraction: Of them, rounded to the nearest number; one worker at least.

    Returns:
        Ids, ascending.

    >>> draw(1, 0, [1, 2, 3, 4], 0.5) == draw(1, 0, [4, 3, 2, 1], 0.5)
    True
    """
    ranked = sorted(live, key=lambda worker: (_rank(seed, number, worker), worker))
    return tuple(sorted(ranked[: _size(fraction, len(live))]))


def _size(fraction: float, num_live: int) -> int:
    return max(1, math.floor(fraction * num_live + 0.5))


def _rank(seed: int, number: int, worker: int) -> bytes:
    return hashlib.blake2b(f"{seed} {number} {worker}".encode(), digest_size=8).digest()


def parse_draws(text: str, path: str, nb_workers: int) -> tuple[tuple[int, ...], ...]:
    """Read the workers of each round, one round a line; lines that begin with ``#`` are comments.

    Raises:
        ConfigurationError: A line holds no ids, or what is none of 1..nb_workers.
    """
    rounds = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            continue
        try:
            workers = {int(word) for word in line.replace(",", " ").split()}
        except ValueError:
            workers = set()
        if not workers or not all(1 <= worker <= nb_workers for worker in workers):
            raise ConfigurationError(
                f"--draws={path} line {number} reads {line[:60]!r}; expected worker ids of "
                f"1..{nb_workers} (--nb_workers), such as `3 17 42`. Mend that line."
            )
        rounds.append(tuple(sorted(workers)))
    if not rounds:
        raise ConfigurationError(f"--draws={path}: holds no round; one line of worker ids a round.")
    return tuple(rounds)


def format_draw(workers: Sequence[int]) -> str:
    """Write a round's workers as `parse_draws` reads them."""
    return " ".join(map(str, workers)) + "\n"


@dataclasses.dataclass(frozen=True)
class DrawnSync:
    """One synchronous group, of whose live workers a few are drawn for each round.

    Attributes:
        nb_workers: Ids are 1..nb_workers.
        fraction: Of the live workers that takes part in a round.
        seed: Of the draws, which are shard 0's alone.
        draws: Workers of the first rounds, one tuple a round; None: all rounds are drawn. Only the
            process that starts the rule needs the workers: elsewhere it may be empty.
        follows: Whether shard 0 announces the draws.
    """

    bound: ClassVar[int | None] = None
    auto: ClassVar[AutoGroups | None] = None
    takes_all: ClassVar[bool] = False
    nb_workers: int
    fraction: float
    seed: int = dataclasses.field(default=0, metadata=OWN)
    draws: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, metadata=OWN)
    follows: bool = dataclasses.field(default=False, metadata=OWN)

    def __post_init__(self) -> None:
        """Refuse a fraction that is none."""
        if not 0 < self.fraction <= 1:
            raise ConfigurationError(
                f"--fraction={self.fraction:g}: expected a part of the live workers, above 0 and "
                "at most 1."
            )
        if self.nb_workers < 1 or self.seed < 0:
            raise ConfigurationError(
                f"--nb_workers={self.nb_workers}, --seed={self.seed}: expected 1 or more workers, "
                "and a seed of 0 or more."
            )

    @property
    def groups(self) -> Groups:
        """All workers."""
        return (tuple(range(1, self.nb_workers + 1)),)

    @property
    def waits_for_start(self) -> bool:
        """Whether the run begins only when all workers are there."""
        return self.nb_workers > 1

    @property
    def sizes(self) -> Sequence[int]:
        """How many workers a round is of, if all are live."""
        return [_size(self.fraction, self.nb_workers)]

    def start(self, generation: int = 0) -> DrawnRounds:
        """Return the rule with an empty memory: nobody is there.

        Args:
            generation: Of the shard; its lives are numbered.
        """
        given = self.draws if self.draws and not self.follows else ()
        return DrawnRounds(self, given, generation)

    def without_bound(self) -> DrawnSync:
        """Return the rule of a shard that follows shard 0, which alone draws."""
        return dataclasses.replace(self, follows=True)


class DrawnRounds:
    """The rule in force (a `SyncRule`): rounds of the workers that were drawn.

    A worker that is not drawn is held: its request is answered when it is drawn, with the model of
    then. A push of one that is not drawn (of before a restart) waits until it is.

    Shard 0 draws as soon as the round before is released. The other shards take its draws, which
    may be ahead of what has arrived there, or behind it: of a draw that is not the newest, they
    wait for the pushes that shard 0 has released, but for those that they have released before, and
    for those of workers that gave them up. A push of a draw that they have missed is an update of
    its own, when its worker is drawn next.

    Attributes:
        groups: One, of all workers.
    """

    def __init__(
        self, policy: DrawnSync, given: Sequence[tuple[int, ...]], generation: int
    ) -> None:
        """Begin with nobody.

        Args:
            policy: The settings.
            given: The workers of the first rounds, which are not drawn then.
            generation: Of the shard.
        """
        self.groups, self._policy, self._given = policy.groups, policy, given
        self._live: list[int] = []  # ascending
        self._joining: list[int] = []  # ascending
        # Live worker -> its arrivals that are not released, oldest first; never an empty list.
        self._submitted: dict[int, list[ArrivalToken]] = {}
        self._clocks: dict[int, int] = {}  # finished iterations; kept when a worker leaves
        self._steps: dict[int, int] = {}  # worker -> the newest step that was released
        self._num_rounds = 0  # released
        self._drawn: Draw | None = None  # of the round that goes on
        self._open: set[int] = set()  # its workers, but for those that the round goes on without
        self._gave_up: set[int] = set()  # workers that took their push back, and sent no other
        self._void: dict[int, int] = {}  # worker -> the newest step that it has given up
        # Number of the newest draw that was made or announced.
        self._newest = 0 if policy.follows else generation * _DRAWS_PER_GENERATION
        self._announced: list[Draw] = []  # by shard 0, the newest last
        self._awaited: list[Draw] = []  # on the other shards: announced and not begun

    # -- groups -----------------------------------------------------------------------------

    @property
    def waits_for_start(self) -> bool:
        """Whether the run begins only when all workers are there."""
        return self._policy.waits_for_start

    def group_of(self, worker: int) -> int:
        """Return 0: there is one group."""
        del worker
        return 0

    def name_of(self, worker: int) -> str:
        """Return the group as figures name it."""
        del worker
        return name_of(self.groups[0])

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the workers of the round that goes on, ascending, if this is one of them."""
        return sorted(self._open) if worker in self._open else []

    def pause(self) -> None:
        """Raise: there is one group, which does not change."""
        raise NotImplementedError("the one group of which workers are drawn does not change")

    def is_quiescent(self) -> bool:
        """Return whether nobody is computing."""
        return all(worker in self._submitted for worker in self._open)

    def regroup(self, groups: Groups) -> None:
        """Raise: there is one group, which does not change."""
        del groups
        self.pause()

    # -- draws ------------------------------------------------------------------------------

    def draws(self) -> Sequence[Draw]:
        """Return the newest draws, the newest last, each as it was released or goes on."""
        return self._announced

    def follow(self, draws: Sequence[Draw]) -> None:
        """Take over what shard 0 announces; a draw that it does not name any more is void."""
        if not draws or not self._policy.follows:
            return
        awaited = {each.number for each in self._awaited}
        self._awaited = [
            each for each in draws if each.number in awaited or each.number > self._newest
        ]
        self._announced, self._newest = list(draws), max(self._newest, draws[-1].number)
        if self._drawn is not None:
            number = self._drawn.number
            known = next((each for each in draws if each.number == number), None)
            self._open &= self._to_wait_for(known) if known else set()

    def _to_wait_for(self, drawn: Draw) -> set[int]:
        """Return the live workers whose pushes for a draw have come, or may still come."""
        waited = {each for each in drawn.workers if _contains(self._live, each)}
        if drawn.number == self._newest:
            return waited
        released = dict(zip(drawn.workers, drawn.steps, strict=False))
        waited -= self._gave_up
        return {each for each in waited if self._steps.get(each, 0) < released.get(each, 0)}

    def _next_draw(self) -> Draw | None:
        """Return the draw of the next round; None: nobody is there, or shard 0 has not drawn."""
        if self._policy.follows:
            return self._awaited.pop(0) if self._awaited else None
        if not self._live:
            return None
        number = self._num_rounds
        given = self._given[number] if number < len(self._given) else ()
        workers = tuple(each for each in given if _contains(self._live, each))
        if not workers:
            workers = draw(self._policy.seed, number, self._live, self._policy.fraction)
        self._newest += 1
        made = Draw(self._newest, number, workers, after=self._past(workers))
        self._announced = [*self._announced[1 - _KEPT :], made]
        return made

    # -- workers ----------------------------------------------------------------------------

    def joiners(self) -> Sequence[Joiners]:
        """Return (): draws name the workers of each round."""
        return ()

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Do nothing: draws name the workers of each round."""

    def join(self, worker: int) -> None:
        """Announce a worker; it is live from the next turn on, and waits to be drawn."""
        if not _contains(self._live, worker) and not _contains(self._joining, worker):
            bisect.insort(self._joining, worker)

    def leave(self, worker: int) -> None:
        """Forget a worker and its arrivals; its round goes on without it."""
        self._submitted.pop(worker, None)
        self._open.discard(worker)
        self._gave_up.discard(worker)
        self._announced = [_without(each, worker) for each in self._announced]
        self._awaited = [_without(each, worker) for each in self._awaited]
        for workers in (self._live, self._joining):
            if worker in workers:
                workers.remove(worker)

    def live(self) -> Sequence[int]:
        """Return the live workers, ascending."""
        return self._live

    def joining(self) -> Sequence[int]:
        """Return the workers that enter with the next turn, ascending."""
        return self._joining

    def waiting(self) -> set[int]:
        """Return live workers that wait: for their round, or to be drawn."""
        return {worker for worker in self._live if not self.may_proceed(worker)}

    def clocks(self) -> dict[int, int]:
        """Return worker -> finished iterations, those of workers that have left included."""
        return self._clocks

    def is_live(self, worker: int) -> bool:
        """Return whether the worker may be drawn."""
        return _contains(self._live, worker)

    def may_proceed(self, worker: int) -> bool:
        """Return whether a worker is drawn, and has not submitted its push."""
        return worker in self._open and worker not in self._submitted

    # -- arrivals ---------------------------------------------------------------------------

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add an arrival of a live worker; the same one counts once."""
        del now
        self._gave_up.discard(arrival.worker)
        arrivals = self._submitted.setdefault(arrival.worker, [])
        if arrival not in arrivals:
            bisect.insort(arrivals, arrival)

    def has_submitted(self, worker: int) -> bool:
        """Return whether an arrival of the worker waits to be released."""
        return worker in self._submitted

    def withdraw(self, worker: int, step: int) -> None:
        """Take back all arrivals of a worker.

        On shard 0 its round goes on without it: the other shards may have taken what it gave up.
        There the newest round waits for another push of the worker, if shard 0's does.
        """
        self._submitted.pop(worker, None)
        self._gave_up.add(worker)
        self._void[worker] = max(step, self._void.get(worker, 0))
        if not self._policy.follows or (self._drawn and self._drawn.number < self._newest):
            self._open.discard(worker)

    def advance(self, now: float) -> Advance:
        """Settle everything that can be settled now.

        A round all of whose workers have left is drawn again, of those that are live.
        """
        del now
        for worker in self._joining:
            bisect.insort(self._live, worker)
            self._clocks.setdefault(worker, 0)
        self._joining = []
        released: list[tuple[ArrivalToken, ...]] = []
        proceeding: list[int] = []
        before = self._newest
        while True:
            if late := self._late():
                released.append(self._release(late))
                proceeding = sorted({*proceeding, *late})
            if not self.is_quiescent():
                break
            if self._open:
                released.append(self._finish_round())
            self._drawn = self._next_draw()
            if self._drawn is None:
                break
            self._begin(self._drawn)
            proceeding = sorted(each for each in self._open if each not in self._submitted)
        return Advance(released, proceeding, has_drawn=self._newest != before)

    def over(self) -> Mapping[int, int]:
        """Return {}: draws name the steps of each round."""
        return {}

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Release nothing: draws name the steps of each round."""
        del over
        return ()

    def next_deadline(self) -> float | None:
        """Return None: nothing happens because time has passed."""
        return None

    def _begin(self, drawn: Draw) -> None:
        if drawn.number == self._newest:  # what was given up of this very draw stays so
            after = zip(drawn.workers, drawn.after, strict=True)
            self._gave_up -= {each for each, step in after if self._void.get(each, 0) <= step}
        self._open = self._to_wait_for(drawn)

    def _late(self) -> list[int]:
        """Return workers of the round whose oldest arrival shard 0 does not wait for any more."""
        if self._drawn is None:
            return []
        after = zip(self._drawn.workers, self._drawn.after, strict=False)
        return [
            worker
            for worker, step in after
            if worker in self._open
            and worker in self._submitted
            and self._submitted[worker][0].step <= step
        ]

    def _finish_round(self) -> tuple[ArrivalToken, ...]:
        """Release the oldest arrival of each worker of the round."""
        workers = tuple(sorted(self._open))
        after = self._past(workers)
        taken = self._release(workers)
        self._open = set()
        self._num_rounds += 1
        if not self._policy.follows:
            steps = tuple(each.step for each in taken)
            self._announced[-1:] = [Draw(self._newest, self._num_rounds - 1, workers, steps, after)]
        return taken

    def _past(self, workers: Sequence[int]) -> tuple[int, ...]:
        """Return the newest step of each that was released or given up."""
        return tuple(max(self._steps.get(each, 0), self._void.get(each, 0)) for each in workers)

    def _release(self, workers: Sequence[int]) -> tuple[ArrivalToken, ...]:
        """Release the oldest arrival of each of these workers, which are in ascending order."""
        taken = []
        for worker in workers:
            arrivals = self._submitted[worker]
            taken.append(arrivals.pop(0))
            if not arrivals:
                del self._submitted[worker]
            self._clocks[worker] += 1
            self._steps[worker] = taken[-1].step
        return tuple(taken)

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return clocks and rounds, which outlive a restart, or who is where; see SyncRule."""
        if not soft:
            finished = self._newest if self._drawn is None else self._drawn.number - 1
            return {
                "clocks": {str(worker): clock for worker, clock in self._clocks.items()},
                "steps": {str(worker): step for worker, step in self._steps.items()},
                "void": {str(worker): step for worker, step in self._void.items()},
                "rounds": self._num_rounds,
                "followed": finished if self._policy.follows else 0,
            }
        return {
            "live": list(self._live),
            "joining": list(self._joining),
            "submitted": {
                w: [each.step for each in tokens] for w, tokens in self._submitted.items()
            },
            "clocks": dict(self._clocks),
            "steps": dict(self._steps),
            "rounds": self._num_rounds,
            "drawn": _as_plain([self._drawn] if self._drawn else []),
            "open": sorted(self._open),
            "gave_up": sorted(self._gave_up),
            "void": dict(self._void),
            "newest": self._newest,
            "announced": _as_plain(self._announced),
            "awaited": _as_plain(self._awaited),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        self._clocks = {int(worker): clock for worker, clock in state["clocks"].items()}
        self._steps = {int(worker): step for worker, step in state["steps"].items()}
        void = state.get("void", {})  # checkpoints of before have none
        self._void = {int(worker): step for worker, step in void.items()}
        self._num_rounds = state["rounds"]
        if not soft:
            self._newest = max(self._newest, state["followed"])
            return
        self._newest = state["newest"]
        self._live, self._joining = list(state["live"]), list(state["joining"])
        self._submitted = {
            worker: [ArrivalToken(worker, step) for step in steps]
            for worker, steps in state["submitted"].items()
        }
        self._drawn = next(iter(_of_plain(state["drawn"])), None)
        self._open, self._gave_up = set(state["open"]), set(state["gave_up"])
        self._announced = _of_plain(state["announced"])
        self._awaited = _of_plain(state["awaited"])


def _as_plain(draws: Sequence[Draw]) -> list[list[Any]]:
    return [
        [each.number, each.of_round, list(each.workers), list(each.steps), list(each.after)]
        for each in draws
    ]


def _of_plain(draws: Sequence[Sequence[Any]]) -> list[Draw]:
    return [
        Draw(number, of_round, tuple(workers), tuple(steps), tuple(after))
        for number, of_round, workers, steps, after in draws
    ]


def _without(drawn: Draw, worker: int) -> Draw:
    if drawn.steps or worker not in drawn.workers:  # what was released stays so
        return drawn
    rest = [pair for pair in zip(drawn.workers, drawn.after, strict=True) if pair[0] != worker]
    workers, after = tuple(each for each, _ in rest), tuple(step for _, step in rest)
    return dataclasses.replace(drawn, workers=workers, after=after)


def _contains(ascending: Sequence[int], value: int) -> bool:
    """Return whether a sorted list holds a value."""
    place = bisect.bisect_left(ascending, value)
    return place < len(ascending) and ascending[place] == value
