"""Settings of a PS shard's state machine, and its record of each worker: pushes, requests,
versions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.sync.base import ArrivalToken
from thinwire.ops.types import ModelSpec, State
from thinwire.ps.core import attributes, events

#: Attributes of a `MemberTable` that only a journal keeps.
_SOFT = ("_members", "_buffered", "_oldest_base", "_oldest_base_at")


@dataclasses.dataclass(frozen=True)
class CoreConfig:
    """Settings of a parameter server shard, except the training method's policies."""

    budget: Budget
    schedule: Schedule
    nb_workers: int
    generation: int = 0  # number of restarts of the shard
    # Number of earlier generations (restarts) that may have lost updates.
    generations_undone: int = 1
    # Time limit of the run in seconds, from the first pull; None without a limit.
    max_seconds: float | None = None
    # Time in seconds from the first Hello after which a synchronous run starts with the joined
    # workers.
    start_timeout_seconds: float = 600.0
    snapshot_interval_seconds: float = 10.0
    # Slices of variables that the shard holds; None if the shard is one slice.
    spec: ModelSpec | None = None
    guards: Guards = dataclasses.field(default_factory=Guards)
    # Dynamic loss scale of the training script; None if losses are not scaled.
    loss_scale: LossScale | None = None
    # For each optimizer of a script: number of batches that its learning rate schedule had counted
    # before this phase (model) of the script.
    first_batches: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OpenRequest:
    """A worker's pull or push request that the shard has not answered yet."""

    step: int  # step number of the worker's push; 0 if the request is a pull
    # Version of the worker's weights; None if the reply must send all weights.
    base_version: int | None


@dataclasses.dataclass
class Member:
    """The record that a PS shard has of one worker, live or not."""

    incarnation: int = 0
    # Newest step of the worker that was accepted; the step's push may still wait for its round.
    last_step: int = 0
    base_version: int = 0  # version of the weights in the newest reply to the worker
    oldest_base: int = 0  # oldest version at which the worker's next push may have been computed
    push_bytes: int = 0  # coded size of the worker's newest push, in bytes
    # Push that arrived before its worker was live or its epoch was known.
    buffered: events.Push | None = None
    # Pushes of the worker that wait until their rounds are complete.
    submitted: list[events.Push] = dataclasses.field(default_factory=list)
    # Unanswered request of the worker; None if the worker awaits no reply.
    request: OpenRequest | None = None
    may_proceed: bool = False  # True if the shard may answer the worker's open request
    # Time of the shard's clock at which the worker's newest request arrived.
    requested_at: float = 0.0
    staleness: int = 0  # staleness of the worker's newest applied push, in versions

    @property
    def waiting(self) -> events.Push | None:
        """Oldest push of the worker that is accepted but not applied yet; None if no push waits."""
        return self.submitted[0] if self.submitted else self.buffered

    @property
    def applied_step(self) -> int:
        """Newest training step of the worker such that no push up to this step waits or needs a
        retry.
        """
        return self.last_step if self.waiting is None else self.waiting.head.step - 1

    def open_request(self, step: int, base_version: int | None, now: float) -> None:
        """Record a worker's pull (step 0) or push that awaits the shard's reply."""
        self.request, self.requested_at = OpenRequest(step, base_version), now

    def take_request(self, run_is_over: bool) -> OpenRequest | None:
        """Return and clear the worker's open request; None if the shard must not answer the worker
        yet.
        """
        if not (self.may_proceed or run_is_over):
            return None
        request, self.request = self.request, None
        return request

    def is_late(self, push: events.Push) -> bool:
        """Return whether a push is late: the worker has replaced the push by a later request.

        A worker has at most one open request (unanswered pull or push) on a shard. A late push
        arrives on a gRPC stream that the worker has given up, and the worker does not wait for a
        reply to the late push.
        """
        if self.request is None or push.is_copy:
            return False
        # A reply to a late push would close the worker's open request with the number of the old
        # step. The worker would discard the reply and then wait for ever.
        return push.head.step <= self.last_step and push.head.step != self.request.step

    def take_submitted(self, step: int) -> events.Push | None:
        """Remove and return a worker's push whose round is complete."""
        released = next((push for push in self.submitted if push.head.step == step), None)
        self.submitted = [push for push in self.submitted if push is not released]
        return released

    def replied(self, version: int, overlaps: bool) -> None:
        """Record the version of the model in a reply to the worker.

        Args:
            version: Version of the model in the reply to the worker.
            overlaps: True if the worker computes during the exchange (--overlap). The worker's next
                push may then be computed at the version of the previous reply.
        """
        self.oldest_base = self.base_version if overlaps else version
        self.base_version = version


