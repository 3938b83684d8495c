"""Interface of synchronization rules, which merge waiting pushes and let workers proceed.

To release pushes means to merge the pushed gradients into one update of the weights. A
synchronization rule decides in which order waiting pushes are applied. An arrival is the token
(worker, step) of a received push, so a synchronization rule never sees gradient values. One worker
may have several waiting pushes, as in a buffer of K pushes. A synchronization rule may act because
time has passed, as in a quorum with a grace period. Every shard server, the Simulator and the tests
use the same synchronization rules.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.types import Policy

if TYPE_CHECKING:
    from thinwire.ops.sync.groups import AutoGroups, Groups
    from thinwire.ops.types import State


@dataclasses.dataclass(frozen=True, order=True)
class ArrivalToken:
    """Token (worker, step) of one received push that is not merged into the weights yet.

    The caller that submits an arrival token stores the update (gradient values) itself.
    """

    worker: int
    step: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """The workers drawn for one round, in a rule where only drawn workers participate in a round.

    Attributes:
        number: Number of the draw of workers. Every draw of the run has a larger number than
            earlier draws.
        of_round: Number of the synchronization round, from 0. Workers are drawn again for the round
            if all its workers leave.
        workers: Ids of the workers drawn for the round, ascending.
        steps: Step of each drawn worker's push that the round merged into the weights, in the order
            of `workers`; () if the round is not complete yet.
        after: Step of each drawn worker's newest push that was released (merged) or withdrawn
            before the draw, in the order of `workers`; 0 if the worker had no released or withdrawn
            push.
    """

    number: int
    of_round: int
    workers: tuple[int, ...]
    steps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Joiners:
    """Workers that joined a group together at shard 0 and have not finished a round there yet.

    The other shard servers let joining workers into the same round as shard 0, even if pushes of
    that round have already arrived at the other shard servers. If each shard server let workers in
    when its current round ends, the rounds of two shard servers could wait for each other.

    Attributes:
        workers: Ids of the workers that are joining the group, ascending.
        has_entered: True if the joining workers participate in the current round at shard 0, False
            if these workers still wait for a round.
        members: Ids of the group's workers that have finished a round, ascending.
        after: Step of the newest push, for each worker in `members`, that shard 0 released (merged)
            or withdrew before the round that the joining workers enter.
    """

    workers: tuple[int, ...]
    has_entered: bool = False
    members: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Advance:
    """Result of one `SyncRule.advance`: pushes to merge, and workers that may proceed.

    Attributes:
        released: For each weight update to apply, the tokens of the pushes merged in it, ordered by
            worker and step.
        proceeding: Ids of workers that may start their next iteration, including new workers.
        has_drawn: True if shard 0 drew workers for a round; the other shard servers must use this
            draw.
        has_entered: True if new workers participate in a round at shard 0. The other shard servers
            must let these workers into the same round.
    """

    released: Sequence[tuple[ArrivalToken, ...]]
    proceeding: Sequence[int]
    has_drawn: bool = False
    has_entered: bool = False


class SyncRule(Protocol):
    """A running synchronization rule of one shard server, with its state.

    Attributes:
        groups: Groups of workers that step together. Each worker id is in exactly one group.
    """

    groups: Groups

    @property
    def waits_for_start(self) -> bool:
        """True if the training run starts only when all workers have joined."""

    def group_of(self, worker: int) -> int:
        """Return the number of the worker's group, an index into `groups`."""

    def name_of(self, worker: int) -> str:
        """Return the name of the worker's group in metrics."""

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers in the worker's current round, including the worker itself."""

    def draws(self) -> Sequence[Draw]:
        """Return the latest draws of workers, newest last; () if rounds have all live workers."""

    def follow(self, draws: Sequence[Draw]) -> None:
        """Replace the known draws of workers by the draws of shard 0.

        `follow` is called on all shard servers but shard 0.
        """

    def joiners(self) -> Sequence[Joiners]:
        """Return the workers that have not finished a round of their group yet.

        `joiners` is called only on shard 0.
        """

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Replace the expected new workers by the new workers that shard 0 announces.

        `expect` is called on all shard servers but shard 0.
        """

    def join(self, worker: int) -> None:
        """Add a worker, which becomes live (participates) at the next round boundary of its group.

        On a shard server that follows shard 0, a joining worker becomes live (participates in
        rounds) under two conditions. The conditions are: shard 0 has let the worker into a round,
        and this shard server has released (merged) or withdrawn all pushes that shard 0 had
        released or withdrawn before that round.
        """

    def leave(self, worker: int) -> None:
        """Remove a worker and its waiting pushes from the synchronization rule.

        Synchronization rounds do not wait for a removed worker.
        """

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add a received push of a live worker to the waiting pushes.

        A push that is submitted twice counts once.
        """

    def withdraw(self, worker: int, step: int) -> None:
        """Remove all waiting pushes of a worker; do nothing if no push of the worker waits.

        Args:
            worker: Id of a live worker that does not wait for the result of its push any more.
            step: Step of the worker's newest push that is withdrawn, at least on this shard server.
        """

    def over(self) -> Mapping[int, int]:
        """Return worker -> step of its newest push that was released (merged) or withdrawn here.

        The returned dict contains only the live workers of groups in which pushes wait to be
        merged.
        """

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Merge waiting pushes up to the steps in `over`, before their round is complete.

        The rounds of two shard servers may be some pushes apart: one of the servers may have
        restarted from an older state, or refused a push that the other server accepted. Without
        late releases, each of two shard servers could wait for a push of a worker that waits at the
        other shard server.

        Args:
            over: Worker -> step of its newest push that another shard server released (merged) or
                withdrew.

        Returns:
            The tokens of the pushes of each update, in order of worker.
        """

    def advance(self, now: float) -> Advance:
        """Merge the pushes of complete rounds, let joining workers in, and let workers proceed."""

    def next_deadline(self) -> float | None:
        """Return the time when `advance` is due even without a new push; None if never."""

    def pause(self) -> None:
        """Hold every worker that finishes a round until `regroup` is called."""

    def is_quiescent(self) -> bool:
        """Return True if every live worker has finished its round and waits to proceed."""

    def regroup(self, groups: Groups) -> None:
        """Assign the same workers to new groups and continue."""

    def is_live(self, worker: int) -> bool:
        """Return True if the synchronization rule waits for the worker's pushes."""

    def may_proceed(self, worker: int) -> bool:
        """Return True if a live worker may compute its next round."""

    def has_submitted(self, worker: int) -> bool:
        """Return True if a push of the worker waits to be merged into the weights."""

    def live(self) -> Sequence[int]:
        """Return the ids of workers that participate in the run's rounds, ascending."""

    def joining(self) -> Sequence[int]:
        """Return the ids of workers that join at their group's next round, ascending."""

    def waiting(self) -> set[int]:
        """Return the live workers that wait for a complete round or for permission to proceed."""

    def clocks(self) -> dict[int, int]:
        """Return worker -> number of finished iterations.

        The numbers of finished iterations include workers that have left.
        """

    def state_dict(self, soft: bool) -> State:
        """Return the state of the synchronization rule.

        Args:
            soft: True for the complete state of the rule, which only an uninterrupted run of the
                shard server can use. False for the part that stays valid after a restart, as plain
                data.
        """

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore a state of the synchronization rule from `state_dict`.

        Load the rule's state made with soft=True after the state made with soft=False.
        """


class WorkerSets:
    """Base class of synchronization rules: one shard server's workers and waiting pushes."""

    def __init__(self) -> None:
        """Start without workers."""
        self._live: list[int] = []  # ids of live workers (workers for which rounds wait), ascending
        # ids of workers that join at the next round boundary, ascending
        self._joining: list[int] = []
        # Live worker -> its received pushes that are not merged yet, oldest first; never an empty
        # list.
        self._submitted: dict[int, list[ArrivalToken]] = {}
        # worker -> number of finished iterations; stays when a worker leaves
        self._clocks: dict[int, int] = {}
        self._void: dict[int, int] = {}  # worker, live or not -> step of its newest withdrawn push

    def live(self) -> Sequence[int]:
        """Return the ids of live workers (workers for which rounds wait), ascending."""
        return self._live

    def joining(self) -> Sequence[int]:
        """Return the workers that join at their group's next round boundary, ascending."""
        return self._joining

    def clocks(self) -> dict[int, int]:
        """Return worker -> number of finished iterations, including workers that have left."""
        return self._clocks

    def is_live(self, worker: int) -> bool:
        """Return True if the synchronization rule waits for the worker's pushes."""
        return contains(self._live, worker)

    def has_submitted(self, worker: int) -> bool:
        """Return True if a received push of the worker waits to be merged into the weights."""
        return worker in self._submitted

    def next_deadline(self) -> float | None:
        """Return None, because the synchronization rule does not depend on time."""
        return None

    def _load_workers(self, state: State) -> None:
        """Restore live and joining workers, and their waiting pushes, from a complete state."""
        self._live, self._joining = list(state["live"]), list(state["joining"])
        self._submitted = {
            worker: [ArrivalToken(worker, step) for step in steps]
            for worker, steps in state["submitted"].items()
        }


