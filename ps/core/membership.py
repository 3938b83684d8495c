"""Who takes part in a run: leases on shard 0, numbered epochs on the shards that follow it.

A shard's core owns one of them, as a `Membership`, and does not know which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Protocol

from thinwire.ops.types import State
from thinwire.ps.core.events import (
    Join,
    MembershipEpoch,
    ProcessStalled,
    WorkerAlive,
    WorkerDisconnected,
    WorkerIncarnation,
)
from thinwire.runtime.failure_detector import RtoEstimator

#: A change of membership: ("join" | "leave", worker).
Change = tuple[str, int]
#: A lease that never ends.
NEVER_SECONDS = 1e18
#: Epoch numbers reserved for the time between two restarts of shard 0.
EPOCHS_PER_GENERATION = 1 << 16
#: A worker is suspected by its own rhythm, but not before this share of a lease was silent.
_LEAST_SILENCE = 1 / 3


@dataclasses.dataclass(frozen=True)
class IdHolder:
    """The worker that keeps another one from joining under its id."""

    peer: str
    silent_seconds: float = 0.0
    retry_after_seconds: float = 0.0  # above 0: after as much more silence the id is free


class Membership(Protocol):
    """Who takes part, as a shard's core needs to know it.

    Attributes:
        leads: Whether this is shard 0's, which decides.
        epoch: Number of the newest change.
        num_left: Workers whose lease ran out.
        num_returned: Workers that joined again.
        lease_seconds: Silence after which a worker is out.
    """

    leads: bool
    epoch: int
    num_left: int
    num_returned: int
    lease_seconds: float

    def holder(self, join: Join, now: float) -> IdHolder | None:
        """Return who keeps this worker from joining, if anybody."""

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Admit a worker that `holder` does not forbid."""

    def seen(self, worker: int, now: float) -> None:
        """Note that something arrived from a worker."""

    def observe(self, event: WorkerAlive | WorkerDisconnected | ProcessStalled, now: float) -> None:
        """Note a sign of life, a broken stream, or that everybody's silence is excused."""

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """End a membership, at the worker's own wish or the core's."""

    def expire(self, now: float) -> Iterator[Change]:
        """End the memberships whose lease has run out."""

    def expel(self, member: WorkerIncarnation) -> Iterator[Change]:
        """End the membership of a worker that was silent on another shard for a whole lease."""

    def unreachable(self, now: float) -> list[WorkerIncarnation]:
        """Return live workers that shard 0 must be notified of, for they are silent here."""

    def follow(self, epoch: MembershipEpoch, now: float) -> Iterator[Change]:
        """Become what shard 0 announces."""

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether messages of this incarnation of the worker are accepted."""

    def next_deadline(self) -> float | None:
        """Return when `expire` or `unreachable` is due, if ever."""

    def state_of(self, worker: int) -> str:
        """Return "live", "suspect" or "left"."""

    def incarnation_of(self, worker: int) -> int:
        """Return which incarnation of a worker is live; 0 if none, or not known."""

    def begin_epoch(self) -> int:
        """Begin another epoch with the same members; return its number."""

    def state_dict(self, soft: bool) -> State:
        """Return the state that outlives a restart, or (`soft`) the rest."""

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave; the soft state after the other."""


@dataclasses.dataclass
class Lease:
    """The membership of one live worker on shard 0."""

    incarnation: int
    peer: str
    last_seen: float
    connected: bool = True
    suspected: bool = False  # silent for longer than it usually is
    arrivals: RtoEstimator = dataclasses.field(
        default_factory=lambda: RtoEstimator(NEVER_SECONDS, NEVER_SECONDS)
    )

    @property
    def suspect_at(self) -> float:
        """When its silence becomes suspicious."""
        return self.last_seen + self.arrivals.timeout_seconds


