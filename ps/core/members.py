"""The settings of a shard's core, and its knowledge of each worker: pushes, requests, versions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Iterator

from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.sync.base import ArrivalToken
from thinwire.ops.types import ModelSpec, State
from thinwire.ps.core import events


@dataclasses.dataclass(frozen=True)
class CoreConfig:
    """The settings of a shard besides its method."""

    budget: Budget
    schedule: Schedule
    nb_workers: int
    generation: int = 0
    generations_undone: int = 1  # before it, whose last updates may be lost
    max_seconds: float | None = None  # from the first pull
    start_timeout_seconds: float = 600.0  # then a synchronous run starts with those present
    snapshot_interval_seconds: float = 10.0
    spec: ModelSpec | None = None  # what the shard holds, slice by slice; None: one slice
    guards: Guards = dataclasses.field(default_factory=Guards)
    loss_scale: LossScale | None = None  # of a script; None: losses are not scaled
    # For each optimizer of a script: the batches that its schedule had counted before the phase.
    first_batches: tuple[int, ...] = ()


class MemberPhase(enum.Enum):
    """Where the newest push of a worker is."""

    COMPUTING = "computing"  # no push of it waits here
    BUFFERED = "buffered"  # it waits until the worker is live here, or for its epoch
    SUBMITTED = "submitted"  # it waits for its round


@dataclasses.dataclass(frozen=True)
class OpenRequest:
    """A pull or a push of a worker that has not been answered."""

    step: int  # of the push; 0: a pull
    base_version: int | None  # the version that the worker holds; None: none that is of use


@dataclasses.dataclass
class Member:
    """One worker, live or not."""

    incarnation: int = 0
    last_step: int = 0  # newest step accepted (applied, or waiting for its round)
    base_version: int = 0  # of the newest reply
    oldest_base: int = 0  # the oldest version at which the next push may have been computed
    push_bytes: int = 0  # of the newest push, coded
    buffered: events.Push | None = None  # arrived before the worker became live here
    submitted: list[events.Push] = dataclasses.field(default_factory=list)  # wait for release
    request: OpenRequest | None = None
    may_proceed: bool = False  # an open request may be answered
    requested_at: float = 0.0  # when the request arrived
    staleness: int = 0  # of the newest applied push

    @property
    def phase(self) -> MemberPhase:
        """Where its newest push is."""
        if self.submitted:
            return MemberPhase.SUBMITTED
        return MemberPhase.COMPUTING if self.buffered is None else MemberPhase.BUFFERED

    @property
    def waiting(self) -> events.Push | None:
        """The oldest push that is accepted and not applied."""
        return self.submitted[0] if self.submitted else self.buffered

    @property
    def applied_step(self) -> int:
        """The newest step that needs no retry: of a push that waits, the one before."""
        return self.last_step if self.waiting is None else self.waiting.step - 1

    def open_request(self, step: int, base_version: int | None, now: float) -> None:
        """Accept a pull (step 0) or a push that is to be answered."""
        self.request, self.requested_at = OpenRequest(step, base_version), now

    def take_request(self, run_is_over: bool) -> OpenRequest | None:
        """Close the request and return it, if it may be answered now; at the end it always may."""
        if not (self.may_proceed or run_is_over):
            return None
        request, self.request = self.request, None
        return request

    def is_late(self, push: events.Push) -> bool:
        """Return whether a push arrives after a later request: nobody waits for its reply.

        A worker has one request at a time, so a stream brought it that was given up for another.
        """
        if self.request is None or push.is_copy:
            return False
        return push.step <= self.last_step and push.step != self.request.step

    def buffer(self, push: events.Push) -> None:
        """COMPUTING -> BUFFERED: accept a push, whose request waits for its round."""
        self.buffered, self.may_proceed, self.last_step = push, False, push.step

    def promote(self) -> None:
        """BUFFERED -> SUBMITTED; it takes the place of one that the worker has given up."""
        if self.buffered is not None:
            self.submitted, self.buffered = [self.buffered], None

    def take_submitted(self, step: int) -> events.Push | None:
        """SUBMITTED -> COMPUTING: return the push of this step, whose round is complete."""
        found = next((push for push in self.submitted if push.step == step), None)
        self.submitted = [push for push in self.submitted if push is not found]
        return found

    def cancel_push(self) -> None:
        """Any phase -> COMPUTING: forget a push that waits, so that its retry counts."""
        self.last_step = self.applied_step
        self.drop_push()

    def drop_push(self) -> None:
        """Any phase -> COMPUTING: forget a push that waits, and whose retry must not count."""
        self.buffered, self.submitted = None, []

    def replied(self, version: int, overlaps: bool) -> None:
        """Note the version that is being sent.

        Args:
            version: Of the reply.
            overlaps: The worker's next push may be computed at the version before.
        """
        self.oldest_base = self.base_version if overlaps else version
        self.base_version = version


class MemberTable:
    """All workers that have been here, by id."""

    def __init__(self) -> None:
        """Start empty."""
        self._members: dict[int, Member] = {}
        self._buffered: set[int] = set()  # workers with a buffered push
        self._oldest_base = 0
        self._oldest_base_at: int | None = None  # the version at which it was searched

    def __getitem__(self, worker: int) -> Member:
        """Return a worker that has been here."""
        return self._members[worker]

    def __contains__(self, worker: int) -> bool:
        """Return whether a worker has been here."""
        return worker in self._members

    def __iter__(self) -> Iterator[int]:
        """Go through the ids, in order of the first Hello."""
        return iter(self._members)

    def get(self, worker: int) -> Member | None:
        """Return a worker; None if it has never been here."""
        return self._members.get(worker)

    def add(self, worker: int) -> Member:
        """Return a worker, opening its entry if need be."""
        return self._members.setdefault(worker, Member())

    def incarnation_of(self, worker: int) -> int:
        """Return which incarnation sent Hello last; 0 if none has."""
        member = self._members.get(worker)
        return 0 if member is None else member.incarnation

    def last_steps(self) -> dict[int, int]:
        """Return worker -> newest step accepted."""
        return {worker: member.last_step for worker, member in self._members.items()}

    # -- pushes -----------------------------------------------------------------------------

    def buffer(self, push: events.Push) -> None:
        """Accept a push; it waits until its worker is live here and its epoch is known."""
        self._members[push.worker].buffer(push)
        self._buffered.add(push.worker)

    def buffered(self) -> list[tuple[int, events.Push]]:
        """Return (worker, push) of the buffered pushes, by worker."""
        found = ((worker, self._members[worker].buffered) for worker in sorted(self._buffered))
        return [(worker, push) for worker, push in found if push is not None]

    def promote(self, worker: int) -> None:
        """Let a buffered push wait for its round."""
        self._members[worker].promote()
        self._buffered.discard(worker)

    def cancel_push(self, worker: int) -> None:
        """Forget a worker's push that waits, so that its retry counts."""
        self._members[worker].cancel_push()
        self._buffered.discard(worker)

    def drop_push(self, worker: int) -> None:
        """Forget a worker's push that waits; its step stays accepted."""
        self._members[worker].drop_push()
        self._buffered.discard(worker)

    def take_submitted(self, arrivals: Iterable[ArrivalToken]) -> list[events.Push]:
        """Return the pushes of a complete round; nothing for those that are gone."""
        found = (self._members[each.worker].take_submitted(each.step) for each in arrivals)
        return [push for push in found if push is not None]

    # -- requests ---------------------------------------------------------------------------

    def requesting(self) -> list[int]:
        """Return the workers with an open request."""
        return [worker for worker, member in self._members.items() if member.request]

    def idle(self) -> list[int]:
        """Return the workers with an open request and no push that waits for its round."""
        return [worker for worker in self.requesting() if not self._members[worker].submitted]

    def oldest_base(self, live: Collection[int], version: int) -> int:
        """Return a version that no live worker's next push is older than.

        With many workers the last one found serves for a while: it is too old, never too new.
        """
        found_at = self._oldest_base_at
        if found_at is None or version - found_at >= len(live) // 16:
            bases = (self._members[each].oldest_base for each in live)
            self._oldest_base, self._oldest_base_at = min(bases, default=version), version
        return self._oldest_base

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return applied steps and base versions, which outlive a restart, or everything."""
        if soft:
            return {
                "members": dict(self._members),
                "buffered": set(self._buffered),
                "oldest_base": self._oldest_base,
                "oldest_base_at": self._oldest_base_at,
            }
        return {
            "steps": {str(worker): m.applied_step for worker, m in self._members.items()},
            "bases": {str(worker): m.base_version for worker, m in self._members.items()},
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        if soft:
            self._members, self._buffered = dict(state["members"]), set(state["buffered"])
            self._oldest_base = state["oldest_base"]
            self._oldest_base_at = state["oldest_base_at"]
            return
        for worker, step in state["steps"].items():
            member = self.add(int(worker))
            member.last_step = step
            member.base_version = member.oldest_base = state["bases"][worker]
