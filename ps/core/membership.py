"""Membership of a run's workers: leases on shard 0, and numbered epochs on all other shards.

The state machine of shard 0 uses a `Coordinator`, and the state machine of each other shard a
`FollowerMembership`, which has the same methods.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from thinwire.ops.types import State
from thinwire.ps.core import attributes
from thinwire.ps.core.events import (
    Join,
    MembershipEpoch,
    ProcessStalled,
    WorkerAlive,
    WorkerDisconnected,
    WorkerIncarnation,
)
from thinwire.runtime.failure_detector import RtoEstimator

#: A change of the run's membership: ("join" | "leave", worker id).
Change = tuple[str, int]
#: Length in seconds of a worker's lease that never ends.
NEVER_SECONDS = 1e18
#: Number of epoch numbers that shard 0 skips at each restart. A restored snapshot may be older than
#: the membership epochs that the other shards have received. The number is an upper bound of the
#: number of epochs after one snapshot.
EPOCHS_PER_GENERATION = 1 << 16
#: Shortest silence after which a worker is suspected, as a share of its lease. A worker is
#: suspected after a silence that is unusually long for this worker.
_LEAST_SILENCE = 1 / 3


#: Attributes of a `FollowerMembership` that only a journal keeps.
_SOFT = ("epoch", "_live", "_named", "_claims", "_last_seen")


@dataclasses.dataclass(frozen=True)
class IdHolder:
    """A live worker whose id a second process also uses in its Hello message."""

    peer: str  # network address of the live worker that uses the id
    silent_seconds: float = 0.0
    # Time in seconds until the lease of a silent worker with the id ends; 0 if the other process
    # must not retry.
    retry_after_seconds: float = 0.0


@dataclasses.dataclass
class Lease:
    """The lease (time-limited membership) of one live worker on shard 0."""

    incarnation: int
    peer: str
    last_seen: float
    connected: bool = True
    suspected: bool = False  # True if the worker is silent for longer than usual
    arrivals: RtoEstimator = dataclasses.field(
        default_factory=lambda: RtoEstimator(NEVER_SECONDS, NEVER_SECONDS)
    )

    @property
    def suspect_at(self) -> float:
        """Time at which the worker becomes suspect if it stays silent."""
        return self.last_seen + self.arrivals.timeout_seconds


class Coordinator:
    """Membership on shard 0: leases of the workers, and the numbering of membership epochs."""

    leads = True

    def __init__(self, nb_workers: int, lease_seconds: float) -> None:
        """Start a run's membership without any worker.

        Args:
            nb_workers: Number of workers in the run; their ids are 1..nb_workers.
            lease_seconds: Time in seconds without a message of a worker, after which the worker is
                expelled.
        """
        self.nb_workers = nb_workers
        self.lease_seconds = lease_seconds
        self.leases: dict[int, Lease] = {}
        self.epoch = 0
        self.num_left = 0
        self.num_returned = 0
        self._known: set[int] = set()
        # Time at which `expire` next scans the workers' leases, at most the earliest end of a
        # lease. A message only postpones the end of its worker's lease, so `expire` need not scan
        # all leases at every event.
        self._first_end = math.inf

    def holder(self, join: Join, now: float) -> IdHolder | None:
        """Return the live worker that holds a joining worker's id; None if the id is free.

        A worker whose gRPC stream broke frees its worker id immediately. A silent worker holds its
        id until its lease ends, because its network may be interrupted.
        """
        lease = self.leases.get(join.worker)
        is_holder = lease is not None and join.reconnects and lease.incarnation == join.incarnation
        if lease is None or is_holder or not lease.connected:
            return None
        silent = max(0.0, now - lease.last_seen)
        remaining = self.lease_seconds - silent if now >= lease.suspect_at else 0.0
        return IdHolder(lease.peer, silent, max(0.0, remaining))

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Admit a joining worker to the run; `holder` must have returned None for the worker's
        Hello.
        """
        lease = self.leases.get(join.worker)
        if lease is not None and lease.incarnation != join.incarnation:
            # If a new process takes over a worker's id, announce two epochs: one without the
            # worker, then one with its new process. A following shard then drops every push that
            # the old process has sent.
            yield from self._remove(join.worker)
            lease = None
        # A process that is already a member reconnects, so the membership does not change.
        if lease is not None:
            lease.peer, lease.connected = join.peer, True
            self.seen(join.worker, now)
            return
        arrivals = RtoEstimator(_LEAST_SILENCE * self.lease_seconds, self.lease_seconds, now)
        self.leases[join.worker] = Lease(join.incarnation, join.peer, now, arrivals=arrivals)
        self._look_at(now + arrivals.timeout_seconds)
        self.num_returned += join.worker in self._known
        self._known.add(join.worker)
        self.epoch += 1
        yield ("join", join.worker)

    def seen(self, worker: int, now: float) -> None:
        """Renew the lease of a worker whose message arrived."""
        lease = self.leases.get(worker)
        if lease is not None:
            lease.last_seen = now
            lease.arrivals.record_arrival(now)
            if lease.suspected:
                # The next scan of the leases was set to the end of this suspected worker's lease,
                # but the worker may become suspected again before that time.
                lease.suspected = False
                self._look_at(lease.suspect_at)

    def observe(self, event: WorkerAlive | WorkerDisconnected | ProcessStalled, now: float) -> None:
        """Renew a worker's lease, mark its gRPC stream as broken, or extend all leases after a
        pause.
        """
        if isinstance(event, ProcessStalled):
            # A stopped shard process receives no messages. If the leases were not extended by the
            # duration of the stop, they would seem to have expired, and the shard would expel every
            # worker.
            for lease in self.leases.values():
                lease.last_seen = min(now, lease.last_seen + event.seconds)
                lease.arrivals.excuse(event.seconds, now)
            return
        known = self.leases.get(event.worker)
        if known is None:
            return
        if isinstance(event, WorkerAlive):
            self.seen(event.worker, now)
            known.arrivals.record_beat(now)
        # Otherwise the stream of an earlier process of the worker broke.
        elif known.incarnation == event.incarnation:
            known.connected = False

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """End a worker's membership in the run, as the worker leaves or the shard removes it."""
        lease = self.leases.get(worker)
        if lease is not None and lease.incarnation == incarnation:
            yield from self._remove(worker)

    def expire(self, now: float) -> Iterator[Change]:
        """Remove workers whose lease has expired; mark unusually silent workers as suspected."""
        if now < self._first_end:
            return
        ends = {
            worker: lease.last_seen + self.lease_seconds for worker, lease in self.leases.items()
        }
        self._first_end = math.inf
        for worker, lease in self.leases.items():
            lease.suspected = now >= min(lease.suspect_at, ends[worker])
            self._look_at(ends[worker] if lease.suspected else lease.suspect_at)
        overdue = [worker for worker, end in ends.items() if end <= now]
        for worker in overdue:
            self.num_left += 1
            yield from self._remove(worker)

    def expel(self, member: WorkerIncarnation) -> Iterator[Change]:
        """Remove a worker that another shard reports as silent for a whole lease."""
        if self.admits(member.worker, member.incarnation):
            self.num_left += 1
            yield from self._remove(member.worker)

    def unreachable(self, now: float) -> list[WorkerIncarnation]:
        """Return no worker to report: shard 0 removes a silent worker itself, in `expire`."""
        return []

    def follow(self, epoch: MembershipEpoch, now: float) -> Iterator[Change]:
        """Do nothing: shard 0 decides about the membership itself and follows no other shard."""
        yield from ()

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether this incarnation (process) of a worker is a member of the run."""
        lease = self.leases.get(worker)
        return lease is not None and lease.incarnation == incarnation

    def next_deadline(self) -> float | None:
        """Return the time of the next scan of the leases, at most the earliest end of a lease."""
        return self._first_end if self.leases else None

    def state_of(self, worker: int) -> str:
        """Return the state of a worker's membership: "live", "suspect" or "left"."""
        lease = self.leases.get(worker)
        if lease is None:
            return "left"
        return "live" if lease.connected and not lease.suspected else "suspect"

    def incarnation_of(self, worker: int) -> int:
        """Return the incarnation (process number) of a live worker; 0 if the worker is not live."""
        lease = self.leases.get(worker)
        return lease.incarnation if lease is not None else 0

    def begin_epoch(self) -> int:
        """Begin a new membership epoch with unchanged live workers; return the number of the new
        epoch.
        """
        self.epoch += 1
        return self.epoch

    def state_dict(self, soft: bool) -> State:
        """Return membership epoch, counters and known worker ids; if `soft`, the epoch and the
        leases.
        """
        if soft:
            return attributes.saved(self, ("epoch", "leases", "_first_end"))
        return {
            "epoch": self.epoch,
            "left": self.num_left,
            "returned": self.num_returned,
            "known": sorted(self._known),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the saved membership of workers; without saved leases, all workers must join
        again.
        """
        if soft:
            attributes.restore(self, ("epoch", "leases", "_first_end"), state)
            return
        # The other shards may know later membership epochs than the snapshot, and they ignore an
        # epoch that is not newer than their own. The numbers must therefore continue above all
        # epochs ever announced.
        self.epoch = state["epoch"] + EPOCHS_PER_GENERATION
        self.num_left, self.num_returned = state["left"], state["returned"]
        self._known = set(state["known"])

    def _look_at(self, when: float) -> None:
        self._first_end = min(self._first_end, when)

    def _remove(self, worker: int) -> Iterator[Change]:
        del self.leases[worker]
        self.epoch += 1
        yield ("leave", worker)


@dataclasses.dataclass
class IncarnationClaim:
    """The newest Hello of a worker on a following shard (a shard other than shard 0)."""

    incarnation: int
    epoch: int  # membership epoch in shard 0's Welcome to the worker's process; 0 if unknown
    peer: str  # network address of the worker


class FollowerMembership:
    """Membership on shards with id 1 or higher: the members are the workers of shard 0's newest
    membership epoch.

    A following shard (a shard other than shard 0) has no leases. A shard other than 0 reports to
    shard 0 the live workers that were silent for the length of a lease. Without the reports of
    silent workers, a worker that reaches only shard 0 would block all rounds on the other shards.
    """

    leads = False

    def __init__(self, nb_workers: int, lease_seconds: float = NEVER_SECONDS) -> None:
        """Start a run's membership without any worker.

        Args:
            nb_workers: Number of workers in the run; their ids are 1..nb_workers.
            lease_seconds: Time in seconds without a message of a worker, after which the shard
                reports the worker to shard 0.
        """
        self.nb_workers, self.lease_seconds = nb_workers, lease_seconds
        self.epoch = 0
        self.num_left = 0
        self.num_returned = 0
        self._live: tuple[int, ...] = ()
        # Live worker id -> the worker's incarnation in the newest membership epoch.
        self._named: dict[int, int] = {}
        self._claims: dict[int, IncarnationClaim] = {}
        # Live worker id -> time of the worker's newest message, or of the newest report that it is
        # silent.
        self._last_seen: dict[int, float] = {}

    def holder(self, join: Join, now: float) -> IdHolder | None:
        """Return the newer process that shard 0 has admitted with a joining worker's id, or
        None.
        """
        named = self._named.get(join.worker, join.incarnation)
        # If shard 0's Welcome to the joining process names a later epoch than this shard's newest
        # epoch, then shard 0 has admitted the joining process after the process that this shard's
        # epoch names. This shard has only not received the later epoch yet.
        if named == join.incarnation or not 0 < join.epoch <= self.epoch:
            return None
        claim = self._claims.get(join.worker)
        known = claim is not None and claim.incarnation == named
        return IdHolder(claim.peer if claim is not None and known else "another address")

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Record the Hello of a worker's process; only shard 0's membership epochs change the
        members.
        """
        self._claims[join.worker] = IncarnationClaim(join.incarnation, join.epoch, join.peer)
        self.seen(join.worker, now)
        yield from ()

    def seen(self, worker: int, now: float) -> None:
        """Record that a message of a worker arrived on this shard at the time `now`."""
        if worker in self._last_seen:
            self._last_seen[worker] = now

    def observe(self, event: WorkerAlive | WorkerDisconnected | ProcessStalled, now: float) -> None:
        """Record a worker's heartbeat, or excuse all workers after a pause of this shard's
        process.
        """
        if isinstance(event, WorkerAlive):
            self.seen(event.worker, now)
        elif isinstance(event, ProcessStalled):  # a stopped shard process receives no messages
            for worker, when in self._last_seen.items():
                self._last_seen[worker] = min(now, when + event.seconds)

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """Do nothing: shard 0 will announce a membership epoch without the worker that left."""
        yield from ()

    def expire(self, now: float) -> Iterator[Change]:
        """Do nothing: only shard 0 has leases of workers that can expire."""
        yield from ()

    def expel(self, member: WorkerIncarnation) -> Iterator[Change]:
        """Do nothing: only shard 0 expels workers that are silent on another shard."""
        yield from ()

    def unreachable(self, now: float) -> list[WorkerIncarnation]:
        """Return live workers without a message to this shard for a lease, once in each lease."""
        silent = [w for w, when in self._last_seen.items() if now - when >= self.lease_seconds]
        for worker in silent:
            self._last_seen[worker] = now
        return [WorkerIncarnation(worker, self.incarnation_of(worker)) for worker in silent]

    def follow(self, epoch: MembershipEpoch, now: float) -> Iterator[Change]:
        """Adopt the live workers that a newer membership epoch of shard 0 announces."""
        # The membership epoch was sent again or arrived out of order.
        if epoch.number <= self.epoch:
            return
        named = dict(zip(epoch.live, epoch.incarnations, strict=False))
        before, after = set(self._live), set(epoch.live)
        # A worker with a new process leaves and joins again, so that the core drops the request and
        # all pushes of the old process.
        replaced = {worker for worker in after if self._is_another(worker, named.get(worker, 0))}
        leaving = [*(worker for worker in self._live if worker not in after), *sorted(replaced)]
        new = [worker for worker in epoch.live if worker not in before or worker in replaced]
        self.epoch, self._live = epoch.number, epoch.live
        self._named = {worker: incarnation for worker, incarnation in named.items() if incarnation}
        self._last_seen = {w: now if w in new else self._last_seen.get(w, now) for w in epoch.live}
        yield from (("leave", worker) for worker in leaving)
        yield from (("join", worker) for worker in new)

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether the shard accepts messages of this incarnation (process) of a worker.

        An admitted process of a worker has sent its Hello, and shard 0's newest membership epoch
        names no other process of the worker. The shard ignores its own membership epoch if the
        worker's Hello names a newer membership epoch.
        """
        claim = self._claims.get(worker)
        if claim is None or claim.incarnation != incarnation:
            return False
        named = self._named.get(worker, incarnation)
        return named == incarnation or not 0 < claim.epoch <= self.epoch

    def next_deadline(self) -> float | None:
        """Return the time at which a silent worker must be reported to shard 0; None if never."""
        return (
            min(self._last_seen.values(), default=0.0) + self.lease_seconds
            if self._last_seen
            else None
        )

    def incarnation_of(self, worker: int) -> int:
        """Return the incarnation (process number) of a live worker; 0 if the number is not
        known.
        """
        return self._named.get(worker, 0)

    def state_of(self, worker: int) -> str:
        """Return the state of a worker's membership: "live" or "left"."""
        return "live" if worker in self._live else "left"

    def begin_epoch(self) -> int:
        """Return the number of the present membership epoch: only shard 0 begins epochs."""
        return self.epoch

    def state_dict(self, soft: bool) -> State:
        """Return the number of the membership epoch; if `soft`, also the live workers and their
        Hellos.
        """
        if not soft:
            return {"epoch": self.epoch}
        return attributes.saved(self, _SOFT)

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the live workers; if none are saved, no worker is live until shard 0's next
        epoch.
        """
        # The saved epoch number is not restored, because shard 0 announces its present epoch again,
        # and `follow` must accept this epoch although its number may equal the saved number.
        if soft:
            attributes.restore(self, _SOFT, state)

    def _is_another(self, worker: int, incarnation: int) -> bool:
        """Return whether this shard knows a process of the worker with a different incarnation."""
        claim = self._claims.get(worker)
        if not incarnation:
            return False
        if worker in self._live:
            return self._named.get(worker, incarnation) != incarnation
        return claim is not None and claim.incarnation != incarnation


#: The workers that are members of a training run, as one parameter server shard knows them.
Membership = Coordinator | FollowerMembership
