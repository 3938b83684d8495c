"""One shard of the parameter server as a sans-IO state machine.

``handle(event, now) -> [action]`` and ``next_deadline()``; it never waits, reads no clock, holds
no lock. gRPC, the simulator and the tests feed it the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.methods.method import Method
from thinwire.ops.sync.rule import SyncRule
from thinwire.ops.types import State
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core import (
    admission,
    answers,
    changes,
    durable,
    ending,
    events,
    faults,
    offences,
    pacing_service,
    refusals,
)
from thinwire.ps.core.averages import AuxMean
from thinwire.ps.core.counters import Accounts
from thinwire.ps.core.deadlines import Deadlines
from thinwire.ps.core.guard import Guard
from thinwire.ps.core.members import CoreConfig, Member
from thinwire.ps.core.membership import Change, Membership
from thinwire.ps.core.model import model_for
from thinwire.ps.core.oldest_base import OldestBase
from thinwire.ps.core.regrouper import Regrouping

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class PsCore:
    """State and rules of one shard."""

    def __init__(
        self,
        config: CoreConfig,
        method: Method,
        theta: Float32,
        kernels: Any,
        membership: Membership,
        sync: SyncRule,
        aux: AuxMean | None = None,
    ) -> None:
        """Start at version 0.

        Args:
            config: Budget, rates and intervals.
            method: The composition.
            theta: Initial weights [n] float32 of this shard; owned and updated in place.
            kernels: ops.kernels.Kernels.
            membership: Coordinator on shard 0, Follower elsewhere.
            sync: The rule of this shard: shard 0's holds the bound, the others' have none.
            aux: What is averaged beside the weights, on shard 0.
        """
        self.config, self.membership, self.sync = config, membership, sync
        self.model = model_for(method, theta, kernels, config)
        self.aux = aux or AuxMean()
        self.stop_reason: str | None = None
        self.started = not sync.waits_for_start
        self.accounts = Accounts()
        self.guard = Guard(config.guards)
        self.members: dict[int, Member] = {}
        self.sync_state = sync.init()
        self._spent = False  # a following shard has applied all it is to apply
        self.group_epochs: dict[int, int] = {}  # group -> epoch of its last change
        self.early: set[int] = set()  # workers with an early push
        self._oldest_base = OldestBase()
        self.deadlines = Deadlines(config, self.accounts)
        self.state_server = pacing_service.StateServer(method.pacer)
        self.regrouping = Regrouping(sync.auto, config.nb_workers)
        self._snapshot_version = 0

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self.model.version

    @property
    def samples(self) -> int:
        """Examples consumed by the updates applied so far."""
        return self.model.samples

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Take in one event; return what is to be done about it, in order."""
        self.guard.elapse(now)
        actions = self._handlers[type(event)](self, event, now)
        return [*actions, *self._expire(now)]

    def next_deadline(self) -> float | None:
        """Return when a Tick is due, if ever."""
        deadlines = [self.membership.next_deadline(), self.deadlines.next()]
        return min((when for when in deadlines if when is not None), default=None)

    # -- events -----------------------------------------------------------------------------

    def _join(self, event: events.Join, now: float) -> list[events.Action]:
        if (refusal := admission.refuse_join(self, event, now)) is not None:
            return [refusal]
        member = self.members.setdefault(event.worker, Member())
        member.incarnation, member.question = event.incarnation, None
        actions: list[events.Action] = []
        # An epoch each: where a life takes over another's id, other shards must see that one go.
        for change in self.membership.join(event, now):
            actions += self.change([change], now)
        welcome = events.Welcome(
            event.worker,
            event.incarnation,
            member.last_step,
            member.last_step > 0,
            self.membership.epoch,
            self.version,
        )
        return [welcome, *actions]

    def _pull(self, event: events.Pull, now: float) -> list[events.Action]:
        self.membership.heard(event.worker, now)
        if (member := admission.member_of(self, event)) is None:
            return [admission.turn_away(self, event, 0)]
        self.deadlines.begin(now)
        admission.note_lost_updates(self, event)
        admission.withdraw(self, member, event.worker)
        member.question, member.asked_at = (0, admission.usable_base(self, event)), now
        return answers.give(self, [event.worker], now)

    def _push(self, event: events.Push, now: float) -> list[events.Action]:
        self.membership.heard(event.worker, now)
        if (member := admission.member_of(self, event)) is None:
            return [admission.turn_away(self, event, event.step)]
        if self.guard.has_refused(event.worker, event.step):
            return [refusals.outlier(event, "refused before", self.membership.epoch)]
        self.deadlines.begin(now)
        admission.note_lost_updates(self, event)
        if admission.is_late(member, event):
            return []
        usable, member.asked_at = admission.usable_base(self, event), now
        member.push_bytes = event.num_bytes
        if event.is_copy and usable is not None:
            self.model.take(event.update)
        if event.is_copy or event.step <= member.last_step or self.stop_reason:
            member.question = (event.step, usable)
            member.free = member.free or bool(self.stop_reason)
            return answers.give(self, [event.worker], now)
        if not admission.epoch_fits(self, event):
            return [refusals.stale_epoch(event, self.membership.epoch)]
        if usable is None:
            self.accounts.reject("generation", event.worker)
            generation, epoch = self.config.generation, self.membership.epoch
            return [refusals.stale_generation(event, self.version, generation, epoch)]
        if event.base_checksum is not None:
            self.model.verify(event.worker, usable, event.base_checksum)
        member.question, member.free, member.early = (event.step, usable), False, event
        self.early.add(event.worker)
        member.last_step = event.step
        self.state_server.pushed(event.worker)
        self.regrouping.pushed(event, now)
        return [*offences.judge(self, event, member, now), *self.settle(now)]

    def _leave(self, event: events.Leave, now: float) -> list[events.Action]:
        actions = self.change(list(self.membership.leave(event.worker, event.incarnation)), now)
        diverged = event.cause == "diverged" and not self.sync_state["live"]
        return [*actions, *(ending.end(self, "diverged", now) if diverged else [])]

    def _epoch(self, event: events.MembershipEpoch, now: float) -> list[events.Action]:
        self.started = self.started or event.started
        self.regrouping.hear(event, self.sync.groups)
        # Settle in any case: a push may have waited for just this number.
        return [*self.change(list(self.membership.follow(event, now)), now), *self.settle(now)]

    def _unheard(self, event: events.WorkerUnreachable, now: float) -> list[events.Action]:
        return changes.expel(self, list(self.membership.miss(event.life)), now)

    def _note_presence(
        self,
        event: events.WorkerAlive | events.WorkerDisconnected | events.ProcessStalled,
        now: float,
    ) -> list[events.Action]:
        self.membership.note(event, now)
        return []

    def _tick(self, event: events.Tick, now: float) -> list[events.Action]:
        del event, now
        return []

    # -- rules ------------------------------------------------------------------------------

    def _expire(self, now: float) -> list[events.Action]:
        """Do what time has made due."""
        actions = changes.expel(self, list(self.membership.expire(now)), now)
        if missed := self.membership.missed(now):
            actions.append(events.WorkersUnreachable(tuple(missed)))
        if self.deadlines.start_is_due(now):
            self.started = True
            actions += [*changes.publish(self), *self.settle(now)]
        if self.deadlines.limit_is_due(now):
            actions += ending.end(self, "max_seconds", now)
        if why := self.deadlines.drain_is_over(now, self.sync_state["live"], self.model.lags):
            actions += ending.end(self, why, now)
        if self.deadlines.snapshot_is_due(now):
            actions += self.snapshot_if_new()
        return actions

    def change(self, turnover: Sequence[Change], now: float) -> list[events.Action]:
        """Carry a change of membership into the rule, and tell the other shards."""
        if not turnover:
            return []
        told = changes.carry(self, turnover, now)
        return [*told, *changes.publish(self), *self.settle(now)]

    def settle(self, now: float) -> list[events.Action]:
        """Release every round that is complete and answer whoever may go on."""
        actions: list[events.Action] = []
        if not self.started:
            return actions
        while True:
            actions += admission.let_in_early(self)
            released, free, self.sync_state = self.sync.advance(self.sync_state)
            for workers in released:
                actions += self._release(workers, now)
            for worker in free:  # who was let in with a push already here waits for its round
                self.members[worker].free = self.members[worker].early is None
            actions += answers.give(self, free, now)
            if not released and not free:
                if (told := self.regrouping.turn(self, now)) is None:
                    return actions
                actions += told

    def _release(self, workers: tuple[int, ...], now: float) -> list[events.Action]:
        """Apply one complete round."""
        pushes = admission.take_pending(self, workers)
        self.state_server.released(workers)
        if not pushes or self.stop_reason is not None or self._spent:
            return []
        arrivals = [Arrival(p.worker, p.update, p.base_version, p.step, p.lag) for p in pushes]
        version, live = self.version, self.sync_state["live"]
        kept = self.model.apply(arrivals, self._oldest_base.find(self.members, live, version))
        kept_workers = {arrival.worker for arrival in kept}
        group = self.sync.name_of(workers[0])
        for push in pushes:
            if push.worker in kept_workers:
                self.model.samples += push.samples
                self.accounts.applied(push, version, group)
                self.guard.applied(push.worker)
                self.members[push.worker].staleness = version - push.computed_at
            else:
                self.accounts.reject("stale", push.worker)
        if not kept:
            return []
        self.aux.merge([p.aux for p in pushes if p.worker in kept_workers], len(live))
        self.accounts.updated(group, now)
        reason = self.config.budget.end(self.version, self.samples)
        if reason and not self.membership.leads:  # the end of the run is shard 0's to declare
            self._spent = True
            return []
        return ending.end(self, reason, now) if reason else []

    def snapshot_if_new(self, force: bool = False) -> list[events.Action]:
        """Have the state saved if anything was applied since it was, or in any case."""
        if self.version == self._snapshot_version and not force:
            return []
        self._snapshot_version = self.version
        return [events.SaveSnapshot(self.version, self.snapshot())]

    def snapshot(self) -> State:
        """Return all durable state as plain data; arrays are copies."""
        return durable.save(self)

    def restore(self, state: State) -> None:
        """Take back what `snapshot` gave; the generation is the caller's to count."""
        durable.restore(self, state)
        self._snapshot_version = self.version

    _handlers: ClassVar[dict[type, Any]] = {
        events.Join: _join,
        events.Pull: _pull,
        events.Push: _push,
        events.Query: pacing_service.query,
        events.EvaluationPull: answers.observe,
        events.WorkerAlive: _note_presence,
        events.WorkerDisconnected: _note_presence,
        events.ProcessStalled: _note_presence,
        events.Leave: _leave,
        events.MembershipEpoch: _epoch,
        events.WorkerUnreachable: _unheard,
        events.PushRejected: offences.refused,
        events.Stop: ending.stop,
        events.Tick: _tick,
        events.Failed: faults.put_out,
    }
