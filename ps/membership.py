"""Who takes part: leases on shard 0, numbered epochs on the shards that follow it.

Both classes answer the same questions, so the core does not know which shard it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from ops.types import State
from ps.events import Alive, Epoch, Join, Lost, Stalled

#: Epoch numbers reserved for one life of shard 0.
EPOCHS_PER_LIFE = 1 << 16

#: A change of membership: ("join" | "leave", worker).
Change = tuple[str, int]


@dataclasses.dataclass
class Lease:
    """What shard 0 knows of one live worker."""

    incarnation: int
    peer: str
    last_heard: float
    connected: bool = True


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
        self._first_end = math.inf  # no lease ends before: leases only grow longer

    def holder(self, join: Join) -> str | None:
        """Return the peer that keeps this worker from joining, if any."""
        lease = self.leases.get(join.worker)
        same_life = lease is not None and join.reconnects and lease.incarnation == join.incarnation
        if lease is None or same_life or not lease.connected:
            return None
        return lease.peer

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Take in a worker that `holder` does not forbid."""
        lease = self.leases.get(join.worker)
        if lease is not None and lease.incarnation != join.incarnation:
            yield from self._remove(join.worker)
            lease = None
        if lease is None:
            self.num_returned += join.worker in self._seen
            self._seen.add(join.worker)
            self.epoch += 1
            yield ("join", join.worker)
        self.leases[join.worker] = Lease(join.incarnation, join.peer, now)
        self._first_end = min(self._first_end, now + self.lease_seconds)

    def heard(self, worker: int, now: float) -> None:
        """Renew a lease."""
        if worker in self.leases:
            self.leases[worker].last_heard = now

    def note(self, event: Alive | Lost | Stalled, now: float) -> None:
        """Renew a lease, suspect a worker whose stream broke, or excuse everybody's silence."""
        if isinstance(event, Stalled):  # nobody could be heard
            for lease in self.leases.values():
                lease.last_heard = min(now, lease.last_heard + event.seconds)
            return
        if isinstance(event, Alive):
            self.heard(event.worker, now)
            return
        known = self.leases.get(event.worker)
        if known is not None and known.incarnation == event.incarnation:
            known.connected = False

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """Let a worker go at its own wish."""
        lease = self.leases.get(worker)
        if lease is not None and lease.incarnation == incarnation:
            yield from self._remove(worker)

    def expire(self, now: float) -> Iterator[Change]:
        """Remove workers whose lease has run out."""
        if now < self._first_end:
            return
        ends = {worker: lease.last_heard + self.lease_seconds
                for worker, lease in self.leases.items()}  # fmt: skip
        self._first_end = min((end for end in ends.values() if end > now), default=math.inf)
        overdue = [worker for worker, end in ends.items() if end <= now]
        for worker in overdue:
            self.num_left += 1
            yield from self._remove(worker)

    def follow(self, epoch: Epoch) -> Iterator[Change]:
        """Shard 0 follows nobody."""
        del epoch
        yield from ()

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether this life of the worker is a member."""
        lease = self.leases.get(worker)
        return lease is not None and lease.incarnation == incarnation

    def next_deadline(self) -> float | None:
        """Return when a lease may run out: never later than the first one does."""
        return self._first_end if self.leases else None

    def state_of(self, worker: int) -> str:
        """Return "live", "suspect" or "left"."""
        lease = self.leases.get(worker)
        if lease is None:
            return "left"
        return "live" if lease.connected else "suspect"

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

    def _remove(self, worker: int) -> Iterator[Change]:
        del self.leases[worker]
        self.epoch += 1
        yield ("leave", worker)


class Follower:
    """Shard 1..: membership is what shard 0's last epoch says."""

    leads = False

    def __init__(self, nb_workers: int) -> None:
        """Start with nobody."""
        self.nb_workers = nb_workers
        self.epoch = 0
        self.num_left = 0
        self.num_returned = 0
        self._live: tuple[int, ...] = ()
        self._lives: dict[int, int] = {}  # worker -> incarnation that said Hello here last

    def holder(self, join: Join) -> str | None:
        """Shard 0 has judged already."""
        del join
        return None

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Remember the life; membership itself comes by epoch."""
        del now
        self._lives[join.worker] = join.incarnation
        yield from ()

    def heard(self, worker: int, now: float) -> None:
        """Leases are shard 0's."""

    def note(self, event: Alive | Lost | Stalled, now: float) -> None:
        """Leases are shard 0's."""

    def leave(self, worker: int, incarnation: int) -> Iterator[Change]:
        """Shard 0 will say so by epoch."""
        del worker, incarnation
        yield from ()

    def expire(self, now: float) -> Iterator[Change]:
        """Leases are shard 0's."""
        del now
        yield from ()

    def follow(self, epoch: Epoch) -> Iterator[Change]:
        """Become what a newer epoch says."""
        if epoch.number <= self.epoch:
            return
        before, after = set(self._live), set(epoch.live)
        gone = [worker for worker in self._live if worker not in after]
        new = [worker for worker in epoch.live if worker not in before]
        self.epoch = epoch.number
        self._live = epoch.live
        yield from (("leave", worker) for worker in gone)
        yield from (("join", worker) for worker in new)

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether this life of the worker said Hello here."""
        return self._lives.get(worker) == incarnation

    def next_deadline(self) -> float | None:
        """Nothing runs out here."""
        return None

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


Membership = Coordinator | Follower
