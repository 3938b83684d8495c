"""Rounds of pushes on one PS shard: its synchronization rule, and the changes of worker groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, SyncPolicy
from thinwire.ops.sync.groups import Groups
from thinwire.ops.types import State


class RoundScheduler:
    """Collects the pushes to one PS shard into rounds, and decides which workers may proceed."""

    def __init__(self, policy: SyncPolicy, generation: int = 0) -> None:
        """Start the shard's synchronization rule without workers.

        Args:
            policy: Settings of the synchronization rule (which workers wait for each other).
            generation: Generation of the shard (number of its restarts).
        """
        self._rule = policy.start(generation)
        # Worker group -> membership epoch of the group's last change.
        self._group_epochs: dict[int, int] = {}
        self._moved_at: float | None = None  # time at which a push was last submitted or merged

    @property
    def groups(self) -> Groups:
        """Current groups of workers; the workers of a group wait for each other in each round."""
        return self._rule.groups

    @property
    def waits_for_start(self) -> bool:
        """True if the run starts only when all workers have joined."""
        return self._rule.waits_for_start

    def name_of(self, worker: int) -> str:
        """Return the name of the worker's group, in the syntax of --groups."""
        return self._rule.name_of(worker)

    def live_fellows(self, worker: int) -> list[int]:
        """Return the live workers of the round that the given worker is in, including the
        worker.
        """
        return list(self._rule.fellows(worker))

    def share_of(self, worker: int) -> float:
        """Return the size of the worker's group divided by the number of workers of the run."""
        groups = self._rule.groups
        return len(groups[self._rule.group_of(worker)]) / sum(map(len, groups))

    # -- workers ----------------------------------------------------------------------------

    def join(self, worker: int, epoch: int) -> None:
        """Add a worker that joined in membership epoch `epoch`. A joined worker becomes live with
        its group's next round.
        """
        self._group_epochs[self._rule.group_of(worker)] = epoch
        self._rule.join(worker)

    def leave(self, worker: int, epoch: int) -> None:
        """Remove a worker that left in the given membership epoch, and its pushes that wait."""
        self._group_epochs[self._rule.group_of(worker)] = epoch
        self._rule.leave(worker)

    def live(self) -> Sequence[int]:
        """Return the ids of the live workers, for which rounds wait, in ascending order."""
        return self._rule.live()

    def joining(self) -> Sequence[int]:
        """Return the ids of workers that become live with their group's next round, ascending."""
        return self._rule.joining()

    def present(self) -> tuple[int, ...]:
        """Return the ids of the live and the joining workers, in ascending order."""
        return tuple(sorted([*self._rule.live(), *self._rule.joining()]))

    def waiting(self) -> set[int]:
        """Return the live workers that wait for other workers: their round is incomplete or they
        are ahead.
        """
        return self._rule.waiting()

    def clocks(self) -> dict[int, int]:
        """Return worker id -> number of iterations that the worker has finished."""
        return self._rule.clocks()

    def is_live(self, worker: int) -> bool:
        """Return whether a worker is live, which means that rounds wait for its pushes."""
        return self._rule.is_live(worker)

    def may_proceed(self, worker: int) -> bool:
        """Return whether a worker is live and may begin its next round."""
        return self._rule.may_proceed(worker)

    # -- rounds -----------------------------------------------------------------------------

    def submit(self, worker: int, step: int, now: float) -> None:
        """Add the push of a live worker's step to the round of this step."""
        self._moved_at = now
        self._rule.submit(ArrivalToken(worker, step), now)

    def withdraw(self, worker: int, step: int) -> None:
        """Remove a worker's submitted pushes; the worker has given up its steps up to `step`."""
        self._rule.withdraw(worker, step)

    def has_submitted(self, worker: int) -> bool:
        """Return whether a push of the worker waits for its round."""
        return self._rule.has_submitted(worker)

    def advance(self, now: float) -> Advance:
        """Return complete rounds, make joined workers live, and return the workers that may
        proceed.
        """
        advance = self._rule.advance(now)
        if advance.released:
            self._moved_at = now
        return advance

    def is_stalled(self, now: float, patience_seconds: float) -> bool:
        """Return whether pushes wait although no push was submitted or merged for a given time."""
        if self._moved_at is None or now - self._moved_at < patience_seconds:
            return False
        # Restart the timer of the stall, so that a lasting stall is reported once in every
        # patience_seconds.
        self._moved_at = now
        return any(map(self._rule.has_submitted, self._rule.live()))

    def over(self) -> Mapping[int, int]:
        """Return worker id -> newest step merged or given up, for the workers of waiting groups."""
        return self._rule.over()

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Merge incomplete rounds: the waiting pushes up to the given step of each worker."""
        return self._rule.release_late(over)

    def draws(self) -> tuple[Draw, ...]:
        """Return the newest random draws of workers that participate, newest last; () if none are
        drawn.
        """
        return tuple(self._rule.draws())

    def follow(self, draws: Sequence[Draw]) -> None:
        """Adopt the random draws of workers that shard 0 made; called on all other shards."""
        self._rule.follow(draws)

    def joiners(self) -> tuple[Joiners, ...]:
        """Return the workers that have finished no round since they joined; only for shard 0."""
        return tuple(self._rule.joiners())

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Adopt the joining workers that shard 0 announces; called on all other shards."""
        self._rule.expect(joiners)

    def next_deadline(self) -> float | None:
        """Return the time at which `advance` must be called even without an event; None if
        never.
        """
        return self._rule.next_deadline()

    def is_due(self, now: float) -> bool:
        """Return whether the deadline of `advance` has passed."""
        deadline = self._rule.next_deadline()
        return deadline is not None and now >= deadline

    def epoch_is_current(self, worker: int, epoch: int) -> bool:
        """Return whether no later membership epoch than `epoch` has changed the worker's group."""
        return epoch >= self._group_epochs.get(self._rule.group_of(worker), 0)

    # -- changes of groups ------------------------------------------------------------------

    def pause(self) -> None:
        """Delay every worker that finishes a round, until `regroup` changes the worker groups."""
        self._rule.pause()

    def resume(self) -> None:
        """Undo `pause` without a change of the groups: let workers proceed in the present
        groups.
        """
        self._rule.regroup(self._rule.groups)

    def is_quiescent(self) -> bool:
        """Return whether every live worker has finished its round and is paused."""
        return self._rule.is_quiescent()

    def regroup(self, groups: Groups, epoch: int) -> None:
        """Continue with new worker groups, which came into force in the given membership epoch."""
        self._rule.regroup(groups)
        self._group_epochs = dict.fromkeys(range(len(groups)), epoch)

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return the workers' iteration counts, or if `soft`, the rounds and the epochs of
        groups.
        """
        state = self._rule.state_dict(soft)
        if not soft:
            return state
        extra = {"group_epochs": dict(self._group_epochs), "moved_at": self._moved_at}
        return state | extra

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the workers' iteration counts or the rounds that `state_dict` returned."""
        self._rule.load_state_dict(state, soft)
        if soft:
            self._group_epochs = dict(state["group_epochs"])
            self._moved_at = state["moved_at"]