class MemberTable:
    """Records of all workers that have ever joined this shard, by worker id."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._buffered: set[int] = set()  # ids of the workers with a buffered push
        self._oldest_base = 0
        # Version of the model at which _oldest_base was computed.
        self._oldest_base_at: int | None = None

    def __getitem__(self, worker: int) -> Member:
        """Return the shard's record of a worker that has joined the run before."""
        return self._members[worker]

    def __contains__(self, worker: int) -> bool:
        """Return whether a worker has joined the run on this shard before."""
        return worker in self._members

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids of all recorded workers, in order of their first Hello."""
        return iter(self._members)

    def get(self, worker: int) -> Member | None:
        """Return the record of a worker; None if the worker has never joined."""
        return self._members.get(worker)

    def add(self, worker: int) -> Member:
        """Return the record of a worker; create a record if the worker is new."""
        return self._members.setdefault(worker, Member())

    def incarnation_of(self, worker: int) -> int:
        """Return the incarnation (process number) in a worker's last Hello; 0 if it has sent no
        Hello.
        """
        member = self._members.get(worker)
        return 0 if member is None else member.incarnation

    def last_steps(self) -> dict[int, int]:
        """Return worker id -> newest step that the shard accepted from the worker."""
        return {worker: member.last_step for worker, member in self._members.items()}

    # -- pushes -----------------------------------------------------------------------------

    def buffer(self, push: events.Push) -> None:
        """Accept a worker's push; it waits until the worker is live and its membership epoch is
        known.
        """
        member = self._members[push.worker]
        member.buffered, member.may_proceed, member.last_step = push, False, push.head.step
        self._buffered.add(push.worker)

    def buffered(self) -> list[tuple[int, events.Push]]:
        """Return (worker id, push) of all buffered pushes, in order of worker id."""
        pushes = ((worker, self._members[worker].buffered) for worker in sorted(self._buffered))
        return [(worker, push) for worker, push in pushes if push is not None]

    def promote(self, worker: int) -> None:
        """Submit a worker's buffered push, which now waits until its round is complete; drop the
        worker's earlier submitted pushes.
        """
        member = self._members[worker]
        if member.buffered is not None:
            member.submitted, member.buffered = [member.buffered], None
        self._buffered.discard(worker)

    def cancel_push(self, worker: int) -> None:
        """Remove a worker's push that waits; the shard accepts a retry of the push's step."""
        member = self._members[worker]
        # Read applied_step before the push is dropped: the value depends on the push that waits.
        member.last_step = member.applied_step
        self.drop_push(worker)

    def drop_push(self, worker: int) -> None:
        """Remove a worker's push that waits; the shard accepts no retry of the push's step."""
        member = self._members[worker]
        member.buffered, member.submitted = None, []
        self._buffered.discard(worker)

    def take_submitted(self, arrivals: Iterable[ArrivalToken]) -> list[events.Push]:
        """Remove and return the pushes of a complete round; skip pushes that were removed."""
        pushes = (self._members[token.worker].take_submitted(token.step) for token in arrivals)
        return [push for push in pushes if push is not None]

    # -- requests ---------------------------------------------------------------------------

    def requesting(self) -> list[int]:
        """Return the ids of the workers with an open request (an unanswered pull or push)."""
        return [worker for worker, member in self._members.items() if member.request]

    def idle(self) -> list[int]:
        """Return the ids of workers with an open request but no push that waits for its round."""
        return [worker for worker in self.requesting() if not self._members[worker].submitted]

    def oldest_base(self, live: Collection[int], version: int) -> int:
        """Return a lower bound of the version that any live worker's next push is computed at.

        With many workers, the shard does not compute the bound of the oldest version at every
        update. A bound of the oldest version from an earlier update may be too low, never too high,
        because replies only raise the version of a worker's weights.
        """
        # Computing the minimum of the versions over n live workers costs O(n). If it is computed
        # only once in n/16 updates, the cost per update is constant.
        computed_at = self._oldest_base_at
        if computed_at is None or version - computed_at >= len(live) // 16:
            bases = (self._members[worker].oldest_base for worker in live)
            self._oldest_base, self._oldest_base_at = min(bases, default=version), version
        return self._oldest_base

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return the workers' applied steps and model versions; if `soft`, the workers' whole
        records.
        """
        if soft:
            return attributes.saved(self, _SOFT)
        return {
            "steps": {str(worker): m.applied_step for worker, m in self._members.items()},
            "bases": {str(worker): m.base_version for worker, m in self._members.items()},
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the workers' records (pushes, requests, versions) that `state_dict` returned."""
        if soft:
            attributes.restore(self, _SOFT, state)
            return
        for worker, step in state["steps"].items():
            member = self.add(int(worker))
            member.last_step = step
            member.base_version = member.oldest_base = state["bases"][worker]
