"""The weights of one PS shard, and the policies that update the weights and compute replies.

If workers all-reduce gradients and take optimizer steps themselves, the shard only holds a copy of
the weights.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink import own_entries
from thinwire.ops.downlink.types import (
    ModelChange,
    ModelReply,
    ModelRequest,
    Operation,
)
from thinwire.ops.frozen import Freezer, Keep, copied
from thinwire.ops.kernels import Kernels
from thinwire.ops.kernels.numpy_ops import union
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers.base import Moment, StepRate
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.optimizers.server import OptimizerUpdate
from thinwire.ops.optimizers.slots import OptimizerState, Slot
from thinwire.ops.types import Kind, ModelSpec, State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext
from thinwire.ps.core.batch_clock import BatchClock
from thinwire.ps.core.downlink import Downlink, lone_push, relayed_round
from thinwire.ps.core.loss_scale import LossScaler
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.policy_states import (
    arrays_in,
    durable,
    have_one_form,
    num_bytes,
    of_workers,
    take_back,
    without_set_rate,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32, Int64


class ShardModel:
    """Weights of one PS shard, with the states of its weighting, optimizer and down (reply) codec.

    Attributes:
        theta: [n] float32 weights of this shard.
        version: Number T of updates that the shard has applied to its weights.
        samples: Number of examples consumed by the applied updates.
        clock: Count of the training script's batches, for its learning rate schedules.
        downlink: The shard's replies to its workers, and its copies of their weights.
        freezer: Copy-on-write protection of the shard's arrays for readers in other threads. The
            freezer is off until the shard has reader threads.
    """

    def __init__(
        self,
        method: Method,
        theta: Float32,
        kernels: Kernels,
        budget: Budget,
        schedule: Schedule,
        spec: ModelSpec | None = None,
        loss_scale: LossScale | None = None,
        clock: BatchClock | None = None,
    ) -> None:
        """Start the shard's model with the initial weights as version 0.

        Args:
            method: Training method, which consists of policies (such as weighting, optimizer and
                codec).
            theta: Initial weights [n] float32 of the shard; the model updates the array in place.
            kernels: Implementation of the array operations.
            budget: Number of updates or examples after which the run ends.
            schedule: Schedule of the run's learning rate.
            spec: Slices of the whole model's weights that the shard holds; None: the shard holds
                one slice.
            loss_scale: Dynamic loss scale of a training script; None: the script does not scale
                losses.
            clock: Count of the batches that the training script has consumed; None: a new count for
                a run with one worker.
        """
        self.method, self.theta, self.kernels = method, theta, kernels
        self.budget, self.schedule = budget, schedule
        self.version = 0
        self.samples = 0
        self.clock = clock or BatchClock(1, method.server.traits.num_optimizers)
        self._weighting = method.weighting.init(len(theta))
        self._server = method.server.init(theta, spec)
        # Arrays of optimizer slots in the last snapshot, which a reader in another thread may still
        # be reading when the next step changes the arrays.
        self._saved_slots: list[NDArray[Any]] = []
        self._scaler = LossScaler(loss_scale)
        self.draw_noise_with(secrets.token_bytes(32))
        self.freezer = Freezer()
        offsets = spec.offsets if spec else (0, len(theta))
        self.downlink = Downlink(method, theta, kernels, offsets, self.freezer)

    def draw_noise_with(self, secret: bytes) -> None:
        """Seed the differential privacy noise with a secret; only a simulation passes a known
        secret.
        """
        self._privacy = self.method.privacy.init(secret)

    def go_on_from(self, version: int, samples: int) -> None:
        """Begin a further model of a training script; the counts of updates and examples continue.

        Args:
            version: Number of updates in the script's earlier phases (models).
            samples: Number of examples consumed in the script's earlier phases (models).
        """
        self.version, self.samples = version, samples
        self._weighting = self.method.weighting.init(len(self.theta), version)

    def continue_from(self, saved: State, same_optimizer: bool) -> list[str]:
        """Take over the weights and counts of a saved shard, even if the saved run had other
        settings.

        The optimizer's saved state is restored if it has the form of the new optimizer's state.
        A run that continues with changed settings takes its learning rate from the new settings.
        The shard's copies of the workers' weights are created again when the workers pull.

        Args:
            saved: Durable state of the saved model, as `state_dict` returned the state.
            same_optimizer: True if the classes of the optimizers are those of the saved optimizers.

        Returns:
            Descriptions of the states that start again, for a log line.
        """
        begin_again = []
        np.copyto(self.theta, saved["theta"])
        self.go_on_from(saved["version"], saved["samples"])
        fresh = self.method.server.save(self._server)
        if same_optimizer and have_one_form(fresh, saved["optimizer"]):
            before = without_set_rate(saved["optimizer"])
            self._server = self.method.server.restore(before, self.theta, self._server)
            self.clock.load_state_dict(saved["clock"])
        else:
            self._server = self.method.server.restore(None, self.theta, self._server)
            begin_again.append("the optimizer's state")
        if have_one_form(self._scaler.state_dict(), saved["loss_scale"]):
            self._scaler.load_state_dict(saved["loss_scale"])
        self._privacy.update(saved["privacy"])
        self.downlink.counts.update(saved["down_counts"])
        return begin_again

    @property
    def kind(self) -> Kind:
        """Kind of values that workers push: gradients, weight deltas, or whole weights."""
        return self.method.kind

    @property
    def lags(self) -> bool:
        """True if the workers hold newer weights than this PS shard."""
        return False

    def in_step(self, base_version: int) -> bool:
        """Return whether a worker with weights of version `base_version` may push without a new
        pull.
        """
        return True

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update, from the run's schedule or the script's optimizer.

        If workers take local optimizer steps, only the workers use this learning rate. If a
        training script has several optimizers, the learning rate is that of the first optimizer.
        """
        rate = self._rate_of(0, Kind.GRADIENT).value
        # Replies and status documents accept finite numbers only. No optimizer uses the learning
        # rate 0 of this line, because `has_rate` rejects the round first.
        return rate if math.isfinite(rate) else 0.0

    def has_rate(self, arrivals: Sequence[Arrival]) -> bool:
        """Return whether the script or schedule gives a finite learning rate for a round's update.

        Args:
            arrivals: Updates in a complete round of pushes, all for one optimizer of the training
                script.
        """
        is_set = any(arrival.head.learning_rate is not None for arrival in arrivals)
        return is_set or math.isfinite(self._rate_of(arrivals[0].head.optimizer).value)

    @property
    def _fraction(self) -> float:
        """Share of the run's budget of updates or examples that is consumed, from 0 to 1."""
        return self.budget.fraction(self.version, self.samples)

    def _rate_of(
        self, optimizer: int, kind: Kind | None = None, set_rate: float | None = None
    ) -> StepRate:
        """Return the learning rate of the next step of one of the script's optimizers.

        Args:
            optimizer: Index of the optimizer among the script's optimizers.
            kind: Kind of the update; None: the kind of the method's updates.
            set_rate: Learning rate that the script sets for this step and all later steps.
        """
        kind, fraction = kind or self.method.kind, self._fraction
        scheduled, batches = self.schedule.rate(fraction), self.clock.batches(optimizer)
        moment = Moment(scheduled, kind, batches, fraction, set_rate)
        return self.method.server.rate(moment, self._server, optimizer)

    @property
    def schedule_counts(self) -> tuple[int, ...]:
        """Batch count at which to read the learning rate schedule of each optimizer of a script."""
        return tuple(
            self._rate_of(number).schedule_count for number in range(self.clock.num_schedules)
        )

    def count(self, samples: int, repeats: bool = False) -> None:
        """Count the examples of an update that the shard has applied.

        Args:
            samples: Number of examples that the update was computed on.
            repeats: True if an earlier update has already counted these examples (a training step
                with several optimizers).
        """
        self.samples += 0 if repeats else samples

    @property
    def loss_scale(self) -> float:
        """Factor of the loss for the next gradients; 0 if the script does not scale losses."""
        return self._scaler.scale

    def apply(
        self,
        arrivals: Sequence[Arrival],
        oldest_base: int,
        share: float = 1.0,
        empty_parts: int = 0,
    ) -> list[Arrival]:
        """Weigh, merge and apply the pushes of one round; if any is applied, add 1 to the model
        version.

        Args:
            arrivals: Updates of a complete round in order of worker id, all for one optimizer of
                the script.
            oldest_base: Oldest version at which a live worker's next push may be computed.
            share: Number of workers in the round's worker group divided by the number of all
                workers. The changes that the scripts of the group's workers made to their weights
                are multiplied by `share`.
            empty_parts: Number of parts (1 / workers) of the script's batches that fell to workers
                without an example in them.

        Returns:
            The arrivals that were applied; the weighting drops arrivals that are too stale.
        """
        set_rates = (arrival.head.learning_rate for arrival in arrivals)
        rates = [rate for rate in set_rates if rate is not None]
        number = arrivals[0].head.optimizer
        # A rate that the script sets also counts if the overflow check skips this step.
        rate = self._rate_of(number, set_rate=rates[0] if rates else None).value
        # After an overflow of the gradient no optimizer steps. The merged round is still a new
        # version of the weights, with the scripts' own changes of weights. As in Keras, no learning
        # rate schedule counts the batch.
        if self._scaler.skips(arrivals):
            self.version += 1
            changed = self._take_changes(arrivals, share)
            skipped = ModelChange(changed, self.version, before_change=self.freezer.before_change)
            self.downlink.record_update(skipped)
            return list(arrivals)
        down = self.downlink
        copies, held = down.backups.copies, down.copies_of(arrivals)
        context = ReleaseContext(self.version, oldest_base, self.kernels, down.seen, copies, held)
        # The weighting may change its arrays in place, while a snapshot still reads the arrays.
        for array in arrays_in(self._weighting):
            self.freezer.before_change(array)
        weighed, self._weighting = self.method.weighting.weigh(arrivals, context, self._weighting)
        if not weighed:
            return weighed
        updates = [arrival.update for arrival in weighed]
        mean = self.method.aggregate.merge(updates, len(self.theta))
        merged = self.method.privacy.release(
            mean, len(updates), len(self.theta), self.version, self._privacy
        )
        changed = self._take_changes(weighed, share)
        lone = lone_push(self.method, arrivals)
        # If privacy noise was added (`merged` is not `mean`), workers cannot repeat the update.
        relayed = None
        if merged is mean:
            relayed = relayed_round(self.method, self.kernels, arrivals, weighed, rate)
        before = own_entries.values_at(lone, self.theta)
        self._before_step(merged)
        touched, self._server = self.method.server.step(
            self.theta,
            merged,
            self.method.kind,
            rate,
            self.kernels,
            self._server,
            number,
        )
        self.version += 1
        self.clock.count(sum(arrival.head.batch_parts for arrival in weighed) + empty_parts, number)
        known = own_entries.find(lone, before, down.seen, self.version)
        # `known` contains the entries that a plain float32 addition reproduces bit for bit. If a
        # pushed entry were not in `known`, a worker that repeats the round would get other bits
        # than the shard.
        if known is not None and lone is not None and len(known.indices) < len(lone.update.values):
            relayed = None
        if changed is None or len(changed):
            touched = None if touched is None or changed is None else union([touched, changed])
        change = ModelChange(touched, self.version, known, relayed, self.freezer.before_change)
        self.downlink.record_update(change)
        return weighed

    def _before_step(self, merged: Update) -> None:
        """Announce an optimizer step to the copy-on-write protection, so that readers in other
        threads get the values before the step.
        """
        keeps_sparse = self.method.server.traits.keeps_sparse
        self.freezer.before_change(self.theta, merged.indices if keeps_sparse else None)
        for array in self._saved_slots:
            self.freezer.before_change(array)

    def _take_changes(self, arrivals: Sequence[Arrival], share: float) -> Int64 | None:
        """Add the changes that scripts made to their weights themselves, before the optimizer step.

        Returns:
            Indices of the changed entries, in ascending order; None: any entry may have changed.
        """
        nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
        if all(arrival.change is None for arrival in arrivals):
            return nothing.indices
        # All scripts of a run make the same change of weights, so the shard must add the change
        # only once in total. The aggregate over a group is weighted with the group's share of all
        # workers. The shares of all merged rounds add up to 1, both if one round contains all
        # workers and if each worker has its own round.
        stepped = [each for each in arrivals if each.head.samples or each.change is not None]
        changes = [arrival.change or nothing for arrival in stepped]
        merged = self.method.aggregate.merge(changes, len(self.theta))
        self.freezer.before_change(self.theta, merged.indices)
        self.kernels.apply(self.theta, merged.indices, merged.values, -share)
        self._server = self.method.server.restore(None, self.theta, self._server)
        return merged.indices

    def take(self, update: Update) -> None:
        """Overwrite the shard's weights [n] with a worker's copy; the model version is unchanged.

        Raises:
            ValueError: The workers of this training method send updates, not whole weights.
        """
        raise ValueError(
            f"a push has {len(update.values)} whole weights instead of an update; only a method "
            "whose workers sum updates among themselves (--collective) sends whole weights"
        )

    def gather(self, request: ModelRequest) -> ModelReply:
        """Return the reply to a worker's request; later updates do not change the reply's
        arrays.
        """
        return self.downlink.gather(request, self.version)

    def memory(self) -> dict[str, int]:
        """Return the number of weight copies that the gradient weighting holds, and its size in
        bytes.
        """
        backups = self.downlink.backups
        size = backups.num_bytes + num_bytes(self._weighting)
        return {"copies": len(backups.copies), "bytes": size}

    def slots(self) -> list[OptimizerState]:
        """Return copies of the states of the training script's optimizers; [] without an
        optimizer.
        """
        states = enumerate(self.method.server.slots(self._server))
        return [OptimizerState(slots, self._rate_of(number).value) for number, slots in states]

    def scale_slots(self) -> list[Slot]:
        """Return the variables of the script's LossScaleOptimizer, except its loss scale."""
        return self._scaler.slots()

    def whole(self) -> Update:
        """Return a frozen copy of all weights of the shard, which later updates do not change."""
        return Update(None, self.freezer.freeze(self.theta))

    def state_dict(self, soft: bool) -> State:
        """Return the model's durable (checkpointed) state with copied arrays, or its `soft` state.

        The model's durable (checkpointed) state holds the weights and the states of the policies
        (weighting, optimizer and codec). The model's soft state, which checkpoints omit, holds the
        last replies to workers and the entries of updates that workers add to their weights
        themselves. The arrays in the model's soft state (the part that checkpoints omit) never
        change.
        """
        return of_workers(self.downlink.state) if soft else self._durable_state(copied)

    def snapshot(self) -> State:
        """Return the model's checkpointed state for another thread, with copy-on-write large
        arrays.
        """
        return self._durable_state(self.freezer.freeze)

    def _durable_state(self, keep: Keep) -> State:
        saved_slots = []

        def keep_slots(array: NDArray[Any]) -> Any:
            saved_slots.append(array)
            return keep(array)

        optimizer = self.method.server.save(self._server, keep_slots)
        self._saved_slots = saved_slots
        return {
            "version": self.version,
            "samples": self.samples,
            "clock": self.clock.state_dict(),
            "theta": keep(self.theta),
            "optimizer": optimizer,
            "loss_scale": self._scaler.state_dict(),
            "privacy": copy.deepcopy(self._privacy),
            "weighting": durable(self._weighting, keep),
            "backups": self.downlink.backups.save(),
            "down_codec": durable(self.downlink.state, keep),
            "down_counts": dict(self.downlink.counts),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the model's state that `state_dict` returned."""
        if soft:
            take_back(self.downlink.state, state)
            return
        self.version, self.samples = state["version"], state["samples"]
        self.clock.load_state_dict(state["clock"])
        np.copyto(self.theta, state["theta"])
        saved = state["optimizer"]
        self._server = self.method.server.restore(saved, self.theta, self._server)
        self._scaler.load_state_dict(state["loss_scale"])
        self._privacy.update(state["privacy"])
        self._weighting.update(state["weighting"])
        take_back(self.downlink.state, state["down_codec"])
        self.downlink.counts.update(state["down_counts"])
        self.downlink.backups.restore(state["backups"])


class CollectiveShardModel(ShardModel):
    """The model of a shard whose workers all-reduce gradients and take optimizer steps themselves.

    Each training round, in which the workers all-reduce gradients, creates one version of the
    weights. If workers take optimizer steps themselves, one push of a round may hold the new
    weights for the shard. If workers take optimizer steps themselves and no push of a round holds
    the new weights, the workers have newer weights than the shard. A worker that joins without
    weights pulls the shard's copy, and requests newer weights from the other workers.
    """

    _copied_version = 0  # version of the copied weights in the array theta

    def go_on_from(self, version: int, samples: int) -> None:
        """Begin a further model of a training script, with weights of the given model version."""
        super().go_on_from(version, samples)
        self._copied_version = version

    @property
    def kind(self) -> Kind:
        """Kind of values in the pushes of workers that take optimizer steps themselves: weights or
        none.
        """
        return Kind.VALUES

    @property
    def lags(self) -> bool:
        """True if the shard's copy of the weights is older than the workers' newest version."""
        return self._copied_version < self.version

    def in_step(self, base_version: int) -> bool:
        """Return whether a worker pushed in the last round and may push before its next pull."""
        return base_version == self.version

    def has_rate(self, arrivals: Sequence[Arrival]) -> bool:
        """Return True, because the workers' optimizers have their own learning rates."""
        return True

    def apply(
        self,
        arrivals: Sequence[Arrival],
        oldest_base: int,
        share: float = 1.0,
        empty_parts: int = 0,
    ) -> list[Arrival]:
        """Count a training round of the workers; copy the new weights if a push of the round holds
        them.
        """
        self.version += 1
        self.clock.count(sum(arrival.head.batch_parts for arrival in arrivals) + empty_parts)
        for arrival in arrivals:
            self.take(arrival.update)
        return list(arrivals)

    def take(self, update: Update) -> None:
        """Copy the whole weights in a worker's update to the shard; ignore a sparse update."""
        if update.indices is None:
            self.freezer.before_change(self.theta)
            np.copyto(self.theta, update.values)
            self._copied_version = self.version

    def gather(self, request: ModelRequest) -> ModelReply:
        """Return a reply with all weights for a worker without weights, else an empty reply."""
        if request.base_version is None:
            return ModelReply(Operation.FULL, self.whole(), self.version, "full")
        nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
        return ModelReply(Operation.NONE, nothing, self.version, "delta")

    def state_dict(self, soft: bool) -> State:
        """Return the model's checkpointed state, or if `soft`, the version of the copied
        weights.
        """
        return {"copied_version": self._copied_version} if soft else super().state_dict(soft)

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the model's state; the weights from a checkpoint count as up to date."""
        if soft:
            self._copied_version = state["copied_version"]
            return
        super().load_state_dict(state, soft)
        self._copied_version = self.version


def model_for(method: Method, theta: Float32, kernels: Kernels, config: CoreConfig) -> ShardModel:
    """Return the shard's model: a CollectiveShardModel if optimizers step only on the workers, else
    a ShardModel.
    """
    num_optimizers = method.server.traits.num_optimizers
    clock = BatchClock(config.nb_workers, num_optimizers, config.first_batches)
    model_type = ShardModel
    if method.collective != THROUGH_PS:
        model_type = CollectiveShardModel
        # The optimizers on the workers step, and the default server optimizer needs no state on the
        # shard.
        method = dataclasses.replace(method, server=OptimizerUpdate())
    return model_type(
        *(method, theta, kernels, config.budget, config.schedule),
        *(config.spec, config.loss_scale, clock),
    )
