"""Who takes part, on the shards that follow shard 0: what its newest epoch says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ops.types import State
from ps.events import Alive, Epoch, Join, Life, Lost, Stalled

#: A change of membership: ("join" | "leave", worker).
Change = tuple[str, int]
#: A lease that never ends.
NEVER_SECONDS = 1e18


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who keeps a worker from joining under its id."""

    peer: str
    silent_seconds: float = 0.0
    retry_after_seconds: float = 0.0  # above 0: if it stays silent so long, the id is free


@dataclasses.dataclass
class Claim:
    """The life of a worker that said Hello here last."""

    incarnation: int
    epoch: int  # of shard 0's Welcome to it; 0: it did not say
    peer: str


class Follower:
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
        self._claims: dict[int, Claim] = {}
        self._heard: dict[int, float] = {}  # live worker -> when, or since when it is told missing

    def holder(self, join: Join, now: float) -> Holder | None:
        """Return who holds the id: a life that shard 0 has let in after the one that asks."""
        del now
        named = self._named.get(join.worker, join.incarnation)
        if named == join.incarnation or not 0 < join.epoch <= self.epoch:
            return None
        claim = self._claims.get(join.worker)
        known = claim is not None and claim.incarnation == named
        return Holder(claim.peer if claim is not None and known else "another address")

    def join(self, join: Join, now: float) -> Iterator[Change]:
        """Remember the life; membership itself comes by epoch."""
        self._claims[join.worker] = Claim(join.incarnation, join.epoch, join.peer)
        self.heard(join.worker, now)
        yield from ()

    def heard(self, worker: int, now: float) -> None:
        """Hear a worker."""
        if worker in self._heard:
            self._heard[worker] = now

    def note(self, event: Alive | Lost | Stalled, now: float) -> None:
        """Hear a worker, or excuse everybody's silence."""
        if isinstance(event, Alive):
            self.heard(event.worker, now)
        elif isinstance(event, Stalled):  # nobody could be heard
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

    def miss(self, life: Life) -> Iterator[Change]:
        """Who is missed elsewhere is shard 0's concern."""
        del life
        yield from ()

    def missed(self, now: float) -> list[Life]:
        """Return live workers that were silent here for a lease; each again after another one."""
        gone = [w for w, when in self._heard.items() if now - when >= self.lease_seconds]
        for worker in gone:
            self._heard[worker] = now
        return [Life(worker, self.life_of(worker)) for worker in gone]

    def follow(self, epoch: Epoch, now: float) -> Iterator[Change]:
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
