"""The contract of a rule of synchronisation: when is an update released, and who may go on?

A rule orders arrivals, which are tokens: it never sees an update. One worker may have several
arrivals that wait, as in a buffer of K, and a rule may act because time has passed, as a quorum
with grace does. So the same bookkeeping serves every shard, the Simulator and the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.types import Policy

if TYPE_CHECKING:
    from thinwire.ops.sync.groups import AutoGroups, Groups
    from thinwire.ops.types import State


@dataclasses.dataclass(frozen=True, order=True)
class ArrivalToken:
    """One push that waits to be released; whoever submitted it keeps the update."""

    worker: int
    step: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """The workers that a round is of, where not all live workers take part in each.

    Attributes:
        number: Grows with every draw of the run.
        of_round: From 0; drawn again if all of its workers leave.
        workers: Ascending.
        steps: Of the pushes that were released for it, in the order of the workers; (): none yet.
        after: The newest step of each worker that was released or given up before, in the order of
            the workers; 0: none.
    """

    number: int
    of_round: int
    workers: tuple[int, ...]
    steps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Joiners:
    """Workers that have joined a group at shard 0 together and have finished no round there yet.

    The other shards let them into the same round, whatever has arrived there already. If each let
    them in at a round's end of its own, rounds of two shards could wait for each other.

    Attributes:
        workers: Their ids, ascending.
        has_entered: Whether their first round at shard 0 goes on; else they still wait for it.
        members: Of the group, but for those that have not finished a round themselves; ascending.
        after: The newest step of each member that was over at shard 0 before that round.
    """

    workers: tuple[int, ...]
    has_entered: bool = False
    members: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Advance:
    """The result of one turn of a rule.

    Attributes:
        released: The arrivals of each update, in order of worker and step.
        proceeding: Workers that may begin their next iteration, new ones included.
        has_drawn: Whether the rule has made draws, which the other shards are to follow.
        has_entered: Whether workers have entered, where the other shards are to let them in, too.
    """

    released: Sequence[tuple[ArrivalToken, ...]]
    proceeding: Sequence[int]
    has_drawn: bool = False
    has_entered: bool = False


class SyncRule(Protocol):
    """A rule in force on one shard, with its memory.

    Attributes:
        groups: Workers that step together; every id once.
    """

    groups: Groups

    @property
    def waits_for_start(self) -> bool:
        """Whether the run begins only when all workers are there."""

    def group_of(self, worker: int) -> int:
        """Return the number of the worker's group."""

    def name_of(self, worker: int) -> str:
        """Return the worker's group as figures name it."""

    def fellows(self, worker: int) -> Sequence[int]:
        """Return the live workers whose pushes the worker's round is of, itself included."""

    def draws(self) -> Sequence[Draw]:
        """Return the newest draws, the newest last; () where all live workers take part."""

    def follow(self, draws: Sequence[Draw]) -> None:
        """Take over the draws of shard 0, on the other shards."""

    def joiners(self) -> Sequence[Joiners]:
        """Return, on shard 0, the members of groups that have not finished a round yet."""

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Take over the joiners of shard 0, on the other shards; they replace those before."""

    def join(self, worker: int) -> None:
        """Announce a worker; it becomes live at its group's next round boundary.

        On a shard that follows, when shard 0 has let it in and the pushes that were over there
        before are over here.
        """

    def leave(self, worker: int) -> None:
        """Forget a worker and its arrivals; nobody waits for it any more."""

    def submit(self, arrival: ArrivalToken, now: float) -> None:
        """Add an arrival of a live worker; the same one counts once."""

    def withdraw(self, worker: int, step: int) -> None:
        """Take back all arrivals of a worker that are not released yet, if there are any.

        Args:
            worker: A live one, which waits for no push of its own any more.
            step: Of the newest push that it has given up, here at least.
        """

    def over(self) -> Mapping[int, int]:
        """Return the newest step of workers that was released or given up here.

        Of the live workers of groups in which pushes wait.
        """

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Release what waits, though its round is not complete, up to these steps of workers.

        Rounds of two shards may be pushes apart, where a shard began again from an older state or
        refused what the other took; then each may wait for a push of a worker that waits at the
        other.

        Returns:
            The arrivals of each update, in order of worker.
        """

    def advance(self, now: float) -> Advance:
        """Settle everything that can be settled now."""

    def next_deadline(self) -> float | None:
        """Return when `advance` is due though nothing arrives; None: never."""

    def pause(self) -> None:
        """Let nobody proceed who finishes a round from now on, until `regroup`."""

    def is_quiescent(self) -> bool:
        """Return whether every live worker has finished its round and may not proceed."""

    def regroup(self, groups: Groups) -> None:
        """Go on with the same workers in other groups."""

    def is_live(self, worker: int) -> bool:
        """Return whether the rule waits for the worker's pushes."""

    def may_proceed(self, worker: int) -> bool:
        """Return whether a live worker may do its next round."""

    def has_submitted(self, worker: int) -> bool:
        """Return whether an arrival of the worker waits to be released."""

    def live(self) -> Sequence[int]:
        """Return the live workers, ascending."""

    def joining(self) -> Sequence[int]:
        """Return the workers that enter at their group's next round boundary, ascending."""

    def waiting(self) -> set[int]:
        """Return live workers that wait: for their round, or for permission to proceed."""

    def clocks(self) -> dict[int, int]:
        """Return worker -> finished iterations, those of workers that have left included."""

    def state_dict(self, soft: bool) -> State:
        """Return the state.

        Args:
            soft: What only a shard that goes on without a break knows; else what outlives a
                restart, as plain data.
        """

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave; the soft state after the other."""


class SyncPolicy(Policy, Protocol):
    """The settings of a rule, as a Method holds them; a frozen dataclass."""

    @property
    def groups(self) -> Groups:
        """Workers that step together when the run begins; every id once."""

    @property
    def sizes(self) -> Sequence[int]:
        """How many workers a round of each group is of, if all are live."""

    @property
    def bound(self) -> int | None:
        """How many iterations a worker may be ahead of the slowest; None: any number."""

    @property
    def auto(self) -> AutoGroups | None:
        """How `groups` are replaced by others that are formed from measured speeds."""

    @property
    def takes_all(self) -> bool:
        """Whether every live worker takes part in each round of its group."""

    @property
    def waits_for_start(self) -> bool:
        """Whether the run begins only when all workers are there."""

    def start(self, generation: int = 0) -> SyncRule:
        """Return the rule with an empty memory: nobody is there.

        Args:
            generation: Of the shard; its lives are numbered.
        """

    def without_bound(self) -> SyncPolicy:
        """Return the rule of a shard that follows shard 0, which alone lets workers proceed."""
