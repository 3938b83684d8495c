"""One shard of the parameter server as a sans-IO state machine.

``handle(event, now) -> [action]`` and ``next_deadline()``; it never waits, reads no clock, holds
no lock. gRPC, the Simulator and the tests feed it the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation
from thinwire.ops.kernels import Kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.methods.validation import check_averages
from thinwire.ops.sync.base import ArrivalToken, SyncPolicy
from thinwire.ops.sync.groups import Groups
from thinwire.ops.types import State
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core import events, refusals
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.counters import Counters
from thinwire.ps.core.lifecycle import RunLifecycle, RunPhase
from thinwire.ps.core.members import CoreConfig, Member, MemberTable
from thinwire.ps.core.membership import Change, Membership
from thinwire.ps.core.model import have_one_form, model_for
from thinwire.ps.core.pacing_service import PacingService
from thinwire.ps.core.quarantine import Quarantine, UpdateGuard
from thinwire.ps.core.regrouper import RegroupFollower, RegroupPlanner
from thinwire.ps.core.scheduler import RoundScheduler
from thinwire.ps.core.serialization import from_plain, to_plain

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class _CorePart(Protocol):
    """What the core owns, as far as files are concerned."""

    def state_dict(self, soft: bool) -> State:
        """Return the state that outlives a restart, or (`soft`) the rest of it."""

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave; the soft state after the other."""


#: Parts that go on where the model is another one.
_OF_RUN = (
    *("counters", "lifecycle", "membership", "members", "scheduler", "quarantine"),
    *("planner", "follower"),
)


