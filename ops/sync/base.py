"""Interface of a synchronization rule, which releases pushes and lets workers proceed.

To release pushes means to merge them into one update of the weights. A rule orders arrivals. An
arrival is a token (worker, step) of a push, so a rule never sees an update. One worker may have
several waiting arrivals, as in a buffer of K pushes. A rule may act because time has passed, as in
a quorum with a grace period. Every shard, the Simulator and the tests use the same rules.
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
    """One push that waits to be released. The caller that submits the token stores the update."""

    worker: int
    step: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """The workers drawn for one round, in a rule where only some workers take part in a round.

    Attributes:
        number: Number of the draw. Every draw of the run has a larger number than earlier draws.
        of_round: Number of the round, from 0. A round is drawn again if all its workers leave.
        workers: Ids of the drawn workers, ascending.
        steps: Step of each drawn worker's push that the round released, in the order of `workers`;
            () if the round is not released yet.
        after: Newest push step of each drawn worker that was released or withdrawn before the draw,
            in the order of `workers`; 0 if the worker had no released or withdrawn push.
    """

    number: int
    of_round: int
    workers: tuple[int, ...]
    steps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Joiners:
    """Workers that joined a group at shard 0 together and have not finished a round there yet.

    The other shards let the joining workers into the same round as shard 0, even if pushes of that
    round have already arrived at the other shards. If each shard let workers in when its current
    round ends, the rounds of two shards could wait for each other.

    Attributes:
        workers: Ids of the joining workers, ascending.
        has_entered: True if the joining workers take part in the current round at shard 0, False
            if these workers still wait for a round.
        members: Ids of the group's members that have finished a round, ascending.
        after: Newest push step of each of `members` that shard 0 released or withdrew before the
            round that the joining workers enter.
    """

    workers: tuple[int, ...]
    has_entered: bool = False
    members: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Advance:
    """The result of one `SyncRule.advance`: released pushes, and workers that may proceed.

    Attributes:
        released: For each update to apply, the tokens of the pushes in it, by worker and step.
        proceeding: Ids of workers that may start their next iteration, including new workers.
        has_drawn: True if shard 0 drew workers for a round; the other shards must use this draw.
        has_entered: True if new workers take part in a round at shard 0. The other shards must
            let these workers into the same round.
    """

    released: Sequence[tuple[ArrivalToken, ...]]
    proceeding: Sequence[int]
    has_drawn: bool = False
    has_entered: bool = False


class SyncRule(Protocol):
    """A synchronization rule in use on one shard, with its state.

    Attributes:
        groups: Groups of workers that step together. Each worker id is in exactly one group.
    """

    groups: Groups

    @property
    def waits_for_start(self) -> bool:
        """True if the run starts only when all workers have joined."""

    def group_of(self, worker: int) -> int:
        """Return the number of the worker's group, an index into `groups`."""

    def name_of(self, worker: int) -> str:
        """Return the name of the worker's group in metrics."""

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers in the worker's current round, including the worker itself."""

    def draws(self) -> Sequence[Draw]:
        """Return the latest draws, the newest last; () if all live workers take part in a round."""

    def follow(self, draws: Sequence[Draw]) -> None:
        """Replace the known draws by the draws of shard 0. Called on all shards but shard 0."""

    def joiners(self) -> Sequence[Joiners]:
        """Return the group members that have not finished a round yet. Called on shard 0."""

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Replace the expected new workers by shard 0's. Called on all shards but shard 0."""

    def join(self, worker: int) -> None:
        """Add a worker, which becomes live at the next round boundary of its group.

        On a shard that follows shard 0, the worker becomes live under two conditions. Shard 0 has
        let the worker into a round, and this shard has released or withdrawn all pushes that shard
        0 had released or withdrawn before that round.
        """

    def leave(self, worker: int) -> None:
        """Remove a worker and its waiting pushes. Rounds do not wait for a removed worker."""

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add a push of a live worker. A push that is added twice counts once."""

    def withdraw(self, worker: int, step: int) -> None:
        """Remove all waiting pushes of a worker; do nothing if no push of the worker waits.

        Args:
            worker: Id of a live worker that does not wait for the result of its push any more.
            step: Step of the newest push that is withdrawn, at least on this shard.
        """

    def over(self) -> Mapping[int, int]:
        """Return worker -> newest push step that was released or withdrawn on this shard.

        The result contains only the live workers of groups in which pushes wait to be released.
        """

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

    def advance(self, now: float) -> Advance:
        """Release complete rounds, make joining workers live, and let workers proceed."""

    def next_deadline(self) -> float | None:
        """Return the time when `advance` is due even without a new push; None if never."""

    def pause(self) -> None:
        """Hold every worker that finishes a round until `regroup` is called."""

    def is_quiescent(self) -> bool:
        """Return True if every live worker has finished its round and waits to proceed."""

    def regroup(self, groups: Groups) -> None:
        """Continue with the same workers in new groups."""

    def is_live(self, worker: int) -> bool:
        """Return True if the rule waits for the worker's pushes."""

    def may_proceed(self, worker: int) -> bool:
        """Return True if a live worker may compute its next round."""

    def has_submitted(self, worker: int) -> bool:
        """Return True if a push of the worker waits to be released."""

    def live(self) -> Sequence[int]:
        """Return the ids of workers that take part in the run's rounds, ascending."""

    def joining(self) -> Sequence[int]:
        """Return ids of workers that become live at their group's next round, ascending."""

    def waiting(self) -> set[int]:
        """Return the live workers that wait for a complete round or for permission to proceed."""

    def clocks(self) -> dict[int, int]:
        """Return worker -> number of finished iterations. Workers that have left are included."""

    def state_dict(self, soft: bool) -> State:
        """Return the rule's state.

        Args:
            soft: True for the complete state, which only an uninterrupted run of the shard can use.
                False for the part that stays valid after a restart, as plain data.
        """

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore a state from `state_dict`. Load the state with soft=True after soft=False."""


class WorkerSets:
    """Base of rules: the workers of one shard, and their arrivals that are not released."""

    def __init__(self) -> None:
        """Start without workers."""
        self._live: list[int] = []  # ids of live workers, ascending
        self._joining: list[int] = []  # workers that enter at a round boundary, ascending
        # Live worker -> its arrivals that are not released, oldest first; never an empty list.
        self._submitted: dict[int, list[ArrivalToken]] = {}
        self._clocks: dict[int, int] = {}  # finished iterations; stays when a worker leaves
        self._void: dict[int, int] = {}  # worker, live or not -> newest step withdrawn

    def live(self) -> Sequence[int]:
        """Return the ids of live workers, ascending."""
        return self._live

    def joining(self) -> Sequence[int]:
        """Return the workers that enter at their group's next round boundary, ascending."""
        return self._joining

    def clocks(self) -> dict[int, int]:
        """Return worker -> number of finished iterations, including workers that have left."""
        return self._clocks

    def is_live(self, worker: int) -> bool:
        """Return True if the rule waits for the worker's pushes."""
        return contains(self._live, worker)

    def has_submitted(self, worker: int) -> bool:
        """Return True if an arrival of the worker waits to be released."""
        return worker in self._submitted

    def next_deadline(self) -> float | None:
        """Return None: the rule does not depend on time."""
        return None

    def _load_workers(self, state: State) -> None:
        """Restore live and joining workers, and their arrivals, from a soft state."""
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
    """The settings of a synchronization rule, as stored in a Method. A frozen dataclass."""

    @property
    def groups(self) -> Groups:
        """Groups of workers that step together when the run starts; each id is in one group."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of workers in a round of each group, if all workers are live."""

    @property
    def bound(self) -> int | None:
        """How many iterations a worker may be ahead of the slowest worker; None for no limit."""

    @property
    def auto(self) -> AutoGroups | None:
        """Settings for forming groups from measured speeds; None if groups do not change."""

    @property
    def takes_all(self) -> bool:
        """True if every live worker takes part in each round of its group."""

    @property
    def waits_for_start(self) -> bool:
        """True if the run starts only when all workers have joined."""

    def start(self, generation: int = 0) -> SyncRule:
        """Return the synchronization rule in its start state, without workers.

        Args:
            generation: Generation of the shard, a number that grows with each restart of the shard.
        """

    def without_bound(self) -> SyncPolicy:
        """Return the settings for a shard that follows shard 0: only shard 0 holds workers back."""
