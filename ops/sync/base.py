"""Interface of a synchronization rule, which releases pushes and lets workers proceed.

To release pushes means to merge the pushes into one update of the weights. A synchronization rule
is a value with two pure functions. `ready` returns the pushes to release now, and `may_proceed` is
True if a worker may compute its next training round. `ready` and `may_proceed` read a `Rounds`
object (`thinwire.ops.sync.rounds`), which records workers, arrivals and clocks. An arrival is a
token (worker, step) of a push, so a synchronization rule never reads the values of an update. Every
shard server, the Simulator and the tests use the same synchronization rules.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from thinwire.ops.policy import Policy
from thinwire.ops.sync.groups import AutoGroups, Groups, format_groups, one_group
from thinwire.ops.types import ConfigurationError, State


@dataclasses.dataclass(frozen=True, order=True)
class ArrivalToken:
    """Token of a worker's push that waits to be merged; the shard's core stores the push itself."""

    worker: int
    step: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """Announcement of a training round by shard 0: the round's workers, and their released steps.

    Attributes:
        number: Number of the announcement. Later announced rounds of a run have larger numbers.
        of_round: Number of the training round, from 0. If all workers of a drawn round leave,
            shard 0 draws workers for this round number again.
        workers: Ids of the workers of the announced training round, ascending.
        steps: Step of each worker's push that shard 0 released in the announced round, in the order
            of `workers`; () if shard 0 has not released the round yet.
        after: Newest push step of each worker that shard 0 released or withdrew before the
            announced round, in the order of `workers`; 0 for a worker without such a push.
    """

    number: int
    of_round: int
    workers: tuple[int, ...]
    steps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Joiners:
    """Workers that joined a worker group together and have not finished a round at shard 0 yet.

    All other shards add joining workers to the same training round as shard 0, even if pushes of
    that round have already arrived. If each shard added joining workers when its own current round
    ends, the rounds of two shards could wait for each other.

    Attributes:
        workers: Ids of the joining workers, ascending.
        has_entered: True if shard 0 has added the joining workers to its current round, False if
            the joining workers wait for a round at shard 0.
        members: Ids of the worker group's members that have finished a round, ascending.
        after: Newest push step that shard 0 released or withdrew, for each worker of `members`,
            before the first round of the joining workers.
    """

    workers: tuple[int, ...]
    has_entered: bool = False
    members: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Advance:
    """Result of a call of `Rounds.advance`: released pushes, and workers that may proceed.

    Attributes:
        released: For each update to apply, the tokens of the pushes that the update merges.
        proceeding: Ids of workers that may start their next iteration, including joined workers.
        has_drawn: True if shard 0 announces a new training round, which the other shards must form
            with the same workers.
        has_entered: True if joining workers became live on this shard; shard 0 then announces the
            joined workers to the other shards.
    """

    released: Sequence[tuple[ArrivalToken, ...]]
    proceeding: Sequence[int]
    has_drawn: bool = False
    has_entered: bool = False


@dataclasses.dataclass(frozen=True)
class Ready:
    """Result of `SyncRule.ready`: the pushes that the shard must release now.

    Attributes:
        releases: For each update to apply, the tokens of the waiting pushes that the update merges.
        look_again_at: Time in seconds, by the shard's clock, at which `SyncRule.ready` may release
            pushes without a further event; None if only an event can complete a round.
    """

    releases: Sequence[tuple[ArrivalToken, ...]] = ()
    look_again_at: float | None = None


class Agreement(enum.Enum):
    """How all shards of a run form equal rounds from the announcements of shard 0."""

    #: Each shard calls `SyncRule.ready`, and shard 0 announces which joining workers are in which
    #: round. JOINERS is for rules whose `ready` depends only on which live members of a worker
    #: group have pushed.
    JOINERS = "joiners"
    #: Shard 0 draws the workers of each training round and announces the drawn workers.
    DRAWS = "draws"
    #: Only shard 0 calls `SyncRule.ready`, and the other shards release the pushes that shard 0 has
    #: released. RELEASES is for any synchronization rule.
    RELEASES = "releases"


class RoundsView(Protocol):
    """State of a shard's rounds that a synchronization rule may read.

    Attributes:
        groups: Current worker groups; each worker id is in exactly one group.
        changed: Numbers of the worker groups whose pushes or members have changed since the last
            call of `SyncRule.ready`, ascending. Synchronization rules may skip unchanged groups.
        state: State of the rule itself: a dict, empty at first, of plain data (numbers, strings,
            lists, and dicts with strings as keys). Only `SyncRule.ready` may change the state.
            Checkpoints contain the state.
    """

    groups: Groups
    changed: Sequence[int]
    state: State

    def members(self, number: int) -> Sequence[int]:
        """Return the ids of the workers in the current round of a worker group, ascending."""

    def is_complete(self, number: int) -> bool:
        """Return True if a push of every worker of the group's current round waits."""

    def oldest(self, workers: Iterable[int]) -> tuple[ArrivalToken, ...]:
        """Return the oldest waiting push of each worker; skip workers without a waiting push."""

    def arrived_at(self, arrival: ArrivalToken) -> float:
        """Return the time at which a waiting push arrived, in seconds of the shard's clock."""

    def live(self) -> tuple[int, ...]:
        """Return the ids of the workers whose pushes rounds wait for, ascending."""

    def clock(self, worker: int) -> int:
        """Return the number of iterations that a worker has finished."""

    def lead(self, worker: int) -> int:
        """Return how many iterations a live worker is ahead of the slowest live worker."""


