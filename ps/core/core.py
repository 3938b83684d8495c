"""The core of one parameter server shard, as a sans-IO state machine.

The interface of the shard's core is ``handle(event, now) -> [action]`` and ``next_deadline()``. The
shard's core (a state machine) never waits, reads no clock and holds no lock. The gRPC server, the
Simulator and the tests all send the same types of events to the shard's core. Equal events lead to
equal states of the core, bit for bit, so a restarted shard can replay a journal of its events.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation
from thinwire.ops.kernels import Kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.methods.validation import check_averages
from thinwire.ops.push_head import PushOrigin
from thinwire.ops.sync.base import ArrivalToken
from thinwire.ops.types import State
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core import events, refusals
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.counters import Counters
from thinwire.ps.core.lifecycle import RunLifecycle, RunPhase
from thinwire.ps.core.members import CoreConfig, Member, MemberTable
from thinwire.ps.core.membership import Change, Membership
from thinwire.ps.core.model import model_for
from thinwire.ps.core.pacing_service import PacingService
from thinwire.ps.core.policy_states import have_one_form
from thinwire.ps.core.quarantine import Quarantine, UpdateGuard
from thinwire.ps.core.regrouper import RegroupFollower, RegroupPlanner
from thinwire.ps.core.scheduler import RoundScheduler
from thinwire.ps.core.serialization import from_plain, to_plain

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class _CorePart(Protocol):
    """A part of the shard's core (such as its counters) that can save and restore its state."""

    def state_dict(self, soft: bool) -> State:
        """Return the durable (checkpointed) state of a part of the shard's core; with `soft`, the
        state that a restart without a journal loses.
        """

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the state of a part of the shard's core: first the durable (checkpointed) state,
        then the soft state, which only a journal keeps.
        """


#: Names of the core's parts that keep their state when a training script starts the next model.
_OF_RUN = (
    *("counters", "lifecycle", "membership", "members", "scheduler", "quarantine"),
    *("planner", "follower"),
)


class PsCore:
    """State and rules of one parameter server (PS) shard.

    The shard's core owns parts (for example its membership and its counters) that use neither the
    core nor each other. A part of the core returns data, and the core turns the data into actions
    for its caller. Other modules may read the attributes `model`, `counters`, `averages`,
    `membership`, `rounds` and `config` of a shard's core, and call the core's read-only methods.

    Attributes:
        rounds: Workers, waiting pushes, worker groups and workers' iteration counts of this shard;
            other modules must not change the `Rounds` object.
        is_behind: True while events arrive faster than the shard's core handles them. The owner of
            the core (server or Simulator) sets `is_behind`. While `is_behind` is True, the core
            sends the replies that are cheapest to compute.
    """

    def __init__(
        self,
        config: CoreConfig,
        method: Method,
        theta: Float32,
        kernels: Kernels,
        membership: Membership,
        averages: WorkerAverages | None = None,
    ) -> None:
        """Start the shard with its initial weights as version 0 of the model.

        Args:
            config: Settings of the run: its budget of updates or examples, its learning rates and
                its time intervals.
            method: Training method, which consists of policies (codec, optimizer, synchronization
                and others).
            theta: Initial weights [n] float32 of this shard; the core updates the array in place.
            kernels: Implementation of the array operations on weights and updates.
            membership: Record of the workers in the run: a Coordinator on shard 0, a
                FollowerMembership on all other shards.
            averages: Values that shard 0 averages over the workers in addition to the weights; None
                if the run averages no such values.

        Raises:
            ConfigurationError: The method adds privacy noise only to the weights, but the run also
                averages other values.
        """
        self.config, self.membership = config, membership
        self.model = model_for(method, theta, kernels, config)
        self.averages = averages or WorkerAverages()
        check_averages(method, self.averages.size)
        self.counters = Counters()
        self._members = MemberTable()
        rule = method.sync
        self._scheduler = RoundScheduler(rule, config.generation, follows=not membership.leads)
        self.rounds = self._scheduler.rounds
        self._lifecycle = RunLifecycle(config, rule.waits_for_start)
        self._guard, self._quarantine = UpdateGuard(config.guards), Quarantine(config.guards)
        self._pacing = PacingService(method.pacer)
        self._planner = RegroupPlanner(rule.auto if membership.leads else None, config.nb_workers)
        self._follower = RegroupFollower()
        self.is_behind = False

    def continue_run_of(self, before: PsCore) -> None:
        """Continue a run with the next model of a training script, which this core holds.

        The run's version number, its counts of examples and seconds, and its counters continue in
        this core, as after a restart. All workers must join the run again. The learning rate
        schedule of the script's optimizer continues from the batch count in this core's settings.

        Args:
            before: Core with the script's previous model, which must handle no more events. This
                core has a higher generation (number of restarts) and has handled no event.
        """
        self.model.go_on_from(before.version, before.samples)
        parts, former = self._parts(), before._parts()
        for name in _OF_RUN:
            parts[name].load_state_dict(former[name].state_dict(False), soft=False)
        self._resumed()
        if before.has_started:
            self._lifecycle.start()

    def continue_from(self, state: State, same_optimizer: bool) -> list[str]:
        """Continue the run of a saved shard core with changed settings, before the first event is
        handled.

        The run's weights, version number, counters, and counts of examples and seconds continue
        from the saved core. Every other part of the core is restored if its saved state has
        unchanged keys (for averages, also unchanged array shapes), and otherwise starts empty.

        Args:
            state: Durable state of the saved core, as `state_dict` returned the state.
            same_optimizer: True if the optimizers have the same classes as the saved core's
                optimizers.

        Returns:
            Descriptions of the core's parts that are not restored and start empty, for a log line.
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
        """Process one event of the shard, and return the actions that the caller of `handle` must
        perform, in order.
        """
        self._quarantine.elapse(now)
        actions = self._handlers[type(event)](self, event, now)
        return [*actions, *self._do_what_is_due(now)]

    def next_deadline(self) -> float | None:
        """Return the time at which the shard's core must get a Tick event; None if at no time."""
        parts = (self.membership, self._lifecycle, self.rounds)
        deadlines = [part.next_deadline() for part in parts]
        return min((when for when in deadlines if when is not None), default=None)

    # -- read-only methods for the owner ----------------------------------------------------

    @property
    def version(self) -> int:
        """Model version: the number of updates applied to the shard's weights so far."""
        return self.model.version

    @property
    def samples(self) -> int:
        """Number of training examples in all updates that the shard has applied so far."""
        return self.model.samples

    @property
    def stop_reason(self) -> str | None:
        """Reason for the end of the run; None if the run has not ended."""
        return self._lifecycle.stop_reason

    @property
    def ended_at(self) -> float | None:
        """Time at which the run ended, by this shard's clock; None if the run has not ended."""
        return self._lifecycle.ended_at

    @property
    def has_started(self) -> bool:
        """True if the run has started, so that the shard merges rounds of pushes."""
        return self._lifecycle.has_started

    def seconds(self) -> float:
        """Return the run's seconds from the first pull to the last update, over all restarts."""
        return self._lifecycle.seconds()

    def known_workers(self) -> tuple[int, ...]:
        """Return the ids of all workers that ever joined this shard, in order of first Hello."""
        return tuple(self._members)

    def incarnation_of(self, worker: int) -> int:
        """Return the incarnation (process number) in a worker's last Hello message; 0 if the worker
        has sent no Hello message.
        """
        return self._members.incarnation_of(worker)

    def whole(self) -> events.Reply:
        """Return a reply with a copy of the shard's whole model, for an observer (an evaluator)."""
        whole = ModelReply(Operation.FULL, self.model.whole(), self.version, "full")
        return self._reply_of(0, 0, whole, self.averages.statistics)

    def guard_summary(self) -> dict[str, Any]:
        """Return refused pushes, quarantines and the median norm of updates, for summary.json.

        The summary of refused pushes is {} if the run has no limits on updates, and the shard has
        refused no push.
        """
        if not (self.config.guards.active or self._guard.has_ever_refused):
            return {}
        return {**self._quarantine.summary(), "median_norm": self._guard.median()}

    def summary(self) -> dict[str, Any]:
        """Return the counters of the core's parts by name, for the run's summary.json."""
        groups = {
            "groups": [list(group) for group in self.rounds.groups],
            "by_group": self.counters.groups.summary(),
            **self._planner.summary(),
        }
        guards = self.guard_summary()
        return {
            "groups": groups,
            **self._pacing.summary(),
            "weighting": self.model.memory(),
            "down": self.model.downlink.summary(),
            **({"guards": guards} if guards else {}),
        }

    # -- messages of workers ----------------------------------------------------------------

    def _on_join(self, event: events.Join, now: float) -> list[events.Action]:
        if (refusal := self._refusal_of_join(event, now)) is not None:
            return [refusal]
        member = self._members.add(event.worker)
        member.incarnation, member.request = event.incarnation, None
        actions: list[events.Action] = []
        # Publish one membership epoch for each change. When a new process of a worker replaces an
        # old process, the other shards must receive an epoch without the worker, so that they drop
        # the pushes of the old process.
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
        """Check a worker's push and buffer the push for its round; a retried push or a push with a
        copy of the weights only gets a reply.
        """
        self.membership.seen(event.worker, now)
        step, origin = event.head.step, event.origin
        if (member := self._sender_of(event)) is None:
            return [self._refusal_of_stranger(event, step)]
        if self._guard.has_refused(event.worker, step):
            return [refusals.outlier(event, "already refused", self.membership.epoch)]
        self._lifecycle.exchanged(now)
        self._note_lost_updates(origin)
        if member.is_late(event):
            return []
        usable, member.requested_at = self._usable_base(origin), now
        member.push_bytes = event.num_bytes
        if event.is_copy and usable is not None:
            self.model.take(event.update)
        # A second push of an accepted step is a retry. The shard must not apply the update of a
        # retry, which only requests the reply to the first push. `_reply` sends nothing while the
        # first push waits for its round.
        if event.is_copy or step <= member.last_step or self._lifecycle.is_over:
            member.open_request(step, usable, now)
            return self._reply([event.worker], now)
        if not self._epoch_fits(event):
            return [refusals.stale_epoch(event, self.membership.epoch)]
        if usable is None:
            self.counters.reject("generation", event.worker)
            generation, epoch = self.config.generation, self.membership.epoch
            refusal = refusals.stale_generation(event, self.version, generation, epoch)
            return [refusal, *self._give_up(event.worker, step, now)]
        if origin.base_checksum is not None:
            self.model.downlink.verify(event.worker, usable, origin.base_checksum)
        member.open_request(step, usable, now)
        self._members.buffer(event)
        self._pacing.pushed(event.worker)
        self._planner.pushed(event, now)
        return [*self._check_size(event, now), *self._settle(now)]

    def _on_query(self, event: events.Query, now: float) -> list[events.Action]:
        """Record a worker's speed, and answer the worker's question whether it must push now."""
        self.membership.seen(event.worker, now)
        if (member := self._sender_of(event)) is None:
            epoch = self.membership.epoch
            return [refusals.not_member(event.worker, event.incarnation, event.step, epoch)]
        # The worker has already pushed the step of a late query. A late query must not change the
        # records of worker speed, which now describe the worker's next round.
        if event.step <= member.last_step:
            return [events.Answer(event.worker, event.step, event.local_steps, ready=True)]
        fellows = self.rounds.fellows(event.worker)
        answer = self._pacing.report(event, fellows, self._lifecycle.is_ending, now)
        return [] if answer is None else [answer]

    def _on_leave(self, event: events.Leave, now: float) -> list[events.Action]:
        actions = self._change(list(self.membership.leave(event.worker, event.incarnation)), now)
        diverged = event.cause == "diverged" and not self.rounds.live()
        return [*actions, *(self._stop("diverged", now) if diverged else [])]

    def _on_presence(
        self,
        event: events.WorkerAlive | events.WorkerDisconnected | events.ProcessStalled,
        now: float,
    ) -> list[events.Action]:
        self.membership.observe(event, now)
        return []

    def _on_push_rejected(self, event: events.PushRejected, now: float) -> list[events.Action]:
        """Count a worker's push that a gRPC stream handler refused before the core received it."""
        self.membership.seen(event.worker, now)
        self.counters.reject(event.reason, event.worker)
        step = self._members[event.worker].last_step + 1 if event.worker in self._members else 0
        gave_up = self._give_up(event.worker, step, now)
        return [*gave_up, *self._offend(event.worker, event.reason, now)]

    def _on_failed(self, event: events.Failed, now: float) -> list[events.Action]:
        """Expel the worker whose event made the core raise an exception; other workers continue.

        An exception in the shard's core is a bug, which ends one worker's membership but not the
        run. With the flag --quarantine_after, a worker that is expelled after an exception of the
        core is quarantined (excluded for a time).
        """
        worker = event.worker
        incarnation = event.incarnation or self.membership.incarnation_of(worker)
        self.counters.reject(refusals.FAULT, worker)
        self._quarantine.record(worker, refusals.FAULT)
        refusal = refusals.fault(event, incarnation, self.membership.epoch)
        actions: list[events.Action] = [refusal]
        if self.membership.admits(worker, incarnation):
            actions += self._expel_sender(worker, incarnation, now)
        # An exception in the core may have interrupted the merge of a round. The round's pushes are
        # then removed but not applied, and without a reply, their workers would wait for ever.
        actions += self._reply_to_stuck(now)
        actions += self._settle(now)
        # An exception may have left the core's state half changed. Save the half-changed state, so
        # that a restarted shard continues from this state and does not replay the event that has
        # raised the exception.
        return [*actions, *self.snapshot_if_new(force=True)]

    # -- other events -----------------------------------------------------------------------

    def _on_evaluation_pull(self, event: events.EvaluationPull, now: float) -> list[events.Action]:
        """Reply to an observer (for example the evaluator) with the shard's whole model."""
        return [events.EvaluationReply(event.observer, self.whole())]

    def _on_epoch(self, event: events.MembershipEpoch, now: float) -> list[events.Action]:
        if event.started:
            self._lifecycle.start()
        if not self.membership.leads:
            self._follower.receive(event, self.rounds.groups)
            self.rounds.expect(event.joiners)
        actions = self._expel(list(self.membership.follow(event, now)), now)
        if not self.membership.leads:
            self.rounds.follow(event.draws)
            # Two shards may have merged different pushes in their rounds. Each shard may then wait
            # for a worker that waits at the other shard. To end this deadlock, merge the waiting
            # pushes up to the steps that shard 0 has merged or given up.
            for arrivals in self.rounds.release_late(event.over):
                actions += self._release(arrivals, now)
        # Release complete rounds even if a membership epoch changes no worker, because a buffered
        # push may have waited for the epoch.
        return [*actions, *self._settle(now)]

    def _on_unreachable(self, event: events.WorkerUnreachable, now: float) -> list[events.Action]:
        return self._expel(list(self.membership.expel(event.member)), now)

    def _on_stop(self, event: events.Stop, now: float) -> list[events.Action]:
        """End the run on the shard; after an interrupt signal, first wait for pushes in flight."""
        return self._stop(event.reason, now, waits=event.reason == "interrupted")

    def _on_tick(self, event: events.Tick, now: float) -> list[events.Action]:
        return []

    def _do_what_is_due(self, now: float) -> list[events.Action]:
        """Do everything in the shard's core whose deadline has passed, and return the resulting
        actions.
        """
        lifecycle = self._lifecycle
        actions = self._expel(list(self.membership.expire(now)), now)
        if unreachable := self.membership.unreachable(now):
            actions.append(events.WorkersUnreachable(tuple(unreachable)))
        if lifecycle.start_is_due(now):
            actions += self._settle(now, announces=True)
        if self._scheduler.is_due(now):
            actions += self._settle(now)
        # Rounds of pushes count as stalled after the length of a worker's lease. Within a lease, a
        # round may wait for a worker that has died and is not expelled yet.
        patience = self.membership.lease_seconds
        if self.membership.leads and self._scheduler.is_stalled(now, patience):
            actions += self._publish(self._over())
        if lifecycle.limit_is_due(now):
            actions += self._stop("max_seconds", now)
        if why := lifecycle.drain_is_over(now, self.rounds.live(), self.model.lags):
            actions += self._stop(why, now)
        if lifecycle.snapshot_is_due(now):
            actions += self.snapshot_if_new()
        return actions

    # -- admission --------------------------------------------------------------------------

    def _refusal_of_join(self, join: events.Join, now: float) -> events.Reject | None:
        """Return the refusal of a worker's Hello message; None if the worker may join the run."""
        epoch = self.membership.epoch
        if not 1 <= join.worker <= self.config.nb_workers:
            return refusals.id_out_of_range(join, self.config.nb_workers, epoch)
        if (seconds := self._quarantine_left(join.worker)) > 0:
            return refusals.quarantined(join, 0, seconds, epoch)
        holder = self.membership.holder(join, now)
        return None if holder is None else refusals.id_taken(join, holder, epoch)

    def _refusal_of_stranger(self, event: events.Pull | events.Push, step: int) -> events.Reject:
        """Return the refusal of a pull (step 0) or push by a worker that is not a member of the
        run.
        """
        epoch = self.membership.epoch
        if (seconds := self._quarantine_left(event.worker)) > 0:
            return refusals.quarantined(event, step, seconds, epoch)
        return refusals.not_member(event.worker, event.incarnation, step, epoch)

    def _quarantine_left(self, worker: int) -> float:
        """Return the remaining seconds of a worker's quarantine (exclusion); 0 after the run's
        end.
        """
        return 0.0 if self._lifecycle.is_over else self._quarantine.seconds_left(worker)

    def _sender_of(self, event: events.Pull | events.Push | events.Query) -> Member | None:
        """Return the member record of the worker that sent an event; None if the incarnation
        (process number) in the event is not a member of the run.
        """
        admitted = self.membership.admits(event.worker, event.incarnation)
        return self._members.get(event.worker) if admitted else None

    def _usable_base(self, held: events.Pull | PushOrigin) -> int | None:
        """Return the model version of a worker's weights; None if the version is unusable.

        A model version is unusable if it is from another generation (restart of the shard) or newer
        than the shard's version. For a push, a model version is also unusable if the model accepts
        no push that was computed from the version (`ShardModel.in_step`).
        """
        base = held.base_version
        known = base is not None and base <= self.version
        if not known or held.generation != self.config.generation:
            return None
        if isinstance(held, PushOrigin) and not self.model.in_step(held.base_version):
            return None
        return base

    def _epoch_fits(self, push: events.Push) -> bool:
        """Return whether a push's membership epoch exists and its worker group has not changed."""
        # A membership epoch above the shard's epoch is valid on all shards except shard 0, because
        # a worker may receive an epoch before the shard does. A push stays buffered until its epoch
        # arrives.
        invented = self.membership.leads and push.epoch > self.membership.epoch
        return self._scheduler.epoch_is_current(push.worker, push.epoch) and not invented

    def _note_lost_updates(self, held: events.Pull | PushOrigin) -> None:
        """Count the updates that a crash of the shard has undone, if a worker has weights from
        before the crash.
        """
        generations_ago = self.config.generation - held.generation
        undone = 1 <= generations_ago <= self.config.generations_undone
        seen = held.base_version
        if undone and seen is not None and self.config.budget.can_reach(seen):
            self.counters.note_lost_updates(seen)

    # -- offences ---------------------------------------------------------------------------

    def _check_size(self, push: events.Push, now: float) -> list[events.Action]:
        """Return the refusal of a buffered push whose update is too large; [] if the update is
        accepted.
        """
        why = self._guard.check(push)
        if why is None:
            return []
        # A push that is refused as too large stays in its round and counts for the round's
        # completion, but `_release` skips its update. If the push were removed, a worker that sends
        # only too large updates would block its whole worker group. The next pull of the push's
        # worker is answered when the round is over.
        self._members[push.worker].request = None
        self.counters.reject(refusals.OUTLIER, push.worker)
        refusal = refusals.outlier(push, why, self.membership.epoch)
        return [refusal, *self._offend(push.worker, refusals.OUTLIER, now)]

    def _offend(self, worker: int, reason: str, now: float) -> list[events.Action]:
        """Record a worker's offence (a refused push); expel the worker after too many offences.

        Only shard 0 expels workers for offences (refused pushes), and counts only the pushes that
        shard 0 itself has refused. All shards except shard 0 receive each change of the membership
        as a numbered membership epoch.
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
        """Expel a worker; on a shard other than 0, drop its push and report it to shard 0."""
        member = self._members.get(worker)
        if member is not None:
            member.request = None  # a refusal has answered the worker's request
        if self.membership.leads:
            if self._quarantine.is_on:
                self._quarantine.expel(worker)
            return self._change(list(self.membership.leave(worker, incarnation)), now)
        if member is not None:
            self._withdraw(worker)
        return [events.WorkersUnreachable((events.WorkerIncarnation(worker, incarnation),))]

    def _reply_to_stuck(self, now: float) -> list[events.Action]:
        """Reply to live workers that an exception in the core has left without a reply."""
        stuck = []
        for worker in self.rounds.live():
            member = self._members[worker]
            # The synchronization rule has released the worker's push in a complete round, but an
            # exception occurred before the model applied the push.
            if member.submitted and not self.rounds.has_submitted(worker):
                member.submitted = []
                self.counters.reject(refusals.FAULT, worker)
            waits = member.waiting is not None
            if member.request is not None and not waits and self.rounds.may_proceed(worker):
                member.may_proceed = True
                stuck.append(worker)
        return self._reply(stuck, now)

    # -- membership -------------------------------------------------------------------------

    def _change(self, changes: Sequence[Change], now: float) -> list[events.Action]:
        """Add joined workers to the rounds, remove workers that left, and publish the changes."""
        if not changes:
            return []
        actions: list[events.Action] = []
        for verb, worker in changes:
            member = self._members.add(worker)
            if verb == "join":
                self._scheduler.join(worker, self.membership.epoch)
            else:
                actions += self._forget(worker, member)
        self._lifecycle.present(len(self.rounds.joining()), now)
        return [*actions, *self._settle(now, announces=True)]

    def _forget(self, worker: int, member: Member) -> list[events.Action]:
        """Remove a worker that has left the run from all parts of the core; refuse its open
        request.
        """
        self._scheduler.leave(worker, self.membership.epoch)
        self.model.downlink.forget(worker)
        self._pacing.left(worker)
        self._planner.left(worker)
        self._follower.left(worker)
        waiting, request = member.waiting, member.request
        # Cancel a push that was not applied, so that the shard accepts a retry of the push after
        # the worker has returned. Drop a push that was refused as too large: the refusal was sent
        # and counted, so the shard must accept no retry of the push's step.
        if waiting is not None and not self._guard.has_refused(worker, waiting.head.step):
            self.counters.reject("left", worker)
            self._members.cancel_push(worker)
        self._members.drop_push(worker)
        member.request, member.may_proceed = None, False
        if request is None:
            return []
        epoch = self.membership.epoch
        return [refusals.not_member(worker, member.incarnation, request.step, epoch)]

    def _expel(self, changes: Sequence[Change], now: float) -> list[events.Action]:
        """Apply changes of membership, and send a refusal to each expelled worker without an open
        request.
        """
        # The process of an expelled worker may run, and may already have joined shard 0 again.
        # Without a refusal, an expelled worker would finish a round on shard 0 that this shard has
        # already ended without the worker's push.
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
        """Return an action that sends the live workers and the epoch number to all other shards.

        Args:
            over: Worker id -> newest step that this shard has merged or given up. The other shards
                then merge their waiting pushes up to these steps. None to make no shard merge
                waiting pushes.
        """
        # A restarted shard 0 has no live workers yet. A membership epoch without workers would
        # remove the pushes that wait for their rounds on all other shards.
        if not self.has_started:
            return []
        return [events.NewEpoch(self._epoch_of(self.membership.epoch, over))]

    def _over(self) -> dict[int, int]:
        """Return the newest step that this shard has merged or given up, for each live worker of a
        worker group with waiting pushes.
        """
        steps = self.rounds.over().items()
        return {worker: max(step, self._members[worker].applied_step) for worker, step in steps}

    def _epoch_of(
        self, number: int, over: Mapping[int, int] | None = None
    ) -> events.MembershipEpoch:
        """Return the announcement of a membership epoch, with all live and joining workers."""
        live = self.rounds.present()
        incarnations = tuple(self.membership.incarnation_of(worker) for worker in live)
        formed = self._planner.formed or self._follower.formed
        draws, joiners = self.rounds.draws(), self.rounds.joiners()
        return events.MembershipEpoch(
            number, live, self.has_started, formed, incarnations, draws, joiners, over or {}
        )

    # -- rounds -----------------------------------------------------------------------------

    def _settle(self, now: float, announces: bool = False) -> list[events.Action]:
        """Merge the pushes of all complete rounds, and reply to the workers that may proceed.

        Args:
            now: Current time of this shard's clock, in seconds.
            announces: True if the membership has changed, so that a membership epoch must be
                published. Shard 0 publishes a membership epoch even if `announces` is False, if it
                announces a round or makes joining workers live.
        """
        actions: list[events.Action] = []
        if not self.has_started:
            return actions
        # Repeat until no round is merged and no worker group changes. After a merged round, a
        # joining worker may become live, whose buffered push then completes the next round. A
        # change of the worker groups can complete rounds of the new groups.
        while True:
            actions += self._submit_buffered(now)
            advance = self._scheduler.advance(now)
            # If a joining worker has become live, begin a new membership epoch before the replies
            # are sent, so that the workers' next pushes name the new epoch. A shard other than
            # shard 0 then buffers these pushes until it has received the epoch and made the worker
            # live.
            if advance.has_entered and not announces:
                self.membership.begin_epoch()
            announces |= self.membership.leads and (advance.has_drawn or advance.has_entered)
            for arrivals in advance.released:
                actions += self._release(arrivals, now)
            # A joining worker whose push is already buffered gets a reply when the push's round is
            # complete, not when the worker becomes live.
            for worker in advance.proceeding:
                member = self._members[worker]
                member.may_proceed = member.buffered is None
            actions += self._reply(advance.proceeding, now)
            if not advance.released and not advance.proceeding:
                if (changed := self._regroup(now)) is None:
                    return [*actions, *self._publish()] if announces else actions
                actions += changed

    def _submit_buffered(self, now: float) -> list[events.Action]:
        """Submit the buffered pushes of live workers to rounds, if the shard knows the pushes'
        membership epoch.
        """
        actions: list[events.Action] = []
        for worker, push in self._members.buffered():
            member = self._members[worker]
            known = push.epoch <= self.membership.epoch
            known = known and not self._follower.defers(worker, member.last_step)
            if not known or not self.rounds.is_live(worker):
                continue
            if self._epoch_fits(push):
                # A worker has at most one open request (unanswered push or pull), so a worker with
                # a buffered push has given up its older submitted push.
                if member.submitted:
                    self.rounds.withdraw(worker, member.submitted[-1].head.step)
                self._members.promote(worker)
                self._scheduler.submit(worker, push.head.step, now)
            else:
                # The worker group of the push has changed while the push was buffered. Another
                # shard may have refused the push already and would merge a retry of the push in
                # another round, so this shard must refuse the push. The worker then sends the push
                # again, or pulls.
                self._members.cancel_push(worker)
                member.request = None
                member.may_proceed = self.rounds.may_proceed(worker)
                actions.append(refusals.stale_epoch(push, self.membership.epoch))
        return actions

    def _withdraw(self, worker: int) -> None:
        """Drop a worker's push that waits for its round, because the worker now pulls the model."""
        waiting = self._members[worker].waiting
        # A push that was refused as too large is not dropped, because its round counts the push
        # without its update. An accepted push is dropped when its worker pulls: the worker may have
        # proceeded after another shard's reply, and would be in different rounds on two shards.
        if waiting is None or self._guard.has_refused(worker, waiting.head.step):
            return
        self.counters.reject("left", worker)
        self._members.cancel_push(worker)
        self.rounds.withdraw(worker, waiting.head.step)
        self._members[worker].may_proceed = self.rounds.may_proceed(worker)

    def _give_up(self, worker: int, step: int, now: float) -> list[events.Action]:
        """Record that this shard has refused its part of a worker's push; other shards may have
        accepted their parts of the push.
        """
        # On shards that have accepted their part of a push, the push waits for its worker group.
        # The pacer must count the push's worker as waiting, or the pacer would let the worker group
        # take more local steps.
        self._pacing.pushed(worker)
        if self.rounds.has_submitted(worker):
            return []
        self.rounds.withdraw(worker, step)
        return self._settle(now)

    def _release(self, arrivals: Sequence[ArrivalToken], now: float) -> list[events.Action]:
        """Apply the pushes of one complete round as an update of the weights; skip refused pushes
        and pushes without examples.
        """
        submitted = self._members.take_submitted(arrivals)
        accepted = [
            push for push in submitted if not self._guard.has_refused(push.worker, push.head.step)
        ]
        pushes = [push for push in accepted if self._brings_examples(push)]
        self._pacing.released([token.worker for token in arrivals])
        if different := self._other_steps(pushes):
            return different
        if self._lifecycle.is_over or self._lifecycle.is_spent:
            return []
        empty = [push for push in accepted if not self._brings_examples(push)]
        empty_parts = sum(push.head.batch_parts for push in empty)
        if not pushes:
            # The training script has consumed a batch even if no worker of the round had an example
            # of the batch, so the learning rate schedule must count the batch.
            if empty:
                self.model.optimizer.clock.count(empty_parts, empty[0].head.optimizer)
            return []
        version, live = self.version, self.rounds.live()
        released = [
            Arrival(
                worker=push.worker,
                update=push.update,
                base_version=push.origin.base_version,
                lag=push.origin.lag,
                head=push.head,
                change=push.change,
                blocks=push.blocks,
            )
            for push in pushes
        ]
        if not self.model.has_rate(released):
            return self._end_without_rate(pushes, now)
        applied = self.model.apply(
            released,
            self._members.oldest_base(live, version),
            self._scheduler.share_of(pushes[0].worker),
            empty_parts,
        )
        applied_keys = {(arrival.worker, arrival.head.step) for arrival in applied}
        merged = [push for push in pushes if (push.worker, push.head.step) in applied_keys]
        group = self.rounds.name_of(arrivals[0].worker)
        for push in pushes:
            if (push.worker, push.head.step) in applied_keys:
                self._count_applied(push, version, group)
            else:
                self.counters.reject("stale", push.worker)
        if not applied:
            return []
        num_sharing = len(live) if len(self.rounds.groups) > 1 else len(arrivals)
        self.averages.merge([push.aux for push in merged], num_sharing)
        self.counters.updated(group)
        self._lifecycle.updated(now)
        reason = self.config.budget.end(self.version, self.samples)
        return self._spend(reason, now) if reason else []

    def _spend(self, reason: str, now: float) -> list[events.Action]:
        """End the run on shard 0; on another shard, apply no more updates until shard 0 ends the
        run.
        """
        if not self.membership.leads:
            self._lifecycle.is_spent = True
            return []
        return self._stop(reason, now)

    def _end_without_rate(self, pushes: Sequence[events.Push], now: float) -> list[events.Action]:
        """Reject the pushes of a round and end the run, because the training script's learning rate
        schedule returns no finite learning rate.
        """
        # A learning rate schedule counts only applied batches. If a round is not applied because
        # the learning rate is not finite, the schedule returns the same learning rate for every
        # later round, so no later round can be applied.
        for push in pushes:
            self.counters.reject(refusals.NO_RATE, push.worker)
        return self._spend("diverged", now)

    def _brings_examples(self, push: events.Push) -> bool:
        """Return whether a push has an update to merge; a push may be computed on no examples."""
        # If workers push gradients, a push without examples may hold the codec's residual (the
        # unsent part of the gradients) of earlier rounds.
        has_steps = bool(push.head.local_steps) and not self.model.method.takes_local_steps
        return push.head.samples > 0 or has_steps

    def _other_steps(self, pushes: Sequence[events.Push]) -> list[events.Action]:
        """Return refusals of a round's pushes if the pushes are for different optimizers; else [].

        Updates for different optimizers change different variables, so no mean of such updates is
        defined.
        """
        if len({push.head.optimizer for push in pushes}) <= 1:
            return []
        first, epoch = pushes[0], self.membership.epoch
        other = next(push for push in pushes if push.head.optimizer != first.head.optimizer)
        for push in pushes:
            self._members[push.worker].request = None
        return [refusals.other_optimizer(push, (first, other), epoch) for push in pushes]

    def _count_applied(self, push: events.Push, version: int, group: str) -> None:
        """Count a push that was merged into the update of the weights of version `version`."""
        # With several optimizers, the step's first update has counted the examples.
        if not push.head.repeats_batch:
            self.model.samples += push.head.samples
        self.counters.applied(push, version, group)
        self._guard.applied(push.worker)
        self._members[push.worker].staleness = version - push.origin.computed_at

    # -- groups by speed --------------------------------------------------------------------

    def _regroup(self, now: float) -> list[events.Action] | None:
        """Begin or continue a change of the worker groups, after all complete rounds are merged.

        Returns:
            Actions of a change of the worker groups, after which complete rounds must be released
            again; None if no change of the worker groups is due.
        """
        planner, rounds = self._planner, self.rounds
        if self._follower.is_waiting:
            return self._follow_regrouping()
        if not planner.is_on or not rounds.live():
            return None
        if self._lifecycle.is_ending:
            if not planner.abandon():
                return None
            rounds.regroup(rounds.groups)
            return []
        if not planner.has_target:
            live, current = rounds.live(), rounds.groups
            if rounds.joining() or not planner.propose(now, live, self.version, current):
                return None
            rounds.pause()
        return self._form_groups() if rounds.is_quiescent() else None

    def _form_groups(self) -> list[events.Action]:
        """Change the worker groups on shard 0, while all live workers wait after their round."""
        epoch = self.membership.begin_epoch()
        steps = {worker: self._members[worker].last_step for worker in self.rounds.live()}
        formed = self._planner.form(epoch, steps)
        self._scheduler.regroup(formed.groups, epoch)
        return [
            events.GroupsChanged(formed.groups, self._planner.speeds_found),
            events.NewEpoch(self._epoch_of(epoch)),
        ]

    def _follow_regrouping(self) -> list[events.Action] | None:
        """Change the worker groups on a shard other than shard 0, if all pushes for the old worker
        groups have arrived; else return None.
        """
        formed = self._follower.ready(self._members.last_steps(), self.rounds.present())
        if formed is None:
            return None
        self._scheduler.regroup(formed.groups, formed.epoch)
        return []

    # -- replies ----------------------------------------------------------------------------

    def _reply(self, workers: Iterable[int], now: float) -> list[events.Action]:
        """Reply to the open requests of the given workers; skip workers without an open request and
        workers that may not proceed yet.
        """
        replies: list[events.Action] = []
        # Pulls and pushes with equal values of `sharing_key` get replies with the same arrays. The
        # shard therefore computes and stores one reply for a whole round, instead of one reply for
        # each worker.
        gathered: dict[Hashable, ModelReply] = {}
        for worker in workers:
            member = self._members[worker]
            if (request := member.take_request(self._lifecycle.is_over)) is None:
                continue
            step = request.step
            model_request = ModelRequest(
                *(worker, step, request.base_version, member.push_bytes, self.is_behind)
            )
            key = self.model.downlink.sharing_key(model_request)
            reply = gathered[key] = gathered.get(key) or self.model.gather(model_request)
            self.model.downlink.record_reply(worker, reply)
            member.replied(reply.version, self.model.method.overlap)
            self._planner.replied(worker, step, now)
            held_seconds = now - member.requested_at
            group = self.rounds.name_of(worker)
            self.counters.replied(group, held_seconds if step else 0.0)
            staleness, mean = member.staleness if step else 0, self.averages.mean
            replies.append(self._reply_of(worker, step, reply, mean, held_seconds, staleness))
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
        """Return a reply with the model or its change, to a worker or an observer (worker id 0)."""
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
        """Drain (wait for pushes in flight) or end the run; a run that has ended stays unchanged.

        Args:
            reason: Reason for the end of the run.
            now: Current time of this shard's clock, in seconds.
            waits: True to wait for pushes in flight before the run ends. If live workers have newer
                weights than this shard, the core waits for pushes in flight even if `waits` is
                False.
        """
        lags = self.model.lags and bool(self.rounds.live())
        phase = self._lifecycle.request_stop(reason, now, waits or lags)
        if phase is None:
            return []
        if phase is RunPhase.DRAINING:
            idle = self._members.idle()
            for worker in idle:
                self._members[worker].may_proceed = True
            return self._reply(idle, now)
        replies = self._reply(self._members.requesting(), now)
        why = self._lifecycle.stop_reason or reason
        return [*replies, *self.snapshot_if_new(force=True), events.RunEnded(why)]

    # -- state ------------------------------------------------------------------------------

    def snapshot_if_new(self, force: bool = False) -> list[events.Action]:
        """Return an action that saves the core's state; [] without new updates since the last save.

        Args:
            force: True to save the shard's state even if no update was applied since the last
                snapshot.
        """
        if not self._lifecycle.takes_snapshot(self.version, force):
            return []
        return [events.SaveSnapshot(self.version, self.snapshot())]

    def _parts(self) -> dict[str, _CorePart]:
        """Return the core's parts by name; the names are checkpoint keys, which must not change."""
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
        """Return the shard core's durable (checkpointed) state as plain data with copied arrays.

        A restarted shard continues from the durable (checkpointed) state, which holds weights,
        counters and finished steps.

        Args:
            soft: True to return, instead of the durable (checkpointed) state, the soft state:
                leases, rounds in progress, open requests. A restarted shard without a journal loses
                the soft state and rebuilds the soft state from new events. A shard with a journal
                restores its durable state and its soft state and then replays the journal's events.
                The soft state is returned without copies of arrays, which the core never changes.
        """
        states = {name: part.state_dict(soft) for name, part in self._parts().items()}
        if soft:
            return {name: to_plain(state) for name, state in states.items()}
        return {"generation": self.config.generation, **states}

    def snapshot(self) -> State:
        """Return the core's durable (checkpointed) state for another thread, which reads the state
        while the core handles events.

        The thread that receives a snapshot of the core may read each array of the snapshot only
        once.
        """
        states = {
            name: part.state_dict(False) for name, part in self._parts().items() if name != "model"
        }
        return {"generation": self.config.generation, **states, "model": self.model.snapshot()}

    def load_state_dict(self, state: State, soft: bool = False) -> None:
        """Restore the shard core's state; load the durable (checkpointed) state before the soft
        state.

        `load_state_dict` does not restore the generation (number of restarts of the shard), which
        the caller of `load_state_dict` counts. If the caller does not load the soft state (leases
        and rounds in progress), all workers must join the run again.
        """
        for name, part in self._parts().items():
            part.load_state_dict(from_plain(state[name]) if soft else state[name], soft)
        if not soft:
            self._resumed()

    def _resumed(self) -> None:
        """Adjust the parts of the core to the model version and worker groups of a restored state,
        before any worker has joined.
        """
        self.counters.resumed(self.version)
        epoch = self.membership.epoch
        formed = self._planner.resumed(epoch) or self._follower.resumed(epoch)
        if formed is not None:
            self._scheduler.regroup(formed.groups, formed.epoch)
        waits = formed is not None and self.rounds.waits_for_start
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
