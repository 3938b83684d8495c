"""Who takes part: leases on shard 0, numbered epochs on the shards that follow it.

Coordinator and Follower answer the same questions, so the core does not know which shard it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from ops.arrivals import Arrivals
from ops.types import State
from ps.events import Alive, Epoch, Join, Life, Lost, Stalled
from ps.follower import NEVER_SECONDS, Change, Follower, Holder

__all__ = ["EPOCHS_PER_LIFE", "Change", "Coordinator", "Follower", "Holder", "Lease", "Membership"]

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
    arrivals: Arrivals = dataclasses.field(
        default_factory=lambda: Arrivals(NEVER_SECONDS, NEVER_SECONDS)
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

    def holder(self, join: Join, now: float) -> Holder | None:
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
        return Holder(lease.peer, silent, max(0.0, left))

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
        arrivals = Arrivals(_LEAST_SILENCE * self.lease_seconds, self.lease_seconds, now)
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

    def note(self, event: Alive | Lost | Stalled, now: float) -> None:
        """Renew a lease, suspect a worker whose stream broke, or excuse everybody's silence."""
        if isinstance(event, Stalled):  # nobody could be heard
            for lease in self.leases.values():
                lease.last_heard = min(now, lease.last_heard + event.seconds)
                lease.arrivals.excuse(event.seconds, now)
            return
        known = self.leases.get(event.worker)
        if known is None:
            return
        if isinstance(event, Alive):
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
        ends = {worker: lease.last_heard + self.lease_seconds
                for worker, lease in self.leases.items()}  # fmt: skip
        self._first_end = math.inf
        for worker, lease in self.leases.items():
            lease.suspected = now >= min(lease.suspect_at, ends[worker])
            self._look_at(ends[worker] if lease.suspected else lease.suspect_at)
        overdue = [worker for worker, end in ends.items() if end <= now]
        for worker in overdue:
            self.num_left += 1
            yield from self._remove(worker)

    def miss(self, life: Life) -> Iterator[Change]:
        """Remove a worker that another shard has not heard for a whole lease."""
        if self.admits(life.worker, life.incarnation):
            self.num_left += 1
            yield from self._remove(life.worker)

    def missed(self, now: float) -> list[Life]:
        """Who is silent here is removed here."""
        del now
        return []

    def follow(self, epoch: Epoch, now: float) -> Iterator[Change]:
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


Membership = Coordinator | Follower