class SyncRule(Policy):
    """A synchronization rule, as stored in a Method: a frozen dataclass of hyper-parameters.

    A user's own synchronization rule has a field `groups` and defines the method `ready`;
    `docs/guide/adding_a_policy.md` shows an example.

    Attributes:
        groups: Worker groups at the start of the run; workers of a group step together, and each
            worker id is in exactly one group.
        bound: How many iterations a worker may be ahead of the slowest worker; None for no limit.
        auto: Settings for forming worker groups from measured speeds; None if the worker groups do
            not change.
    """

    #: How all shards of a run form equal rounds with this synchronization rule.
    agreement: ClassVar[Agreement] = Agreement.RELEASES
    #: False if a joining worker becomes live only when a round is released, never during a round.
    admits_in_round: ClassVar[bool] = True

    groups: Groups
    bound: int | None = None
    auto: AutoGroups | None = None

    def __post_init__(self) -> None:
        """Raise an error if `groups` is no partition of the ids 1..n, or a value is illegal."""
        super().__post_init__()
        if any(not group for group in self.groups):
            raise ConfigurationError(
                f"worker groups {format_groups(self.groups)!r} contain an empty group."
            )
        ids = sorted(worker for group in self.groups for worker in group)
        if ids != list(range(1, len(ids) + 1)):
            raise ConfigurationError(
                f"groups {format_groups(self.groups)!r} name the workers {ids}; expected each "
                f"worker of 1..{max(len(ids), 1)} in exactly one group (--groups, --groups_file)."
            )
        if self.bound is not None and self.bound < 0:
            raise ConfigurationError(
                f"--staleness_bound={self.bound}: expected 0 (lockstep) or more iterations."
            )

    @classmethod
    def form(cls, nb_workers: int) -> Groups:
        """Return the worker groups if no flag gives them: one group of all workers 1..n."""
        return one_group(nb_workers)

    def ready(self, rounds: RoundsView, now: float) -> Ready:
        """Return the pushes that the shard must release now; only `rounds.state` may change.

        Args:
            rounds: Workers, waiting pushes and workers' iteration counts of this shard.
            now: Current time of the shard's clock, in seconds.
        """
        raise NotImplementedError

    def may_proceed(self, rounds: RoundsView, worker: int) -> bool:
        """Return True if a live worker that has finished a round may compute its next round.

        A worker may do so if its lead over the slowest live worker is at most `bound`.
        """
        return self.bound is None or rounds.lead(worker) <= self.bound

    def draw(self, number: int, live: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of a round's workers, ascending; only for rules with `Agreement.DRAWS`.

        Args:
            number: Number of the training round, from 0.
            live: Ids of the live workers to draw from, ascending, at least one.
        """
        raise NotImplementedError

    @property
    def sizes(self) -> Sequence[int]:
        """Number of workers in a training round, for each worker group, if all workers are live."""
        return [len(group) for group in self.groups]

    @property
    def takes_all(self) -> bool:
        """True if each round has a push of every live worker of its group (Agreement.JOINERS)."""
        return self.agreement is Agreement.JOINERS

    @property
    def draws_workers(self) -> bool:
        """True if only drawn workers train in each round (Agreement.DRAWS)."""
        return self.agreement is Agreement.DRAWS

    @property
    def waits_for_start(self) -> bool:
        """True if a group has 2 or more workers; the run then starts when all workers joined."""
        return any(len(group) > 1 for group in self.groups)


def complete_rounds(rounds: RoundsView, numbers: Iterable[int]) -> Ready:
    """Return the oldest pushes of the workers of each complete round among some worker groups.

    Args:
        rounds: State of the shard's rounds.
        numbers: Numbers of the worker groups to examine, ascending.
    """
    complete = [number for number in numbers if rounds.is_complete(number)]
    return Ready([rounds.oldest(rounds.members(number)) for number in complete])
