"""Rounds of one PS shard, membership epoch of each group's change, and a timer of stalls."""

from __future__ import annotations

from thinwire.ops.sync.base import Advance, ArrivalToken, SyncRule
from thinwire.ops.sync.groups import Groups
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.types import State


class RoundScheduler:
    """Collects the pushes of one shard into rounds, and relates rounds to membership epochs.

    Attributes:
        rounds: Workers, waiting pushes and clocks of the shard. Read it freely; let the scheduler
            join, remove and submit, so that it can record epochs and times.
    """

    def __init__(self, rule: SyncRule, generation: int = 0, follows: bool = False) -> None:
        """Start without workers.

        Args:
            rule: The synchronization rule.
            generation: Generation of the shard (number of its restarts).
            follows: True on every shard but shard 0.
        """
        self.rounds = Rounds(rule, generation, follows)
        self._group_epochs: dict[int, int] = {}  # group -> membership epoch of its last change
        self._moved_at: float | None = None  # when a push was last submitted or released

    def share_of(self, worker: int) -> float:
        """Return the size of the worker's group divided by the number of workers of the run."""
        groups = self.rounds.groups
        return len(groups[self.rounds.group_of(worker)]) / sum(map(len, groups))

    def join(self, worker: int, epoch: int) -> None:
        """Add a worker that joined in `epoch`. It becomes live with its group's next round."""
        self._group_epochs[self.rounds.group_of(worker)] = epoch
        self.rounds.join(worker)

    def leave(self, worker: int, epoch: int) -> None:
        """Remove a worker that left in this membership epoch, and its pushes that wait."""
        self._group_epochs[self.rounds.group_of(worker)] = epoch
        self.rounds.leave(worker)

    def submit(self, worker: int, step: int, now: float) -> None:
        """Add the push of a live worker's step to its round."""
        self._moved_at = now
        self.rounds.submit(ArrivalToken(worker, step), now)

    def advance(self, now: float) -> Advance:
        """Release the complete rounds, admit joiners, and return the workers that may proceed."""
        advance = self.rounds.advance(now)
        if advance.released:
            self._moved_at = now
        return advance

    def is_stalled(self, now: float, patience_seconds: float) -> bool:
        """Return whether pushes wait although none was submitted or released for a given time."""
        if self._moved_at is None or now - self._moved_at < patience_seconds:
            return False
        # Restart the timer, so that a lasting stall is reported once in every patience_seconds.
        self._moved_at = now
        return any(map(self.rounds.has_submitted, self.rounds.live()))

    def is_due(self, now: float) -> bool:
        """Return whether the deadline of `advance` has passed."""
        deadline = self.rounds.next_deadline()
        return deadline is not None and now >= deadline

    def epoch_is_current(self, worker: int, epoch: int) -> bool:
        """Return whether no later membership epoch than `epoch` has changed the worker's group."""
        return epoch >= self._group_epochs.get(self.rounds.group_of(worker), 0)

    def regroup(self, groups: Groups, epoch: int) -> None:
        """Continue with new worker groups, which came into force in this membership epoch."""
        self.rounds.regroup(groups)
        self._group_epochs = dict.fromkeys(range(len(groups)), epoch)

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return the workers' clocks; with `soft` the workers, rounds and epochs of groups."""
        state = self.rounds.state_dict(soft)
        if not soft:
            return state
        extra = {"group_epochs": dict(self._group_epochs), "moved_at": self._moved_at}
        return state | extra

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the clocks or rounds that `state_dict` returned."""
        self.rounds.load_state_dict(state, soft)
        if soft:
            self._group_epochs = dict(state["group_epochs"])
            self._moved_at = state["moved_at"]
