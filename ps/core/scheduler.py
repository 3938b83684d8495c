"""Rounds of one PS shard, last membership epoch of each worker group, and a timer for stalls."""

from __future__ import annotations

from thinwire.ops.sync.base import Advance, ArrivalToken, SyncRule
from thinwire.ops.sync.groups import Groups
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.types import State


class RoundScheduler:
    """Collects the pushes of one shard into rounds, and relates rounds to membership epochs.

    Attributes:
        rounds: Workers, waiting pushes and workers' iteration counts of the shard. Other objects
            only read `rounds`, and make changes through `RoundScheduler`, which records membership
            epochs and times.
    """

    def __init__(self, rule: SyncRule, generation: int = 0, follows: bool = False) -> None:
        """Create the scheduler of a shard that has no workers yet.

        Args:
            rule: Synchronization rule of the run.
            generation: Generation of the shard (number of the shard's restarts).
            follows: True on every shard but shard 0.
        """
        self.rounds = Rounds(rule, generation, follows)
        self._group_epochs: dict[int, int] = {}  # group -> membership epoch of last change
        self._moved_at: float | None = None  # time of the last submitted or released push

    def share_of(self, worker: int) -> float:
        """Return the size of a worker's group divided by the number of workers of the run."""
        groups = self.rounds.groups
        return len(groups[self.rounds.group_of(worker)]) / sum(map(len, groups))

    def join(self, worker: int, epoch: int) -> None:
        """Add a worker that joined in membership epoch `epoch`; a later round makes it live."""
        self._group_epochs[self.rounds.group_of(worker)] = epoch
        self.rounds.join(worker)

    def leave(self, worker: int, epoch: int) -> None:
        """Remove a worker that left in membership epoch `epoch`, and its waiting pushes."""
        self._group_epochs[self.rounds.group_of(worker)] = epoch
        self.rounds.leave(worker)

    def submit(self, worker: int, step: int, now: float) -> None:
        """Add a live worker's push, which then waits until a round with the push is complete."""
        self._moved_at = now
        self.rounds.submit(ArrivalToken(worker, step), now)

    def advance(self, now: float) -> Advance:
        """Release complete rounds, make joining workers live, and let workers proceed."""
        advance = self.rounds.advance(now)
        if advance.released:
            self._moved_at = now
        return advance

    def is_stalled(self, now: float, patience_seconds: float) -> bool:
        """Return whether pushes wait, but none was submitted or released for `patience_seconds`."""
        if self._moved_at is None or now - self._moved_at < patience_seconds:
            return False
        # Restart the timer, so that a long stall of rounds is reported once per patience_seconds.
        self._moved_at = now
        return any(map(self.rounds.has_submitted, self.rounds.live()))

    def is_due(self, now: float) -> bool:
        """Return whether `advance` must be called now even without a new push."""
        deadline = self.rounds.next_deadline()
        return deadline is not None and now >= deadline

    def epoch_is_current(self, worker: int, epoch: int) -> bool:
        """Return whether a worker's group has not changed since membership epoch `epoch`."""
        return epoch >= self._group_epochs.get(self.rounds.group_of(worker), 0)

    def regroup(self, groups: Groups, epoch: int) -> None:
        """Continue with new worker groups, which are valid from membership epoch `epoch`."""
        self.rounds.regroup(groups)
        self._group_epochs = dict.fromkeys(range(len(groups)), epoch)

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return workers' iteration counts; with `soft`, also rounds and epochs of groups."""
        state = self.rounds.state_dict(soft)
        if not soft:
            return state
        extra = {"group_epochs": dict(self._group_epochs), "moved_at": self._moved_at}
        return state | extra

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the workers' iteration counts or the rounds that `state_dict` has returned."""
        self.rounds.load_state_dict(state, soft)
        if soft:
            self._group_epochs = dict(state["group_epochs"])
            self._moved_at = state["moved_at"]