class Coordinator:
    """Shard 0: leases, and the numbering of epochs."""

    leads = True

    def __init__(self, nb_workers: int, lease_seconds: float) -> None:
        """Start empty.

        Args:
            nb_workers: Ids 1..nb_workers are legal.
            lease_seconds: Silence after which a worker is out.
        """
        self.nb_workers = nb_workers
        self.lease_seconds = lease_seconds
        self.leases: dict[int, Lease] = {}
        self.epoch = 0
        self.num_left = 0
        self.num_returned = 0
        self._known: set[int] = set()
        self._first_end = math.inf  # nothing is due before: leases only grow longer

    def holder(self, join: Join, now: float) -> IdHolder | None:
        """Return who keeps this worker from joining, if anybody.

        A worker whose stream broke gives up its id immediately; one that is silent keeps it until
        its lease ends, for it may be behind a network that is cut.
        """
        lease = self.leases.get(join.worker)
        is_holder = lease is not None and join.reconnects and lease.incarnation == join.incarnation
        if lease is None or is_holder or not lease.connected:
            return None
        silent = max(0.0, now - lease.last_seen)
        left = self.lease_seconds - silent if now >= lease.suspect_at else 0.0
        return IdHolder(lease.peer, silent, max(0.0, left))

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Admit a worker that `holder` does not forbid."""
        lease = self.leases.get(join.worker)
        if lease is not None and lease.incarnation != join.incarnation:
            yield from self._remove(join.worker)
            lease = None
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
        """Renew a lease."""
        lease = self.leases.get(worker)
        if lease is not None:
            lease.last_seen = now
            lease.arrivals.record_arrival(now)
            if lease.suspected:
                lease.suspected = False
                self._look_at(lease.suspect_at)

    def observe(self, event: WorkerAlive | WorkerDisconnected | ProcessStalled, now: float) -> None:
        """Renew a lease, suspect a worker whose stream broke, or excuse everybody's silence."""
        if isinstance(event, ProcessStalled):  # nothing could arrive
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
        elif known.incarnation == event.incarnation:
            known.connected = False

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """End a membership, at the worker's own wish or the core's."""
        lease = self.leases.get(worker)
        if lease is not None and lease.incarnation == incarnation:
            yield from self._remove(worker)

    def expire(self, now: float) -> Iterator[Change]:
        """Remove workers whose lease has run out; suspect those who are silent."""
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
        """Remove a worker that was silent on another shard for a whole lease."""
        if self.admits(member.worker, member.incarnation):
            self.num_left += 1
            yield from self._remove(member.worker)

    def unreachable(self, now: float) -> list[WorkerIncarnation]:
        """Return nobody: a worker that is silent here is removed here."""
        del now
        return []

    def follow(self, epoch: MembershipEpoch, now: float) -> Iterator[Change]:
        """Shard 0 follows nobody."""
        del epoch, now
        yield from ()

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether this incarnation of the worker is a member."""
        lease = self.leases.get(worker)
        return lease is not None and lease.incarnation == incarnation

    def next_deadline(self) -> float | None:
        """Return when to look at leases again: never later than the first one ends."""
        return self._first_end if self.leases else None

    def state_of(self, worker: int) -> str:
        """Return "live", "suspect" or "left"."""
        lease = self.leases.get(worker)
        if lease is None:
            return "left"
        return "live" if lease.connected and not lease.suspected else "suspect"

    def incarnation_of(self, worker: int) -> int:
        """Return which incarnation of a worker is live; 0 if none."""
        lease = self.leases.get(worker)
        return lease.incarnation if lease is not None else 0

    def begin_epoch(self) -> int:
        """Begin another epoch with the same members; return its number."""
        self.epoch += 1
        return self.epoch

    def state_dict(self, soft: bool) -> State:
        """Return numbers and known ids, which outlive a restart, or the leases."""
        if soft:
            return {
                "epoch": self.epoch,
                "leases": dict(self.leases),
                "first_end": self._first_end,
            }
        return {
            "epoch": self.epoch,
            "left": self.num_left,
            "returned": self.num_returned,
            "known": sorted(self._known),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave; without the soft state everybody must join again."""
        if soft:
            self.epoch, self.leases = state["epoch"], dict(state["leases"])
            self._first_end = state["first_end"]
            return
        # Shards that outlived this one may know later epochs: number on beyond them.
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
    """The incarnation of a worker that sent its Hello here last."""

    incarnation: int
    epoch: int  # of shard 0's Welcome to it; 0: not known
    peer: str


