"""Partial participation: only some workers, drawn at random, train in each round.

Source: McMahan et al., AISTATS 2017, algorithm 1: a random set of max(C K, 1) clients per round.
Differences: the workers of a round are the live workers with the lowest ranks. Each worker has a
pseudorandom rank in each round. A worker that leaves thus changes only the draws that contain it.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, WorkerSets, contains
from thinwire.ops.sync.groups import AutoGroups, Groups, name_of
from thinwire.ops.types import OWN, ConfigurationError, State

#: Number of latest draws of workers that shard 0 sends together to the other shard servers.
_KEPT = 4
#: Count of draw numbers reserved for one generation (one process) of shard 0. A restart voids the
#: draws of workers that shard 0 announced after its last snapshot. The next generation must not use
#: the numbers of void draws again.
_DRAWS_PER_GENERATION = 1 << 32


def draw(seed: int, number: int, live: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Draw the workers that participate in a training round.

    The drawn workers depend only on the arguments of `draw`.

    Args:
        seed: Random seed of the run.
        number: Number of the training round, from 0.
        live: Ids of the live workers to draw from, at least one.
        fraction: Fraction of the live workers to draw, rounded to the nearest number of workers; at
            least one worker is drawn.

    Returns:
        Ids of the drawn workers, ascending.

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
    """Read the worker ids of each round, one round per line; lines with ``#`` first are comments.

    Raises:
        ConfigurationError: The text has no rounds, or a line without worker ids or with a worker id
            that is not in 1..nb_workers.
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
                f"1..{nb_workers} (--nb_workers), like `3 17 42`. Correct this line."
            )
        rounds.append(tuple(sorted(workers)))
    if not rounds:
        raise ConfigurationError(
            f"--draws={path}: the file holds no round; expected one line of worker ids per round."
        )
    return tuple(rounds)


def format_draw(workers: Sequence[int]) -> str:
    """Format the worker ids of one round as a line that `parse_draws` reads."""
    return " ".join(map(str, workers)) + "\n"