class PsCore:
    """State and rules of one shard.

    It owns parts that know neither it nor each other: a part answers with data, and the core makes
    actions of them. Others read it by `model`, `counters`, `averages`, `membership`, `config` and
    the read-only methods below.

    Attributes:
        is_behind: Whether events wait for it now, as its owner sees it: replies are then those
            that cost it least.
    """

    def __init__(
        self,
        config: CoreConfig,
        method: Method,
        theta: Float32,
        kernels: Kernels,
        membership: Membership,
        sync: SyncPolicy,
        averages: WorkerAverages | None = None,
    ) -> None:
        """Start at version 0.

        Args:
            config: Budget, rates and intervals.
            method: The composition.
            theta: Initial weights [n] float32 of this shard; owned and updated in place.
            kernels: The array work.
            membership: Coordinator on shard 0, FollowerMembership elsewhere.
            sync: The rule of this shard: shard 0's holds the bound, the others' have none.
            averages: Values that are averaged beside the weights, on shard 0.

        Raises:
            ConfigurationError: The method adds noise to the weights alone, and there are others.
        """
        self.config, self.membership = config, membership
        self.model = model_for(method, theta, kernels, config)
        self.averages = averages or WorkerAverages()
        check_averages(method, self.averages.size)
        self.counters = Counters()
        self._members = MemberTable()
        self._scheduler = RoundScheduler(sync, config.generation)
        self._lifecycle = RunLifecycle(config, sync.waits_for_start)
        self._guard, self._quarantine = UpdateGuard(config.guards), Quarantine(config.guards)
        self._pacing = PacingService(method.pacer)
        self._planner = RegroupPlanner(sync.auto, config.nb_workers)
        self._follower = RegroupFollower()
        self.is_behind = False

    def begin_phase(self, other: PsCore) -> None:
        """Go on with the model of another core, which has handled nothing and is not used again.

        Version, examples, seconds and counters go on, as after a restart: everybody must join
        anew. The optimizer's schedule, where a script brought it, counts from here.

        Args:
            other: Of a later generation.
        """
        before, has_started = self.state_dict(), self._lifecycle.has_started
        version, samples = self.version, self.samples
        for name, value in vars(other).items():
            setattr(self, name, value)
        self.model.go_on_from(version, samples)
        parts = self._parts()
        for name in _OF_RUN:
            parts[name].load_state_dict(before[name], soft=False)
        self._resumed()
        if has_started:
            self._lifecycle.start()

    def continue_from(self, state: State, same_optimizer: bool) -> list[str]:
        """Continue the run of a saved core that had other settings; this one has handled nothing.

        Weights, version, examples, seconds and counters are the run's; so is every other part whose
        saved state has the form that it has with the present settings.

        Args:
            state: What `state_dict` returned.
            same_optimizer: Whether the optimizers are of the classes that they were of.

        Returns:
            What begins again, in words.
        """
        fresh, begin_again = self.state_dict(), []
        for name, part in self._parts().items():
            if name == "model":
                begin_again += self.model.continue_from(state[name], same_optimizer)
            elif fresh[name].keys() == state[name].keys() and (
                name != "averages" or have_one_form(fresh[name], state[name])
            ):
                part.load_state_dict(state[name], soft=False)
            else:
                begin_again.append(f"the {name}")
        self._resumed()
        return begin_again

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Take in one event; return what is to be done about it, in order."""
        self._quarantine.elapse(now)
        actions = self._handlers[type(event)](self, event, now)
        return [*actions, *self._do_what_is_due(now)]

    def next_deadline(self) -> float | None:
        """Return when a Tick is due, if ever."""
        parts = (self.membership, self._lifecycle, self._scheduler)
        deadlines = [part.next_deadline() for part in parts]
        return min((when for when in deadlines if when is not None), default=None)

    # -- for readers from outside -----------------------------------------------------------

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self.model.version

    @property
    def samples(self) -> int:
        """Examples consumed by the updates applied so far."""
        return self.model.samples

    @property
    def stop_reason(self) -> str | None:
        """Why the run has ended; None: it has not."""
        return self._lifecycle.stop_reason

    @property
    def ended_at(self) -> float | None:
        """When the run ended, by this shard's clock."""
        return self._lifecycle.ended_at

    @property
    def has_started(self) -> bool:
        """Whether rounds are released."""
        return self._lifecycle.has_started

    @property
    def groups(self) -> Groups:
        """The workers that step together, of now."""
        return self._scheduler.groups

    def seconds(self) -> float:
        """Return seconds from the first pull to the last applied update, restarts included."""
        return self._lifecycle.seconds()

    def live_workers(self) -> tuple[int, ...]:
        """Return the workers whose pushes rounds wait for, ascending."""
        return tuple(self._scheduler.live())

    def joining_workers(self) -> tuple[int, ...]:
        """Return the workers that become live with the next round of their group, ascending."""
        return tuple(self._scheduler.joining())

    def waiting_workers(self) -> set[int]:
        """Return live workers that wait for their round, or for permission to proceed."""
        return self._scheduler.waiting()

    def known_workers(self) -> tuple[int, ...]:
        """Return all workers that have been here, in order of the first Hello."""
        return tuple(self._members)

    def incarnation_of(self, worker: int) -> int:
        """Return which incarnation of a worker sent Hello last; 0 if none has."""
        return self._members.incarnation_of(worker)

    def whole(self) -> events.Reply:
        """Return a reply with a copy of the whole model, for an observer."""
        whole = ModelReply(Operation.FULL, self.model.whole(), self.version, "full")
        return self._reply_of(0, 0, whole, self.averages.statistics)

    def clocks(self) -> dict[int, int]:
        """Return worker -> finished iterations, of workers that have left too."""
        return dict(self._scheduler.clocks())

    def guard_summary(self) -> dict[str, Any]:
        """Return refused pushes, quarantines and the median norm; {} where there is nothing."""
        if not (self.config.guards.active or self._guard.has_ever_refused):
            return {}
        return {**self._quarantine.summary(), "median_norm": self._guard.median()}

    def summary(self) -> dict[str, Any]:
        """Return the blocks of the run's summary that only some runs have, by name."""
        groups = {
            "groups": [list(group) for group in self.groups],
            "by_group": self.counters.groups.summary(),
            **self._planner.summary(),
        }
        guards = self.guard_summary()
        return {
            "groups": groups,
            **self._pacing.summary(),
            "weighting": self.model.memory(),
            "down": self.model.down_summary(),
            **({"guards": guards} if guards else {}),
        }

    # -- messages of workers ----------------------------------------------------------------

    def _on_join(self, event: events.Join, now: float) -> list[events.Action]:
        if (refusal := self._refusal_of_join(event, now)) is not None:
            return [refusal]
        member = self._members.add(event.worker)
        member.incarnation, member.request = event.incarnation, None
        actions: list[events.Action] = []
        # An epoch each: where an incarnation takes over, other shards must see the former one go.
        for change in self.membership.join(event, now):
            actions += self._change([change], now)
        welcome = events.Welcome(
            event.worker,
            event.incarnation,
            member.last_step,
            member.last_step > 0,
            self.membership.epoch,
            self.version,
        )
        return [welcome, *actions]

    def _on_pull(self, event: events.Pull, now: float) -> list[events.Action]:
        self.membership.seen(event.worker, now)
        if (member := self._sender_of(event)) is None:
            return [self._refusal_of_stranger(event, 0)]
        self._lifecycle.exchanged(now)
        self._note_lost_updates(event)
        self._withdraw(event.worker)
        member.open_request(0, self._usable_base(event), now)
        return [*self._reply([event.worker], now), *self._settle(now)]

    def _on_push(self, event: events.Push, now: float) -> list[events.Action]:
        """Check a push, and let it wait for its round; a copy or a retry is only answered."""
        self.membership.seen(event.worker, now)
        if (member := self._sender_of(event)) is None:
            return [self._refusal_of_stranger(event, event.step)]
        if self._guard.has_refused(event.worker, event.step):
            return [refusals.outlier(event, "refused before", self.membership.epoch)]
        self._lifecycle.exchanged(now)
        self._note_lost_updates(event)
        if member.is_late(event):
            return []
        usable, member.requested_at = self._usable_base(event), now
        member.push_bytes = event.num_bytes
        if event.is_copy and usable is not None:
            self.model.take(event.update)
        if event.is_copy or event.step <= member.last_step or self._lifecycle.is_over:
            member.open_request(event.step, usable, now)
            return self._reply([event.worker], now)
        if not self._epoch_fits(event):
            return [refusals.stale_epoch(event, self.membership.epoch)]
        if usable is None:
            self.counters.reject("generation", event.worker)
            generation, epoch = self.config.generation, self.membership.epoch
            refusal = refusals.stale_generation(event, self.version, generation, epoch)
            return [refusal, *self._give_up(event.worker, event.step, now)]
        if event.base_checksum is not None:
            self.model.verify(event.worker, usable, event.base_checksum)
        member.open_request(event.step, usable, now)
        self._members.buffer(event)
        self._pacing.pushed(event.worker)
        self._planner.pushed(event, now)
        return [*self._check_size(event, now), *self._settle(now)]

    def _on_query(self, event: events.Query, now: float) -> list[events.Action]:
        """Record how fast a member trains; answer whether it is to push."""
        self.membership.seen(event.worker, now)
        if (member := self._sender_of(event)) is None:
            epoch = self.membership.epoch
            return [refusals.not_member(event.worker, event.incarnation, event.step, epoch)]
        if event.step <= member.last_step:  # of a round that is over: it must not touch the records
            return [events.Answer(event.worker, event.step, event.local_steps, ready=True)]
        fellows = self._scheduler.live_fellows(event.worker)
        answer = self._pacing.report(event, fellows, self._lifecycle.is_ending, now)
        return [] if answer is None else [answer]

    def _on_leave(self, event: events.Leave, now: float) -> list[events.Action]:
        actions = self._change(list(self.membership.leave(event.worker, event.incarnation)), now)
        diverged = event.cause == "diverged" and not self._scheduler.live()
        return [*actions, *(self._stop("diverged", now) if diverged else [])]

    def _on_presence(
        self,
        event: events.WorkerAlive | events.WorkerDisconnected | events.ProcessStalled,
        now: float,
    ) -> list[events.Action]:
        self.membership.observe(event, now)
        return []

    def _on_push_rejected(self, event: events.PushRejected, now: float) -> list[events.Action]:
        """Count a push that was refused before it came here."""
        self.membership.seen(event.worker, now)
        self.counters.reject(event.reason, event.worker)
        step = self._members[event.worker].last_step + 1 if event.worker in self._members else 0
        gave_up = self._give_up(event.worker, step, now)
        return [*gave_up, *self._offend(event.worker, event.reason, now)]

    def _on_failed(self, event: events.Failed, now: float) -> list[events.Action]:
        """Expel the sender, let nobody wait for what the failure has cut off, save the state.

        Such an event is a bug of ours; it costs one worker's place, not the run. The core may have
        stopped halfway: a snapshot makes sure that a restarted shard goes on from the same state.
        With --quarantine_after the sender is kept out for a term.
        """
        worker = event.worker
        incarnation = event.incarnation or self.membership.incarnation_of(worker)
        self.counters.reject(refusals.FAULT, worker)
        self._quarantine.record(worker, refusals.FAULT)
        refusal = refusals.fault(event, incarnation, self.membership.epoch)
        actions: list[events.Action] = [refusal]
        if self.membership.admits(worker, incarnation):
            actions += self._expel_sender(worker, incarnation, now)
        actions += self._reply_to_stuck(now)
        actions += self._settle(now)
        return [*actions, *self.snapshot_if_new(force=True)]

    # -- other events -----------------------------------------------------------------------

    def _on_evaluation_pull(self, event: events.EvaluationPull, now: float) -> list[events.Action]:
        """Send the whole model to an observer."""
        del now
        return [events.EvaluationReply(event.observer, self.whole())]

    def _on_epoch(self, event: events.MembershipEpoch, now: float) -> list[events.Action]:
        if event.started:
            self._lifecycle.start()
        if not self.membership.leads:
            self._follower.receive(event, self.groups)
            self._scheduler.expect(event.joiners)
        actions = self._expel(list(self.membership.follow(event, now)), now)
        if not self.membership.leads:
            self._scheduler.follow(event.draws)
            for arrivals in self._scheduler.release_late(event.over):
                actions += self._release(arrivals, now)
        # Settle in any case: a push may have waited for just this number.
        return [*actions, *self._settle(now)]

    def _on_unreachable(self, event: events.WorkerUnreachable, now: float) -> list[events.Action]:
        return self._expel(list(self.membership.expel(event.member)), now)

    def _on_stop(self, event: events.Stop, now: float) -> list[events.Action]:
        """End the run; an interrupted one first waits for the pushes that are under way."""
        return self._stop(event.reason, now, waits=event.reason == "interrupted")

    def _on_tick(self, event: events.Tick, now: float) -> list[events.Action]:
        del event, now
        return []

    def _do_what_is_due(self, now: float) -> list[events.Action]:
        """Do what time has made due."""
        lifecycle = self._lifecycle
        actions = self._expel(list(self.membership.expire(now)), now)
        if unreachable := self.membership.unreachable(now):
            actions.append(events.WorkersUnreachable(tuple(unreachable)))
        if lifecycle.start_is_due(now):
            actions += self._settle(now, announces=True)
        if self._scheduler.is_due(now):
            actions += self._settle(now)
        patience = self.membership.lease_seconds
        if self.membership.leads and self._scheduler.is_stalled(now, patience):
            actions += self._publish(self._over())
        if lifecycle.limit_is_due(now):
            actions += self._stop("max_seconds", now)
        if why := lifecycle.drain_is_over(now, self._scheduler.live(), self.model.lags):
            actions += self._stop(why, now)
        if lifecycle.snapshot_is_due(now):
            actions += self.snapshot_if_new()
        return actions

    # -- admission --------------------------------------------------------------------------

    def _refusal_of_join(self, join: events.Join, now: float) -> events.Reject | None:
        """Return why this incarnation of a worker may not join; None where it may."""
        epoch = self.membership.epoch
        if not 1 <= join.worker <= self.config.nb_workers:
            return refusals.id_out_of_range(join, self.config.nb_workers, epoch)
        if (seconds := self._quarantine_left(join.worker)) > 0:
            return refusals.quarantined(join, 0, seconds, epoch)
        holder = self.membership.holder(join, now)
        return None if holder is None else refusals.id_taken(join, holder, epoch)

    def _refusal_of_stranger(self, event: events.Pull | events.Push, step: int) -> events.Reject:
        """Refuse a request, or a push of this step, of a worker that is no member."""
        epoch = self.membership.epoch
        if (seconds := self._quarantine_left(event.worker)) > 0:
            return refusals.quarantined(event, step, seconds, epoch)
        return refusals.not_member(event.worker, event.incarnation, step, epoch)

    def _quarantine_left(self, worker: int) -> float:
        """Return how long a worker's term still lasts; at the run's end it may come."""
        return 0.0 if self._lifecycle.is_over else self._quarantine.seconds_left(worker)

    def _sender_of(self, event: events.Pull | events.Push | events.Query) -> Member | None:
        """Return the member that sent this; None where its incarnation is not one."""
        admitted = self.membership.admits(event.worker, event.incarnation)
        return self._members.get(event.worker) if admitted else None

    def _usable_base(self, event: events.Pull | events.Push) -> int | None:
        """Return the version the worker holds, if this generation of the shard has had it."""
        base = event.base_version
        known = base is not None and base <= self.version
        if not known or event.generation != self.config.generation:
            return None
        if isinstance(event, events.Push) and not self.model.in_step(event.base_version):
            return None
        return base

    def _epoch_fits(self, push: events.Push) -> bool:
        """Return whether a push knows its group's last change, and no epoch that nobody issued.

        A following shard may receive an epoch from a worker first; such a push waits for it.
        """
        invented = self.membership.leads and push.epoch > self.membership.epoch
        return self._scheduler.epoch_is_current(push.worker, push.epoch) and not invented

    def _note_lost_updates(self, event: events.Pull | events.Push) -> None:
        """Count the updates that a crash has undone: a worker has seen a version of before it."""
        generations_ago = self.config.generation - event.generation
        undone = 1 <= generations_ago <= self.config.generations_undone
        seen = event.base_version
        if undone and seen is not None and self.config.budget.can_reach(seen):
            self.counters.note_lost_updates(seen)

    # -- offences ---------------------------------------------------------------------------

    def _check_size(self, push: events.Push, now: float) -> list[events.Action]:
        """Refuse a push that has just been accepted if it is too large.

        It stays in its round, which it completes as any push does, but nothing of it is applied: no
        group waits for a worker that sends nothing else. The refusal is sent immediately; the model
        that the worker then requests is sent when its round is over.
        """
        why = self._guard.check(push)
        if why is None:
            return []
        self._members[push.worker].request = None
        self.counters.reject(refusals.OUTLIER, push.worker)
        refusal = refusals.outlier(push, why, self.membership.epoch)
        return [refusal, *self._offend(push.worker, refusals.OUTLIER, now)]

    def _offend(self, worker: int, reason: str, now: float) -> list[events.Action]:
        """Record an offence; expel a worker that has offended too often.

        Shard 0 does that by what arrives there; the others follow as with any worker that leaves.
        """
        self._quarantine.record(worker, reason)
        if not self.membership.leads or self.membership.state_of(worker) == "left":
            return []
        if not self._quarantine.offend(worker):
            return []
        self._quarantine.expel(worker)
        incarnation = self._members.incarnation_of(worker)
        return self._change(list(self.membership.leave(worker, incarnation)), now)

    def _expel_sender(self, worker: int, incarnation: int, now: float) -> list[events.Action]:
        """End a membership, or its part in the round where membership is shard 0's to end."""
        member = self._members.get(worker)
        if member is not None:
            member.request = None  # it has been answered
        if self.membership.leads:
            if self._quarantine.is_on:
                self._quarantine.expel(worker)
            return self._change(list(self.membership.leave(worker, incarnation)), now)
        if member is not None:
            self._withdraw(worker)
        return [events.WorkersUnreachable((events.WorkerIncarnation(worker, incarnation),))]

    def _reply_to_stuck(self, now: float) -> list[events.Action]:
        """Reply to live workers whose push is gone, or its round over, if they may proceed."""
        stuck = []
        for worker in self._scheduler.live():
            member = self._members[worker]
            if member.submitted and not self._scheduler.has_submitted(worker):
                member.submitted = []
                self.counters.reject(refusals.FAULT, worker)
            waits = member.waiting is not None
            if member.request is not None and not waits and self._scheduler.may_proceed(worker):
                member.may_proceed = True
                stuck.append(worker)
        return self._reply(stuck, now)

    # -- membership -------------------------------------------------------------------------

    def _change(self, changes: Sequence[Change], now: float) -> list[events.Action]:
        """Carry changes of membership into the rounds, and publish them to the other shards."""
        if not changes:
            return []
        actions: list[events.Action] = []
        for verb, worker in changes:
            member = self._members.add(worker)
            if verb == "join":
                self._scheduler.join(worker, self.membership.epoch)
            else:
                actions += self._forget(worker, member)
        self._lifecycle.present(len(self._scheduler.joining()), now)
        return [*actions, *self._settle(now, announces=True)]

    def _forget(self, worker: int, member: Member) -> list[events.Action]:
        """End a worker's part in its round; if it still waits here, it must send Hello again."""
        self._scheduler.leave(worker, self.membership.epoch)
        self.model.forget(worker)
        self._pacing.left(worker)
        self._planner.left(worker)
        self._follower.left(worker)
        waiting, request = member.waiting, member.request
        if waiting is not None and not self._guard.has_refused(worker, waiting.step):
            self.counters.reject("left", worker)
            self._members.cancel_push(worker)
        self._members.drop_push(worker)
        member.request, member.may_proceed = None, False
        if request is None:
            return []
        epoch = self.membership.epoch
        return [refusals.not_member(worker, member.incarnation, request.step, epoch)]

    def _expel(self, changes: Sequence[Change], now: float) -> list[events.Action]:
        """End memberships; notify those without a request too: they may live.

        One that has returned to shard 0 would else finish there what this shard has finished.
        """
        returned = {worker for verb, worker in changes if verb == "join"}
        known = {worker: self._members.get(worker) for _, worker in changes}
        silent = [
            worker
            for worker, member in known.items()
            if worker not in returned and member is not None and member.request is None
        ]
        actions = self._change(changes, now)
        epoch, may_have_left = self.membership.epoch, not self.membership.leads
        for worker in silent:
            incarnation = self._members.incarnation_of(worker)
            actions.append(refusals.not_member(worker, incarnation, 0, epoch, may_have_left))
        return actions

    def _publish(self, over: Mapping[int, int] | None = None) -> list[events.Action]:
        """Announce to the other shards who is live, and what they shall not hold any longer."""
        if not self.has_started:  # a restarted shard 0 must not empty rounds that wait elsewhere
            return []
        return [events.NewEpoch(self._epoch_of(self.membership.epoch, over))]

    def _over(self) -> dict[int, int]:
        """Return live worker -> the newest step of it that is over here."""
        given_up = self._scheduler.over().items()
        return {each: max(step, self._members[each].applied_step) for each, step in given_up}

    def _epoch_of(
        self, number: int, over: Mapping[int, int] | None = None
    ) -> events.MembershipEpoch:
        """Return the message that announces an epoch with everybody who is present."""
        live = self._scheduler.present()
        incarnations = tuple(self.membership.incarnation_of(worker) for worker in live)
        formed = self._planner.formed or self._follower.formed
        draws, joiners = self._scheduler.draws(), self._scheduler.joiners()
        return events.MembershipEpoch(
            number, live, self.has_started, formed, incarnations, draws, joiners, over or {}
        )

    # -- rounds -----------------------------------------------------------------------------

    def _settle(self, now: float, announces: bool = False) -> list[events.Action]:
        """Release every round that is complete and reply to whoever may proceed.

        Args:
            now: In seconds.
            announces: Whether membership has changed, of which the other shards are notified; also
                of changes that come about here.
        """
        actions: list[events.Action] = []
        if not self.has_started:
            return actions
        while True:
            actions += self._submit_buffered(now)
            advance = self._scheduler.advance(now)
            if advance.has_entered and not announces:
                self.membership.begin_epoch()  # of which the replies to those who wait here know
            announces |= self.membership.leads and (advance.has_drawn or advance.has_entered)
            for arrivals in advance.released:
                actions += self._release(arrivals, now)
            for worker in advance.proceeding:  # a joiner whose push is here waits for its round
                member = self._members[worker]
                member.may_proceed = member.buffered is None
            actions += self._reply(advance.proceeding, now)
            if not advance.released and not advance.proceeding:
                if (changed := self._regroup(now)) is None:
                    return [*actions, *self._publish()] if announces else actions
                actions += changed

    def _submit_buffered(self, now: float) -> list[events.Action]:
        """Let pushes of live workers into their round; one of a newer epoch waits for that.

        One that has waited while its group changed is refused and sent again, like any that comes
        late: the other shards may have refused it, and would merge it with others than this one.
        """
        actions: list[events.Action] = []
        for worker, push in self._members.buffered():
            member = self._members[worker]
            known = push.epoch <= self.membership.epoch
            known = known and not self._follower.defers(worker, member.last_step)
            if not known or not self._scheduler.is_live(worker):
                continue
            if self._epoch_fits(push):
                if member.submitted:  # the worker has given it up: it has one request at a time
                    self._scheduler.withdraw(worker, member.submitted[-1].step)
                self._members.promote(worker)
                self._scheduler.submit(worker, push.step, now)
            else:
                self._members.cancel_push(worker)
                member.request = None
                member.may_proceed = self._scheduler.may_proceed(worker)  # it may pull instead
                actions.append(refusals.stale_epoch(push, self.membership.epoch))
        return actions

    def _withdraw(self, worker: int) -> None:
        """Drop a push that waits: a worker that requests the model does not wait for it any more.

        Nor does a worker that proceeded after another shard's reply: the round that its push would
        wait for here is not the one that it does there.
        """
        waiting = self._members[worker].waiting
        if waiting is None or self._guard.has_refused(worker, waiting.step):
            return
        self.counters.reject("left", worker)
        self._members.cancel_push(worker)
        self._scheduler.withdraw(worker, waiting.step)
        self._members[worker].may_proceed = self._scheduler.may_proceed(worker)

    def _give_up(self, worker: int, step: int, now: float) -> list[events.Action]:
        """Take note that a push was refused, of which other shards may have accepted their part.

        There it waits for the others' pushes, which the state server must not hold back.
        """
        self._pacing.pushed(worker)
        if self._scheduler.has_submitted(worker):
            return []
        self._scheduler.withdraw(worker, step)
        return self._settle(now)

    def _release(self, arrivals: Sequence[ArrivalToken], now: float) -> list[events.Action]:
        """Apply one complete round, but for pushes that were refused since."""
        found = self._members.take_submitted(arrivals)
        accepted = [each for each in found if not self._guard.has_refused(each.worker, each.step)]
        pushes = [each for each in accepted if self._brings_examples(each)]
        self._pacing.released([each.worker for each in arrivals])
        if different := self._other_steps(pushes):
            return different
        if self._lifecycle.is_over or self._lifecycle.is_spent:
            return []
        empty = [each for each in accepted if not self._brings_examples(each)]
        empty_parts = sum(push.batch_parts for push in empty)
        if not pushes:
            if empty:  # the script's batch is consumed, though nobody here had a row of it
                self.model.clock.count(empty_parts, empty[0].optimizer)
            return []
        version, live = self.version, self._scheduler.live()
        brought = [
            Arrival(
                worker=push.worker,
                update=push.update,
                base_version=push.base_version,
                step=push.step,
                lag=push.lag,
                samples=push.samples,
                learning_rate=push.learning_rate,
                loss_scale=push.loss_scale,
                overflow=push.overflow,
                optimizer=push.optimizer,
                batch_parts=push.batch_parts,
                change=push.change,
                blocks=push.blocks,
            )
            for push in pushes
        ]
        if not self.model.has_rate(brought):
            return self._end_without_rate(pushes, now)
        kept = self.model.apply(
            brought,
            self._members.oldest_base(live, version),
            self._scheduler.share_of(pushes[0].worker),
            empty_parts,
        )
        kept_keys = {(arrival.worker, arrival.step) for arrival in kept}
        merged = [push for push in pushes if (push.worker, push.step) in kept_keys]
        group = self._scheduler.name_of(arrivals[0].worker)
        for push in pushes:
            if (push.worker, push.step) in kept_keys:
                self._count_applied(push, version, group)
            else:
                self.counters.reject("stale", push.worker)
        if not kept:
            return []
        num_sharing = len(live) if len(self.groups) > 1 else len(arrivals)
        self.averages.merge([push.aux for push in merged], num_sharing)
        self.counters.updated(group)
        self._lifecycle.updated(now)
        reason = self.config.budget.end(self.version, self.samples)
        return self._spend(reason, now) if reason else []

    def _spend(self, reason: str, now: float) -> list[events.Action]:
        """Apply nothing more; the end of the run is shard 0's to declare."""
        if not self.membership.leads:
            self._lifecycle.is_spent = True
            return []
        return self._stop(reason, now)

    def _end_without_rate(self, pushes: Sequence[events.Push], now: float) -> list[events.Action]:
        """Reject a round, and end the run: its script's schedule has no finite rate any more.

        The schedule counts what was applied, so it would stay at this step for ever. The weights
        stay as they are.
        """
        for push in pushes:
            self.counters.reject(refusals.NO_RATE, push.worker)
        return self._spend("diverged", now)

    def _brings_examples(self, push: events.Push) -> bool:
        """Return whether there is anything to merge: a round may have been without an example.

        Where gradients travel, one without examples may hold what a codec has kept back.
        """
        has_steps = bool(push.local_steps) and not self.model.method.takes_local_steps
        return push.samples > 0 or has_steps

    def _other_steps(self, pushes: Sequence[events.Push]) -> list[events.Action]:
        """Refuse a round whose workers step different optimizers; there is no mean of these."""
        if len({push.optimizer for push in pushes}) <= 1:
            return []
        first, epoch = pushes[0], self.membership.epoch
        other = next(push for push in pushes if push.optimizer != first.optimizer)
        for push in pushes:
            self._members[push.worker].request = None
        return [refusals.other_optimizer(push, (first, other), epoch) for push in pushes]

    def _count_applied(self, push: events.Push, version: int, group: str) -> None:
        """Count a push that was merged into the update that follows `version`."""
        self.model.count(push.samples, push.repeats_batch)
        self.counters.applied(push, version, group)
        self._guard.applied(push.worker)
        self._members[push.worker].staleness = version - push.computed_at

    # -- groups by speed --------------------------------------------------------------------

    def _regroup(self, now: float) -> list[events.Action] | None:
        """Change groups if that is due, all complete rounds being released; None: it is not."""
        planner, scheduler = self._planner, self._scheduler
        if self._follower.is_waiting:
            return self._follow_regrouping()
        if not planner.is_on or not scheduler.live():
            return None
        if self._lifecycle.is_ending:
            if not planner.abandon():
                return None
            scheduler.resume()
            return []
        if not planner.has_target:
            live, current = scheduler.live(), scheduler.groups
            if scheduler.joining() or not planner.propose(now, live, self.version, current):
                return None
            scheduler.pause()
        return self._form_groups() if scheduler.is_quiescent() else None

    def _form_groups(self) -> list[events.Action]:
        """Change groups (shard 0); everybody has finished a round and waits."""
        epoch = self.membership.begin_epoch()
        steps = {worker: self._members[worker].last_step for worker in self._scheduler.live()}
        formed = self._planner.form(epoch, steps)
        self._scheduler.regroup(formed.groups, epoch)
        return [
            events.GroupsChanged(formed.groups, self._planner.speeds_found),
            events.NewEpoch(self._epoch_of(epoch)),
        ]

    def _follow_regrouping(self) -> list[events.Action] | None:
        """Change groups (other shards) once all pushes from before have arrived."""
        formed = self._follower.ready(self._members.last_steps(), self._scheduler.present())
        if formed is None:
            return None
        self._scheduler.regroup(formed.groups, formed.epoch)
        return []

    # -- replies ----------------------------------------------------------------------------

    def _reply(self, workers: Iterable[int], now: float) -> list[events.Action]:
        """Reply to those of the workers that have a request and may proceed.

        Requests with the same key, by the down codec, are answered with the same arrays.
        """
        replies: list[events.Action] = []
        gathered: dict[Hashable, ModelReply] = {}
        for worker in workers:
            member = self._members[worker]
            if (request := member.take_request(self._lifecycle.is_over)) is None:
                continue
            step = request.step
            wanted = ModelRequest(
                *(worker, step, request.base_version, member.push_bytes, self.is_behind)
            )
            key = self.model.sharing_key(wanted)
            found = gathered[key] = gathered.get(key) or self.model.gather(wanted)
            self.model.record_reply(worker, found)
            member.replied(found.version, self.model.method.overlap)
            self._planner.replied(worker, step, now)
            held_seconds = now - member.requested_at
            group = self._scheduler.name_of(worker)
            self.counters.replied(group, held_seconds if step else 0.0)
            staleness, mean = member.staleness if step else 0, self.averages.mean
            replies.append(self._reply_of(worker, step, found, mean, held_seconds, staleness))
        return replies

    def _reply_of(
        self,
        worker: int,
        step: int,
        found: ModelReply,
        aux: Float32 | None,
        held_seconds: float = 0.0,
        staleness: int = 0,
    ) -> events.Reply:
        """Return the message of a reply to a worker, or to an observer (0)."""
        return events.Reply(
            worker=worker,
            step=step,
            operation=found.operation,
            update=found.update,
            version=found.version,
            epoch=self.membership.epoch,
            learning_rate=self.model.learning_rate,
            loss_scale=self.model.loss_scale,
            schedule_counts=self.model.schedule_counts,
            samples=self.samples,
            stop_reason=self._lifecycle.announced_reason,
            held_seconds=held_seconds,
            staleness=staleness,
            aux=aux,
        )

    # -- the end ----------------------------------------------------------------------------

    def _stop(self, reason: str, now: float, waits: bool = False) -> list[events.Action]:
        """End the run, once; first wait for pushes under way (`waits`), or for newest weights."""
        lags = self.model.lags and bool(self._scheduler.live())
        phase = self._lifecycle.request_stop(reason, now, waits or lags)
        if phase is None:
            return []
        if phase is RunPhase.DRAINING:
            idle = self._members.idle()
            for worker in idle:
                self._members[worker].may_proceed = True
            return self._reply(idle, now)
        replies = self._reply(self._members.requesting(), now)
        return [*replies, *self.snapshot_if_new(force=True), events.RunEnded(reason)]

    # -- state ------------------------------------------------------------------------------

    def snapshot_if_new(self, force: bool = False) -> list[events.Action]:
        """Have the state saved if anything was applied since it was, or in any case."""
        if not self._lifecycle.takes_snapshot(self.version, force):
            return []
        return [events.SaveSnapshot(self.version, self.snapshot())]

    def _parts(self) -> dict[str, _CorePart]:
        """Return the parts by their names in files, which never change with the attributes'."""
        return {
            "model": self.model,
            "averages": self.averages,
            "counters": self.counters,
            "lifecycle": self._lifecycle,
            "membership": self.membership,
            "members": self._members,
            "scheduler": self._scheduler,
            "guard": self._guard,
            "quarantine": self._quarantine,
            "pacing": self._pacing,
            "planner": self._planner,
            "follower": self._follower,
        }

    def state_dict(self, soft: bool = False) -> State:
        """Return the state that outlives a restart, as plain data whose arrays are copies.

        Args:
            soft: Return the rest instead: who is here, and what is under way. A shard that comes
                back forgets it and finds it out anew; a journal is replayed over it. Its arrays are
                not copied, and never changed.
        """
        states = {name: part.state_dict(soft) for name, part in self._parts().items()}
        if soft:
            return {name: to_plain(state) for name, state in states.items()}
        return {"generation": self.config.generation, **states}

    def snapshot(self) -> State:
        """Return the durable state, to be read by another thread once, while this one goes on."""
        states = {
            name: part.state_dict(False) for name, part in self._parts().items() if name != "model"
        }
        return {"generation": self.config.generation, **states, "model": self.model.snapshot()}

    def load_state_dict(self, state: State, soft: bool = False) -> None:
        """Take back what `state_dict` gave; the soft state after the other.

        The generation is the caller's to count. Without the soft state everybody must join again.
        """
        for name, part in self._parts().items():
            part.load_state_dict(from_plain(state[name]) if soft else state[name], soft)
        if not soft:
            self._resumed()

    def _resumed(self) -> None:
        """Go on from a version at which nobody has joined."""
        self.counters.resumed(self.version)
        epoch = self.membership.epoch
        formed = self._planner.resumed(epoch) or self._follower.resumed(epoch)
        if formed is not None:
            self._scheduler.regroup(formed.groups, formed.epoch)
        waits = formed is not None and self._scheduler.waits_for_start
        self._lifecycle.resumed(self.version, waits)

    _handlers: ClassVar[dict[type, Callable[..., list[events.Action]]]] = {
        events.Join: _on_join,
        events.Pull: _on_pull,
        events.Push: _on_push,
        events.Query: _on_query,
        events.EvaluationPull: _on_evaluation_pull,
        events.WorkerAlive: _on_presence,
        events.WorkerDisconnected: _on_presence,
        events.ProcessStalled: _on_presence,
        events.Leave: _on_leave,
        events.MembershipEpoch: _on_epoch,
        events.WorkerUnreachable: _on_unreachable,
        events.PushRejected: _on_push_rejected,
        events.Stop: _on_stop,
        events.Tick: _on_tick,
        events.Failed: _on_failed,
    }
