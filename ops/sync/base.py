"""Interface of a synchronization rule, which releases pushes and lets workers proceed.

To release pushes means to merge them into one update of the weights. A rule is a value with two
pure functions: `ready` names the pushes to release now, and `may_proceed` is True if a worker
may compute its next round. Both functions read a `Rounds` object (`thinwire.ops.sync.rounds`),
which records workers, arrivals and clocks. An arrival is a token (worker, step) of a push, so a
rule never sees an update. Every shard, the Simulator and the tests use the same rules.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.sync.groups import AutoGroups, Groups
from thinwire.ops.types import Policy

if TYPE_CHECKING:
    from thinwire.ops.sync.rounds import Rounds


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
    """The result of one `Rounds.advance`: released pushes, and workers that may proceed.

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


@dataclasses.dataclass(frozen=True)
class Ready:
    """The answer of `SyncRule.ready`: the pushes to release now.

    Attributes:
        releases: For each update to apply, the tokens of the waiting pushes that it merges.
        look_again_at: Time at which `ready` may release pushes without a further event, on the
            clock of `now`; None if only an event can complete a round.
    """

    releases: Sequence[tuple[ArrivalToken, ...]] = ()
    look_again_at: float | None = None


class Agreement(enum.Enum):
    """How the shards of a run form equal rounds. Shard 0 announces, the other shards follow."""

    #: Each shard calls `ready` itself. Shard 0 announces which joining workers are in which round.
    #: For rules whose `ready` depends only on which live members of a group have pushed.
    JOINERS = "joiners"
    #: Shard 0 draws the workers of each round and announces the draws.
    DRAWS = "draws"
    #: Only shard 0 calls `ready`. The other shards release what shard 0 has released. For any rule.
    RELEASES = "releases"


class SyncRule(Policy):
    """A synchronization rule, as stored in a Method: a frozen dataclass of hyper-parameters.

    A rule of one's own has a field `groups` and defines `ready`. `docs/guide/adding_a_policy.md`
    shows an example.

    Attributes:
        groups: Groups of workers that step together when the run starts; each id is in one group.
        bound: How many iterations a worker may be ahead of the slowest worker; None for no limit.
        auto: Settings for forming groups from measured speeds; None if groups do not change.
    """

    #: How the shards of a run form equal rounds.
    agreement: ClassVar[Agreement] = Agreement.RELEASES
    #: False if a joining worker becomes live only when a round is released, never during a round.
    admits_in_round: ClassVar[bool] = True

    groups: Groups
    bound: int | None = None
    auto: AutoGroups | None = None

    def ready(self, rounds: Rounds, now: float) -> Ready:
        """Return the pushes to release now. The function changes nothing.

        Args:
            rounds: Workers, waiting pushes and clocks of this shard.
            now: Time of the shard's clock, in seconds.
        """
        raise NotImplementedError

    def may_proceed(self, rounds: Rounds, worker: int) -> bool:
        """Return True if a live worker that has finished its round may compute the next round."""
        return True

    def draw(self, number: int, live: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the workers of a round, ascending. Only for `Agreement.DRAWS`.

        Args:
            number: Number of the round, from 0.
            live: Ids of the live workers, ascending, at least one.
        """
        raise NotImplementedError

    @property
    def sizes(self) -> Sequence[int]:
        """Number of workers in a round of each group, if all workers are live."""
        return [len(group) for group in self.groups]

    @property
    def takes_all(self) -> bool:
        """True if every live worker takes part in each round of its group."""
        return self.agreement is not Agreement.DRAWS

    @property
    def waits_for_start(self) -> bool:
        """True if a group has 2 or more workers: the run starts when all workers have joined."""
        return any(len(group) > 1 for group in self.groups)


def complete_rounds(rounds: Rounds) -> Ready:
    """Release each round to which every worker of the round has pushed: its oldest pushes."""
    complete = [number for number in rounds.changed if rounds.is_complete(number)]
    return Ready([rounds.oldest(rounds.members(number)) for number in complete])