@dataclasses.dataclass(frozen=True)
class DrawnSync:
    """Settings of a synchronous rule in which only some workers, drawn at random, train per round.

    Attributes:
        nb_workers: Number of workers in the run; their ids are 1..nb_workers.
        fraction: Fraction of the live workers that participates in a round.
        seed: Random seed of the draws of workers. Only shard 0 draws workers.
        draws: Worker ids of the first rounds, one tuple per round; None if the workers of all
            rounds are drawn. Only the process that starts the rule needs the ids: in other
            processes, `draws` may be empty.
        follows: True if this shard server uses the draws of workers that shard 0 made; False on
            shard 0.
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
        """Raise an error if the fraction, number of workers or seed is out of range."""
        if not 0 < self.fraction <= 1:
            raise ConfigurationError(
                f"--fraction={self.fraction:g}: expected a fraction of the live workers, above 0 "
                "and at most 1."
            )
        if self.nb_workers < 1 or self.seed < 0:
            raise ConfigurationError(
                f"--nb_workers={self.nb_workers}, --seed={self.seed}: expected 1 or more workers, "
                "and a seed of 0 or more."
            )

    @property
    def groups(self) -> Groups:
        """Groups of workers: one group with all workers."""
        return (tuple(range(1, self.nb_workers + 1)),)

    @property
    def waits_for_start(self) -> bool:
        """True if the training run starts only when all workers have joined."""
        return self.nb_workers > 1

    @property
    def sizes(self) -> Sequence[int]:
        """Number of workers in a round, if all workers are live."""
        return [_size(self.fraction, self.nb_workers)]

    def start(self, generation: int = 0) -> DrawnRounds:
        """Return the synchronization rule in its start state, without workers.

        Args:
            generation: Generation of the shard server, a number that grows with each restart of the
                server.
        """
        planned = self.draws if self.draws and not self.follows else ()
        return DrawnRounds(self, planned, generation)

    def without_bound(self) -> DrawnSync:
        """Return the settings for shards other than shard 0; only shard 0 draws workers."""
        return dataclasses.replace(self, follows=True)


class DrawnRounds(WorkerSets):
    """Running `SyncRule` in which only drawn workers participate in a round.

    A shard server does not reply to a worker that is not drawn for the round. The shard server
    replies to the worker's request when the worker is drawn, with the weights at that time. A push
    of a worker that is not drawn (from before a restart) waits until the worker is drawn.

    Shard 0 draws the workers of a round as soon as the previous round is merged into the weights.
    Shard servers other than shard 0 use the workers that shard 0 drew. On a shard server other than
    shard 0, a draw of workers may arrive before or after the pushes of the drawn workers. For a
    draw of workers that is not the newest, a shard server waits only for pushes that shard 0 has
    released (merged). A shard server does not wait for pushes that it has merged itself, or for
    workers that have withdrawn their push. A push for a round that a shard server has missed
    becomes a separate update when its worker is drawn next.

    Attributes:
        groups: One group of all workers.
    """

    def __init__(
        self, policy: DrawnSync, given: Sequence[tuple[int, ...]], generation: int
    ) -> None:
        """Start the synchronization rule without workers.

        Args:
            policy: Settings of the synchronization rule.
            given: Worker ids of the first rounds, one tuple per round. The workers of these rounds
                are not drawn at random.
            generation: Generation of the shard server, a number that grows with each restart of the
                server.
        """
        super().__init__()
        self.groups, self._policy, self._given = policy.groups, policy, given
        # worker -> step of its newest push that was merged into the weights
        self._steps: dict[int, int] = {}
        self._num_rounds = 0  # number of synchronization rounds that were merged into the weights
        self._drawn: Draw | None = None  # workers drawn for the current round; None between rounds
        # workers of the current round that neither left nor withdrew their push
        self._open: set[int] = set()
        self._gave_up: set[int] = set()  # workers that withdrew a push and sent no other push
        # Number of the newest draw of workers that was made or announced.
        self._newest = 0 if policy.follows else generation * _DRAWS_PER_GENERATION
        self._announced: list[Draw] = []  # draws of workers that shard 0 announced, the newest last
        # On all shard servers but shard 0: shard 0's draws of workers for rounds that have not
        # begun on this server yet.
        self._awaited: list[Draw] = []

    # -- groups -----------------------------------------------------------------------------

    @property
    def waits_for_start(self) -> bool:
        """True if the training run starts only when all workers have joined."""
        return self._policy.waits_for_start

    def group_of(self, worker: int) -> int:
        """Return 0, because all workers are in one group."""
        return 0

    def name_of(self, worker: int) -> str:
        """Return the name of the group of all workers in metrics."""
        return name_of(self.groups[0])

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the current round's workers, ascending; [] if `worker` is not in the round."""
        return sorted(self._open) if worker in self._open else []

    def pause(self) -> None:
        """Raise NotImplementedError: all workers are in one group, which does not change."""
        raise NotImplementedError("workers are drawn from one group, which cannot change")

    def is_quiescent(self) -> bool:
        """Return True if every worker of the current round has submitted a push."""
        return all(worker in self._submitted for worker in self._open)

    def regroup(self, groups: Groups) -> None:
        """Raise NotImplementedError: all workers are in one group, which does not change."""
        self.pause()

    # -- draws ------------------------------------------------------------------------------

    def draws(self) -> Sequence[Draw]:
        """Return the latest draws of workers, newest last: for the current and finished rounds."""
        return self._announced

    def follow(self, draws: Sequence[Draw]) -> None:
        """Replace the draws of workers that this shard server knows by the draws of shard 0.

        A known draw of workers that is missing in the draws of shard 0 is void.
        """
        if not draws or not self._policy.follows:
            return
        awaited = {item.number for item in self._awaited}
        self._awaited = [
            item for item in draws if item.number in awaited or item.number > self._newest
        ]
        self._announced, self._newest = list(draws), max(self._newest, draws[-1].number)
        if self._drawn is not None:
            number = self._drawn.number
            known = next((item for item in draws if item.number == number), None)
            self._open &= self._to_wait_for(known) if known else set()

    def _to_wait_for(self, drawn: Draw) -> set[int]:
        """Return the live drawn workers whose pushes have arrived, or may still arrive."""
        waited = {worker for worker in drawn.workers if contains(self._live, worker)}
        if drawn.number == self._newest:
            return waited
        released = dict(zip(drawn.workers, drawn.steps, strict=False))
        waited -= self._gave_up
        return {worker for worker in waited if self._steps.get(worker, 0) < released.get(worker, 0)}

    def _next_draw(self) -> Draw | None:
        """Return the next round's draw; None without live workers or a draw of shard 0."""
        if self._policy.follows:
            return self._awaited.pop(0) if self._awaited else None
        if not self._live:
            return None
        number = self._num_rounds
        planned = self._given[number] if number < len(self._given) else ()
        workers = tuple(worker for worker in planned if contains(self._live, worker))
        if not workers:
            workers = draw(self._policy.seed, number, self._live, self._policy.fraction)
        self._newest += 1
        next_draw = Draw(self._newest, number, workers, after=self._past(workers))
        self._announced = [*self._announced[1 - _KEPT :], next_draw]
        return next_draw

    # -- workers ----------------------------------------------------------------------------

    def joiners(self) -> Sequence[Joiners]:
        """Return (), because the draws list the workers of each round."""
        return ()

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Do nothing, because the draws list the workers of each round."""

    def join(self, worker: int) -> None:
        """Announce a worker.

        Add a worker, which is live from the next `advance` on and may be drawn.
        """
        if not contains(self._live, worker) and not contains(self._joining, worker):
            bisect.insort(self._joining, worker)

    def leave(self, worker: int) -> None:
        """Remove a worker and its waiting pushes from the synchronization rule.

        The current round continues without the removed worker.
        """
        self._submitted.pop(worker, None)
        self._open.discard(worker)
        self._gave_up.discard(worker)
        self._announced = [_without(item, worker) for item in self._announced]
        self._awaited = [_without(item, worker) for item in self._awaited]
        for workers in (self._live, self._joining):
            if worker in workers:
                workers.remove(worker)

    def waiting(self) -> set[int]:
        """Return the live workers that wait for a complete round or to be drawn."""
        return {worker for worker in self._live if not self.may_proceed(worker)}

    def may_proceed(self, worker: int) -> bool:
        """Return True if the worker is drawn for the round and has not submitted its push."""
        return worker in self._open and worker not in self._submitted

    # -- arrivals ---------------------------------------------------------------------------

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add a received push of a live worker to the waiting pushes.

        A push that is submitted twice counts once.
        """
        self._gave_up.discard(arrival.worker)
        arrivals = self._submitted.setdefault(arrival.worker, [])
        if arrival not in arrivals:
            bisect.insort(arrivals, arrival)

    def withdraw(self, worker: int, step: int) -> None:
        """Remove all waiting pushes of a worker.

        On shard 0, the current round continues without the worker that withdrew, because other
        shard servers may have accepted the withdrawn push. On a shard server other than shard 0,
        the newest round waits for a new push of the worker that withdrew only if the same round at
        shard 0 waits for this worker.
        """
        self._submitted.pop(worker, None)
        self._gave_up.add(worker)
        self._void[worker] = max(step, self._void.get(worker, 0))
        if not self._policy.follows or (self._drawn and self._drawn.number < self._newest):
            self._open.discard(worker)

    def advance(self, now: float) -> Advance:
        """Merge the pushes of a complete round, let joining workers in, and begin the next round.

        If all workers of a round have left, other live workers are drawn for the round.
        """
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
            proceeding = sorted(worker for worker in self._open if worker not in self._submitted)
        return Advance(released, proceeding, has_drawn=self._newest != before)

    def over(self) -> Mapping[int, int]:
        """Return {}, because the draws list the push steps of each round."""
        return {}

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Release no late pushes, because draws name the push steps of each round."""
        return ()

    def _begin(self, drawn: Draw) -> None:
        if drawn.number == self._newest:
            # Forget withdrawals of pushes from before this draw of workers, because the worker may
            # push for this draw. A withdrawn push for this draw stays withdrawn.
            after = zip(drawn.workers, drawn.after, strict=True)
            self._gave_up -= {worker for worker, step in after if self._void.get(worker, 0) <= step}
        self._open = self._to_wait_for(drawn)

    def _late(self) -> list[int]:
        """Return workers of the round whose oldest waiting push is older than the draw.

        Shard 0 had merged or withdrawn the old push before it drew the round's workers.
        """
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
        """Merge the oldest waiting push of each worker of the round."""
        workers = tuple(sorted(self._open))
        # `after` must not contain the steps that this round releases (merges), so call `_past`
        # before the release. With these steps in `after`, other shard servers would release the
        # pushes of this round as late pushes, in a separate update.
        after = self._past(workers)
        taken = self._release(workers)
        self._open = set()
        self._num_rounds += 1
        if not self._policy.follows:
            steps = tuple(arrival.step for arrival in taken)
            self._announced[-1:] = [Draw(self._newest, self._num_rounds - 1, workers, steps, after)]
        return taken

    def _past(self, workers: Sequence[int]) -> tuple[int, ...]:
        """Return each worker's newest merged or withdrawn push step, in the order of `workers`."""
        return tuple(
            max(self._steps.get(worker, 0), self._void.get(worker, 0)) for worker in workers
        )

    def _release(self, workers: Sequence[int]) -> tuple[ArrivalToken, ...]:
        """Release the oldest waiting push of each worker in `workers`, which is ascending."""
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
        """Return the rule's state that survives a restart, and with `soft` the remaining state."""
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
                w: [token.step for token in tokens] for w, tokens in self._submitted.items()
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
        """Restore the rule's state from the result of `state_dict`."""
        self._clocks = {int(worker): clock for worker, clock in state["clocks"].items()}
        self._steps = {int(worker): step for worker, step in state["steps"].items()}
        self._void = {int(worker): step for worker, step in state["void"].items()}
        self._num_rounds = state["rounds"]
        if not soft:
            self._newest = max(self._newest, state["followed"])
            return
        self._newest = state["newest"]
        self._load_workers(state)
        self._drawn = next(iter(_of_plain(state["drawn"])), None)
        self._open, self._gave_up = set(state["open"]), set(state["gave_up"])
        self._announced = _of_plain(state["announced"])
        self._awaited = _of_plain(state["awaited"])


def _as_plain(draws: Sequence[Draw]) -> list[list[Any]]:
    return [
        [item.number, item.of_round, list(item.workers), list(item.steps), list(item.after)]
        for item in draws
    ]


def _of_plain(draws: Sequence[Sequence[Any]]) -> list[Draw]:
    return [
        Draw(number, of_round, tuple(workers), tuple(steps), tuple(after))
        for number, of_round, workers, steps, after in draws
    ]


def _without(drawn: Draw, worker: int) -> Draw:
    # a round whose pushes are merged does not change any more
    if drawn.steps or worker not in drawn.workers:
        return drawn
    pairs = [pair for pair in zip(drawn.workers, drawn.after, strict=True) if pair[0] != worker]
    workers, after = tuple(member for member, _ in pairs), tuple(step for _, step in pairs)
    return dataclasses.replace(drawn, workers=workers, after=after)