class FollowerMembership:
    """Shard 1..: shard 0's newest epoch decides who takes part.

    It keeps no leases, but reports live workers to shard 0 that were silent here for as long as
    one: a worker that reaches shard 0 alone would otherwise hold up everybody who waits here.
    """

    leads = False

    def __init__(self, nb_workers: int, lease_seconds: float = NEVER_SECONDS) -> None:
        """Start with nobody.

        Args:
            nb_workers: Ids 1..nb_workers are legal.
            lease_seconds: Silence after which shard 0 is notified.
        """
        self.nb_workers, self.lease_seconds = nb_workers, lease_seconds
        self.epoch = 0
        self.num_left = 0
        self.num_returned = 0
        self._live: tuple[int, ...] = ()
        self._named: dict[int, int] = {}  # live worker -> incarnation that the epoch names
        self._claims: dict[int, IncarnationClaim] = {}
        self._last_seen: dict[int, float] = {}  # live worker -> when, or when it was reported

    def holder(self, join: Join, now: float) -> IdHolder | None:
        """Return who holds the id: an incarnation that shard 0 has admitted after this one."""
        del now
        named = self._named.get(join.worker, join.incarnation)
        if named == join.incarnation or not 0 < join.epoch <= self.epoch:
            return None
        claim = self._claims.get(join.worker)
        known = claim is not None and claim.incarnation == named
        return IdHolder(claim.peer if claim is not None and known else "another address")

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Remember the incarnation; membership itself comes by epoch."""
        self._claims[join.worker] = IncarnationClaim(join.incarnation, join.epoch, join.peer)
        self.seen(join.worker, now)
        yield from ()

    def seen(self, worker: int, now: float) -> None:
        """Note that something arrived from a worker."""
        if worker in self._last_seen:
            self._last_seen[worker] = now

    def observe(self, event: WorkerAlive | WorkerDisconnected | ProcessStalled, now: float) -> None:
        """Note a sign of life, or excuse everybody's silence."""
        if isinstance(event, WorkerAlive):
            self.seen(event.worker, now)
        elif isinstance(event, ProcessStalled):  # nothing could arrive
            for worker, when in self._last_seen.items():
                self._last_seen[worker] = min(now, when + event.seconds)

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """Do nothing: shard 0 will announce an epoch."""
        del worker, incarnation
        yield from ()

    def expire(self, now: float) -> Iterator[Change]:
        """Do nothing: leases are shard 0's."""
        del now
        yield from ()

    def expel(self, member: WorkerIncarnation) -> Iterator[Change]:
        """Do nothing: workers that are silent elsewhere are shard 0's concern."""
        del member
        yield from ()

    def unreachable(self, now: float) -> list[WorkerIncarnation]:
        """Return live workers that were silent here for a lease; each again after another one."""
        gone = [w for w, when in self._last_seen.items() if now - when >= self.lease_seconds]
        for worker in gone:
            self._last_seen[worker] = now
        return [WorkerIncarnation(worker, self.incarnation_of(worker)) for worker in gone]

    def follow(self, epoch: MembershipEpoch, now: float) -> Iterator[Change]:
        """Become what a newer epoch announces.

        A worker of another incarnation leaves and joins: what the old one had sent is void.
        """
        if epoch.number <= self.epoch:
            return
        named = dict(zip(epoch.live, epoch.incarnations, strict=False))
        before, after = set(self._live), set(epoch.live)
        other = {worker for worker in after if self._is_another(worker, named.get(worker, 0))}
        gone = [*(each for each in self._live if each not in after), *sorted(other)]
        new = [worker for worker in epoch.live if worker not in before or worker in other]
        self.epoch, self._live = epoch.number, epoch.live
        self._named = {worker: each for worker, each in named.items() if each}
        self._last_seen = {w: now if w in new else self._last_seen.get(w, now) for w in epoch.live}
        yield from (("leave", worker) for worker in gone)
        yield from (("join", worker) for worker in new)

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether messages of this incarnation of the worker are accepted here.

        It has sent its Hello, and shard 0 names no other, unless it knows a newer epoch than this
        shard.
        """
        claim = self._claims.get(worker)
        if claim is None or claim.incarnation != incarnation:
            return False
        named = self._named.get(worker, incarnation)
        return named == incarnation or not 0 < claim.epoch <= self.epoch

    def next_deadline(self) -> float | None:
        """Return when a worker's silence is to be reported: never later than the first is due."""
        return (
            min(self._last_seen.values(), default=0.0) + self.lease_seconds
            if self._last_seen
            else None
        )

    def incarnation_of(self, worker: int) -> int:
        """Return which incarnation of a worker is live; 0 where that is not known."""
        return self._named.get(worker, 0)

    def state_of(self, worker: int) -> str:
        """Return "live" or "left"."""
        return "live" if worker in self._live else "left"

    def begin_epoch(self) -> int:
        """Epochs are shard 0's to begin; return the one there is."""
        return self.epoch

    def state_dict(self, soft: bool) -> State:
        """Return the epoch's number, or the epoch, which does not outlive a restart."""
        if not soft:
            return {"epoch": self.epoch}
        return {
            "epoch": self.epoch,
            "live": self._live,
            "named": dict(self._named),
            "claims": dict(self._claims),
            "last_seen": dict(self._last_seen),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back the soft state; without it, wait for shard 0, whose numbering goes on."""
        if soft:
            self.epoch, self._live = state["epoch"], state["live"]
            self._named, self._claims = dict(state["named"]), dict(state["claims"])
            self._last_seen = dict(state["last_seen"])

    def _is_another(self, worker: int, incarnation: int) -> bool:
        """Return whether a worker is known here by another incarnation than this one."""
        claim = self._claims.get(worker)
        if not incarnation:
            return False
        if worker in self._live:
            return self._named.get(worker, incarnation) != incarnation
        return claim is not None and claim.incarnation != incarnation
