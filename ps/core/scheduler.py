"""The rounds of one shard: the rule of synchronisation in force, and when each group changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, SyncPolicy
from thinwire.ops.sync.groups import Groups
from thinwire.ops.types import State


class RoundScheduler:
    """Orders the pushes of one shard into rounds, and workers into those that may proceed."""

    def __init__(self, policy: SyncPolicy, generation: int = 0) -> None:
        """Begin with nobody, in a generation of the shard."""
        self._rule = policy.start(generation)
        self._group_epochs: dict[int, int] = {}  # group -> epoch of its last change
        self._moved_at: float | None = None  # when a push was submitted or released last

    @property
    def groups(self) -> Groups:
        """Workers that step together, of now."""
        return self._rule.groups

    @property
    def waits_for_start(self) -> bool:
        """Whether the run begins only when all workers are there."""
        return self._rule.waits_for_start

    def name_of(self, worker: int) -> str:
        """Return the worker's group as --groups writes it."""
        return self._rule.name_of(worker)

    def live_fellows(self, worker: int) -> list[int]:
        """Return the live workers of the worker's round, itself included if it is one of them."""
        return list(self._rule.fellows(worker))

    def share_of(self, worker: int) -> float:
        """Return the worker's group / all workers of the run, live or not."""
        groups = self._rule.groups
        return len(groups[self._rule.group_of(worker)]) / sum(map(len, groups))

    # -- workers ----------------------------------------------------------------------------

    def join(self, worker: int, epoch: int) -> None:
        """Announce a worker, which joined in this epoch."""
        self._group_epochs[self._rule.group_of(worker)] = epoch
        self._rule.join(worker)

    def leave(self, worker: int, epoch: int) -> None:
        """Forget a worker, which left in this epoch."""
        self._group_epochs[self._rule.group_of(worker)] = epoch
        self._rule.leave(worker)

    def live(self) -> Sequence[int]:
        """Return the workers whose pushes rounds wait for, ascending."""
        return self._rule.live()

    def joining(self) -> Sequence[int]:
        """Return the workers that enter with the next round of their group, ascending."""
        return self._rule.joining()

    def present(self) -> tuple[int, ...]:
        """Return live and joining workers, ascending."""
        return tuple(sorted([*self._rule.live(), *self._rule.joining()]))

    def waiting(self) -> set[int]:
        """Return live workers that wait for their round, or for permission to proceed."""
        return self._rule.waiting()

    def clocks(self) -> dict[int, int]:
        """Return worker -> finished iterations."""
        return self._rule.clocks()

    def is_live(self, worker: int) -> bool:
        """Return whether rounds wait for the worker's pushes."""
        return self._rule.is_live(worker)

    def may_proceed(self, worker: int) -> bool:
        """Return whether a live worker may do its next round."""
        return self._rule.may_proceed(worker)

    # -- rounds -----------------------------------------------------------------------------

    def submit(self, worker: int, step: int, now: float) -> None:
        """Let a push of a live worker wait for its round."""
        self._moved_at = now
        self._rule.submit(ArrivalToken(worker, step), now)

    def withdraw(self, worker: int, step: int) -> None:
        """Take back what a worker has submitted; `step` and those before come from it no more."""
        self._rule.withdraw(worker, step)

    def has_submitted(self, worker: int) -> bool:
        """Return whether a push of the worker waits for its round."""
        return self._rule.has_submitted(worker)

    def advance(self, now: float) -> Advance:
        """Settle everything that can be settled now."""
        advance = self._rule.advance(now)
        if advance.released:
            self._moved_at = now
        return advance

    def is_stalled(self, now: float, patience_seconds: float) -> bool:
        """Return whether pushes wait, and nothing has come or gone for so long; then anew."""
        if self._moved_at is None or now - self._moved_at < patience_seconds:
            return False
        self._moved_at = now
        return any(map(self._rule.has_submitted, self._rule.live()))

    def over(self) -> Mapping[int, int]:
        """Return the newest step that is over of each live worker of groups that wait."""
        return self._rule.over()

    def release_late(self, over: Mapping[int, int]) -> Sequence[tuple[ArrivalToken, ...]]:
        """Release what waits up to these steps of workers; see `SyncRule.release_late`."""
        return self._rule.release_late(over)

    def draws(self) -> tuple[Draw, ...]:
        """Return the newest draws of rounds' workers, the newest last, if workers are drawn."""
        return tuple(self._rule.draws())

    def follow(self, draws: Sequence[Draw]) -> None:
        """Take over the draws of shard 0."""
        self._rule.follow(draws)

    def joiners(self) -> tuple[Joiners, ...]:
        """Return the workers that have joined and have finished no round, on shard 0."""
        return tuple(self._rule.joiners())

    def expect(self, joiners: Sequence[Joiners]) -> None:
        """Take over the joiners of shard 0."""
        self._rule.expect(joiners)

    def next_deadline(self) -> float | None:
        """Return when `advance` is due though nothing arrives, if ever."""
        return self._rule.next_deadline()

    def is_due(self, now: float) -> bool:
        """Return whether `advance` is due though nothing arrived."""
        deadline = self._rule.next_deadline()
        return deadline is not None and now >= deadline

    def epoch_is_current(self, worker: int, epoch: int) -> bool:
        """Return whether an epoch knows the last change of the worker's group."""
        return epoch >= self._group_epochs.get(self._rule.group_of(worker), 0)

    # -- changes of groups ------------------------------------------------------------------

    def pause(self) -> None:
        """Let nobody proceed who finishes a round from now on, until groups have changed."""
        self._rule.pause()

    def resume(self) -> None:
        """Let everybody proceed in the groups there are."""
        self._rule.regroup(self._rule.groups)

    def is_quiescent(self) -> bool:
        """Return whether every live worker has finished its round and may not proceed."""
        return self._rule.is_quiescent()

    def regroup(self, groups: Groups, epoch: int) -> None:
        """Go on with other groups, which began with this epoch."""
        self._rule.regroup(groups)
        self._group_epochs = dict.fromkeys(range(len(groups)), epoch)

    # -- state ------------------------------------------------------------------------------

    def state_dict(self, soft: bool) -> State:
        """Return the clocks, which outlive a restart, or who is where."""
        state = self._rule.state_dict(soft)
        if not soft:
            return state
        own = {"group_epochs": dict(self._group_epochs), "moved_at": self._moved_at}
        return state | own

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        self._rule.load_state_dict(state, soft)
        if soft:
            self._group_epochs = dict(state["group_epochs"])
            self._moved_at = state["moved_at"]
