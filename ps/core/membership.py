"""Who takes part: leases on shard 0, numbered epochs on the shards that follow it.

Coordinator and Follower answer the same questions, so the core does not know which shard it is.

Who takes part, on the shards that follow shard 0: what its newest epoch says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from thinwire.ops.failure_detector import RtoEstimator
from thinwire.ops.types import State
from thinwire.ps.core.events import (
    Join,
    MembershipEpoch,
    ProcessStalled,
    WorkerAlive,
    WorkerDisconnected,
    WorkerIncarnation,
)

#: A change of membership: ("join" | "leave", worker).
Change = tuple[str, int]
#: A lease that never ends.
NEVER_SECONDS = 1e18


@dataclasses.dataclass(frozen=True)
class IdHolder:
    """Who keeps a worker from joining under its id."""

    peer: str
    silent_seconds: float = 0.0
    retry_after_seconds: float = 0.0  # above 0: if it stays silent so long, the id is free


@dataclasses.dataclass
class IncarnationClaim:
    """The life of a worker that said Hello here last."""

    incarnation: int
    epoch: int  # of shard 0's Welcome to it; 0: it did not say
    peer: str


class FollowerMembership:
    """Shard 1..: membership is what shard 0's last epoch says.

    It keeps no leases, but tells shard 0 of live workers that it has not heard for as long as one:
    a worker that reaches shard 0 alone would otherwise hold up everybody who waits here.
    """

    leads = False

    def __init__(self, nb_workers: int, lease_seconds: float = NEVER_SECONDS) -> None:
        """Start with nobody.

        Args:
            nb_workers: Ids 1..nb_workers are legal.
            lease_seconds: Silence after which shard 0 hears of it.
        """
        self.nb_workers, self.lease_seconds = nb_workers, lease_seconds
        self.epoch = 0
        self.num_left = 0
        self.num_returned = 0
        self._live: tuple[int, ...] = ()
        self._named: dict[int, int] = {}  # live worker -> life that the epoch names
        self._claims: dict[int, IncarnationClaim] = {}
        self._heard: dict[int, float] = {}  # live worker -> when, or since when it is told missing

    def holder(self, join: Join, now: float) -> IdHolder | None:
        """Return who holds the id: a life that shard 0 has let in after the one that asks."""
        del now
        named = self._named.get(join.worker, join.incarnation)
        if named == join.incarnation or not 0 < join.epoch <= self.epoch:
            return None
        claim = self._claims.get(join.worker)
        known = claim is not None and claim.incarnation == named
        return IdHolder(claim.peer if claim is not None and known else "another address")

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Remember the life; membership itself comes by epoch."""
        self._claims[join.worker] = IncarnationClaim(join.incarnation, join.epoch, join.peer)
        self.heard(join.worker, now)
        yield from ()

    def heard(self, worker: int, now: float) -> None:
        """Hear a worker."""
        if worker in self._heard:
            self._heard[worker] = now

    def note(self, event: WorkerAlive | WorkerDisconnected | ProcessStalled, now: float) -> None:
        """Hear a worker, or excuse everybody's silence."""
        if isinstance(event, WorkerAlive):
            self.heard(event.worker, now)
        elif isinstance(event, ProcessStalled):  # nobody could be heard
            for worker, when in self._heard.items():
                self._heard[worker] = min(now, when + event.seconds)

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """Shard 0 will say so by epoch."""
        del worker, incarnation
        yield from ()

    def expire(self, now: float) -> Iterator[Change]:
        """Leases are shard 0's."""
        del now
        yield from ()

    def miss(self, life: WorkerIncarnation) -> Iterator[Change]:
        """Who is missed elsewhere is shard 0's concern."""
        del life
        yield from ()

    def missed(self, now: float) -> list[WorkerIncarnation]:
        """Return live workers that were silent here for a lease; each again after another one."""
        gone = [w for w, when in self._heard.items() if now - when >= self.lease_seconds]
        for worker in gone:
            self._heard[worker] = now
        return [WorkerIncarnation(worker, self.life_of(worker)) for worker in gone]

    def follow(self, epoch: MembershipEpoch, now: float) -> Iterator[Change]:
        """Become what a newer epoch says.

        A worker whose life is another one leaves and joins: what the old one had said is void.
        """
        if epoch.number <= self.epoch:
            return
        named = dict(zip(epoch.live, epoch.lives, strict=False))
        before, after = set(self._live), set(epoch.live)
        other = {worker for worker in after if self._is_another(worker, named.get(worker, 0))}
        gone = [*(each for each in self._live if each not in after), *sorted(other)]
        new = [worker for worker in epoch.live if worker not in before or worker in other]
        self.epoch, self._live = epoch.number, epoch.live
        self._named = {worker: life for worker, life in named.items() if life}
        self._heard = {w: now if w in new else self._heard.get(w, now) for w in epoch.live}
        yield from (("leave", worker) for worker in gone)
        yield from (("join", worker) for worker in new)

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether this life of the worker may speak here.

        It said Hello, and shard 0 names no other; unless it knows a newer epoch than this shard.
        """
        claim = self._claims.get(worker)
        if claim is None or claim.incarnation != incarnation:
            return False
        named = self._named.get(worker, incarnation)
        return named == incarnation or not 0 < claim.epoch <= self.epoch

    def next_deadline(self) -> float | None:
        """Return when a worker's silence is to be told: never later than the first is due."""
        return min(self._heard.values(), default=0.0) + self.lease_seconds if self._heard else None

    def life_of(self, worker: int) -> int:
        """Return which life of a worker is live; 0 where that is not known."""
        return self._named.get(worker, 0)

    def state_of(self, worker: int) -> str:
        """Return "live" or "left"."""
        return "live" if worker in self._live else "left"

    def begin_epoch(self) -> int:
        """Epochs are shard 0's to begin; return the one there is."""
        return self.epoch

    def save(self) -> State:
        """Membership is rebuilt from shard 0's next epoch."""
        return {"epoch": self.epoch}

    def restore(self, state: State) -> None:
        """Wait for shard 0 to speak; its numbering goes on across its own restarts."""
        del state

    def _is_another(self, worker: int, life: int) -> bool:
        """Return whether what is known here of a worker is of another life than this one."""
        claim = self._claims.get(worker)
        if not life:
            return False
        if worker in self._live:
            return self._named.get(worker, life) != life
        return claim is not None and claim.incarnation != life