def contains(ascending: Sequence[int], value: int) -> bool:
    """Return True if a sorted list contains a value."""
    place = bisect.bisect_left(ascending, value)
    return place < len(ascending) and ascending[place] == value


class SyncPolicy(Policy, Protocol):
    """Settings of a synchronization rule, as stored in a Method (training method of a run).

    A frozen dataclass.
    """

    @property
    def groups(self) -> Groups:
        """Groups of workers that step together when the run starts; each worker is in one group."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of workers in a round of each group, if all workers are live."""

    @property
    def bound(self) -> int | None:
        """Number of iterations a worker may be ahead of the slowest worker; None for no limit."""

    @property
    def auto(self) -> AutoGroups | None:
        """Settings for forming worker groups from measured speeds; None if groups do not change."""

    @property
    def takes_all(self) -> bool:
        """True if every live worker participates in each round of its group."""

    @property
    def waits_for_start(self) -> bool:
        """True if the training run starts only when all workers have joined."""

    def start(self, generation: int = 0) -> SyncRule:
        """Return the synchronization rule in its start state, without workers.

        Args:
            generation: Generation of the shard server, a number that grows with each restart of the
                server.
        """

    def without_bound(self) -> SyncPolicy:
        """Return the settings for other shards than shard 0, without a staleness bound."""