__all__ = [
    "EPOCHS_PER_LIFE",
    "Change",
    "Coordinator",
    "FollowerMembership",
    "IdHolder",
    "Lease",
    "Membership",
]

#: Epoch numbers reserved for one life of shard 0.
EPOCHS_PER_LIFE = 1 << 16
#: A worker is suspected by its own rhythm, but not before it was silent for so much of a lease.
_LEAST_SILENCE = 1 / 3


@dataclasses.dataclass
class Lease:
    """What shard 0 knows of one live worker."""

    incarnation: int
    peer: str
    last_heard: float
    connected: bool = True
    suspected: bool = False  # silent for longer than it uses to be
    arrivals: RtoEstimator = dataclasses.field(
        default_factory=lambda: RtoEstimator(NEVER_SECONDS, NEVER_SECONDS)
    )

    @property
    def suspect_at(self) -> float:
        """When its silence becomes suspicious."""
        return self.last_heard + self.arrivals.timeout_seconds


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
        self._seen: set[int] = set()
        self._first_end = math.inf  # nothing is due before: leases only grow longer

    def holder(self, join: Join, now: float) -> IdHolder | None:
        """Return who keeps this worker from joining, if anybody.

        Who is not connected any more makes room at once; who is silent keeps its id until its lease
        ends, for it may be behind a network that is cut.
        """
        lease = self.leases.get(join.worker)
        same_life = lease is not None and join.reconnects and lease.incarnation == join.incarnation
        if lease is None or same_life or not lease.connected:
            return None
        silent = max(0.0, now - lease.last_heard)
        left = self.lease_seconds - silent if now >= lease.suspect_at else 0.0
        return IdHolder(lease.peer, silent, max(0.0, left))

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Take in a worker that `holder` does not forbid."""
        lease = self.leases.get(join.worker)
        if lease is not None and lease.incarnation != join.incarnation:
            yield from self._remove(join.worker)
            lease = None
        if lease is not None:
            lease.peer, lease.connected = join.peer, True
            self.heard(join.worker, now)
            return
        arrivals = RtoEstimator(_LEAST_SILENCE * self.lease_seconds, self.lease_seconds, now)
        self.leases[join.worker] = Lease(join.incarnation, join.peer, now, arrivals=arrivals)
        self._look_at(now + arrivals.timeout_seconds)
        self.num_returned += join.worker in self._seen
        self._seen.add(join.worker)
        self.epoch += 1
        yield ("join", join.worker)

    def heard(self, worker: int, now: float) -> None:
        """Renew a lease."""
        lease = self.leases.get(worker)
        if lease is not None:
            lease.last_heard = now
            lease.arrivals.hear(now)
            if lease.suspected:
                lease.suspected = False
                self._look_at(lease.suspect_at)

    def note(self, event: WorkerAlive | WorkerDisconnected | ProcessStalled, now: float) -> None:
        """Renew a lease, suspect a worker whose stream broke, or excuse everybody's silence."""
        if isinstance(event, ProcessStalled):  # nobody could be heard
            for lease in self.leases.values():
                lease.last_heard = min(now, lease.last_heard + event.seconds)
                lease.arrivals.excuse(event.seconds, now)
            return
        known = self.leases.get(event.worker)
        if known is None:
            return
        if isinstance(event, WorkerAlive):
            self.heard(event.worker, now)
            known.arrivals.beat(now)
        elif known.incarnation == event.incarnation:
            known.connected = False

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """Let a worker go at its own wish."""
        lease = self.leases.get(worker)
        if lease is not None and lease.incarnation == incarnation:
            yield from self._remove(worker)

    def expire(self, now: float) -> Iterator[Change]:
        """Remove workers whose lease has run out; suspect those who are silent."""
        if now < self._first_end:
            return
        ends = {
            worker: lease.last_heard + self.lease_seconds for worker, lease in self.leases.items()
        }
        self._first_end = math.inf
        for worker, lease in self.leases.items():
            lease.suspected = now >= min(lease.suspect_at, ends[worker])
            self._look_at(ends[worker] if lease.suspected else lease.suspect_at)
        overdue = [worker for worker, end in ends.items() if end <= now]
        for worker in overdue:
            self.num_left += 1
            yield from self._remove(worker)

    def miss(self, life: WorkerIncarnation) -> Iterator[Change]:
        """Remove a worker that another shard has not heard for a whole lease."""
        if self.admits(life.worker, life.incarnation):
            self.num_left += 1
            yield from self._remove(life.worker)

    def missed(self, now: float) -> list[WorkerIncarnation]:
        """Who is silent here is removed here."""
        del now
        return []

    def follow(self, epoch: MembershipEpoch, now: float) -> Iterator[Change]:
        """Shard 0 follows nobody."""
        del epoch, now
        yield from ()

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether this life of the worker is a member."""
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

    def life_of(self, worker: int) -> int:
        """Return which life of a worker is live; 0 if none."""
        lease = self.leases.get(worker)
        return lease.incarnation if lease is not None else 0

    def begin_epoch(self) -> int:
        """Begin another epoch with the same members; return its number."""
        self.epoch += 1
        return self.epoch

    def save(self) -> State:
        """Return what outlives a restart; leases are soft and rebuilt."""
        return {
            "epoch": self.epoch,
            "left": self.num_left,
            "returned": self.num_returned,
            "seen": sorted(self._seen),
        }

    def restore(self, state: State) -> None:
        """Take back what `save` gave."""
        # Shards that outlived this one may have heard of later epochs: number on beyond them.
        self.epoch = state["epoch"] + EPOCHS_PER_LIFE
        self.num_left = state["left"]
        self.num_returned = state["returned"]
        self._seen = set(state["seen"])

    def _look_at(self, when: float) -> None:
        self._first_end = min(self._first_end, when)

    def _remove(self, worker: int) -> Iterator[Change]:
        del self.leases[worker]
        self.epoch += 1
        yield ("leave", worker)


Membership = Coordinator | FollowerMembership
