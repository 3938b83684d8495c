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
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink import own_entries
from thinwire.ops.downlink.types import (
    ModelReply,
    ModelRequest,
    Operation,
)
from thinwire.ops.frozen import Freezer, Keep, copied
from thinwire.ops.kernels import Kernels
from thinwire.ops.kernels.numpy_ops import union
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.optimizers.server import OptimizerUpdate
from thinwire.ops.optimizers.slots import OptimizerState
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
)
from thinwire.ps.core.shard_optimizer import ShardOptimizer

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class ShardModel:
    """Weights of one PS shard, with the states of its weighting, optimizer and down (reply) codec.

    Attributes:
        theta: [n] float32 weights of this shard.
        version: Number T of updates that the shard has applied to its weights.
        samples: Number of examples consumed by the applied updates.
        optimizer: The optimizer, which steps the weights and knows the learning rates.
        scaler: Loss scale of the training script.
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
        self.budget = budget
        self.version = 0
        self.samples = 0
        self._weighting = method.weighting.init(len(theta))
        self.scaler = LossScaler(loss_scale)
        self.draw_noise_with(secrets.token_bytes(32))
        self.freezer = Freezer()
        clock = clock or BatchClock(1, method.server.traits.num_optimizers)
        self.optimizer = ShardOptimizer(
            *(method, theta, kernels, self.freezer, schedule, spec, clock)
        )
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
        optimizer = self.optimizer
        if not (same_optimizer and optimizer.continue_from(saved["optimizer"], saved["clock"])):
            optimizer.restore(None)
            begin_again.append("the optimizer's state")
        if have_one_form(self.scaler.state_dict(), saved["loss_scale"]):
            self.scaler.load_state_dict(saved["loss_scale"])
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
        rate = self.optimizer.rate(0, self._fraction, Kind.GRADIENT).value
        # Replies and status documents accept finite numbers only. No optimizer uses the learning
        # rate 0 of this line, because `has_rate` rejects the round first.
        return rate if math.isfinite(rate) else 0.0

    def has_rate(self, arrivals: Sequence[Arrival]) -> bool:
        """Return whether the script or schedule gives a finite learning rate for a round's update.

        Args:
            arrivals: Updates in a complete round of pushes, all for one optimizer of the training
                script.
        """
        if any(arrival.head.learning_rate is not None for arrival in arrivals):
            return True
        number = arrivals[0].head.optimizer
        return math.isfinite(self.optimizer.rate(number, self._fraction).value)

    @property
    def _fraction(self) -> float:
        """Share of the run's budget of updates or examples that is consumed, from 0 to 1."""
        return self.budget.fraction(self.version, self.samples)

    @property
    def schedule_counts(self) -> tuple[int, ...]:
        """Batch count at which to read the learning rate schedule of each optimizer of a script."""
        return tuple(
            self.optimizer.rate(number, self._fraction).schedule_count
            for number in range(self.optimizer.clock.num_schedules)
        )

    @property
    def loss_scale(self) -> float:
        """Factor of the loss for the next gradients; 0 if the script does not scale losses."""
        return self.scaler.scale

    def apply(
        self,
        arrivals: Sequence[Arrival],
        oldest_base: int,
        share: float = 1.0,
        empty_parts: int = 0,
    ) -> list[Arrival]:
        """Weigh, merge and apply the pushes of one round; the version grows by 1 if any is applied.

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
        optimizer, down, number = self.optimizer, self.downlink, arrivals[0].head.optimizer
        # A rate that the script sets also counts if the overflow check skips this step.
        set_rate, heads = rates[0] if rates else None, [arrival.head for arrival in arrivals]
        rate = optimizer.rate(number, self._fraction, set_rate=set_rate, heads=heads).value
        # After an overflow of the gradient no optimizer steps. The merged round is still a new
        # version of the weights, with the scripts' own changes of weights. As in Keras, no learning
        # rate schedule counts the batch.
        if self.scaler.skips(arrivals):
            self.version += 1
            down.record_update(optimizer.take_changes(arrivals, share), self.version)
            return list(arrivals)
        copies, held = down.backups.copies, down.copies_of(arrivals)
        context = ReleaseContext(self.version, oldest_base, self.kernels, down.seen, copies, held)
        # The weighting may change its arrays in place, while a snapshot still reads the arrays. The
        # search for the arrays is slow with many workers.
        if self.freezer.has_readers:
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
        changed = optimizer.take_changes(weighed, share)
        lone = lone_push(self.method, arrivals)
        # If privacy noise was added (`merged` is not `mean`), workers cannot repeat the update.
        relayed = None
        if merged is mean:
            relayed = relayed_round(self.method, self.kernels, arrivals, weighed, rate)
        before = own_entries.values_at(lone, self.theta)
        touched = optimizer.step(merged, rate, number)
        self.version += 1
        parts = sum(arrival.head.batch_parts for arrival in weighed)
        optimizer.clock.count(parts + empty_parts, number)
        known = own_entries.find(lone, before, down.seen, self.version)
        # `known` contains the entries that a plain float32 addition reproduces bit for bit. If a
        # pushed entry were not in `known`, a worker that repeats the round would get other bits
        # than the shard.
        if known is not None and lone is not None and len(known.indices) < len(lone.update.values):
            relayed = None
        if changed is None or len(changed):
            touched = None if touched is None or changed is None else union([touched, changed])
        down.record_update(touched, self.version, known, relayed)
        return weighed

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
        """Return the reply to a worker's request; later updates do not change its arrays."""
        return self.downlink.gather(request, self.version)

    def memory(self) -> dict[str, int]:
        """Return the number of the weighting's weight copies, and the weighting's size in bytes."""
        backups = self.downlink.backups
        size = backups.num_bytes + num_bytes(self._weighting)
        return {"copies": len(backups.copies), "bytes": size}

    def slots(self) -> list[OptimizerState]:
        """Return copies of the states of the script's optimizers; [] without an optimizer."""
        return [
            OptimizerState(slots, self.optimizer.rate(number, self._fraction).value)
            for number, slots in enumerate(self.method.server.slots(self.optimizer.state))
        ]

    def whole(self) -> Update:
        """Return a frozen copy of all weights of the shard, which later updates do not change."""
        return Update(None, self.freezer.freeze(self.theta))

    def state_dict(self, soft: bool) -> State:
        """Return the model's durable (checkpointed) state with copied arrays, or its `soft` state.

        The durable state holds the weights and the states of the policies (weighting, optimizer
        and codec). The soft state, which checkpoints omit, holds the last replies to workers and
        the entries of updates that workers add to their weights themselves. The arrays in the soft
        state never change.
        """
        return of_workers(self.downlink.state) if soft else self._durable_state(copied)

    def snapshot(self) -> State:
        """Return the checkpointed state for another thread, with copy-on-write large arrays."""
        return self._durable_state(self.freezer.freeze)

    def _durable_state(self, keep: Keep) -> State:
        return {
            "version": self.version,
            "samples": self.samples,
            "clock": self.optimizer.clock.state_dict(),
            "theta": keep(self.theta),
            "optimizer": self.optimizer.save(keep),
            "loss_scale": self.scaler.state_dict(),
            "privacy": copy.deepcopy(self._privacy),
            "weighting": durable(self._weighting, keep),
            **self.downlink.save(keep),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the model's state that `state_dict` returned."""
        if soft:
            take_back(self.downlink.state, state)
            return
        self.version, self.samples = state["version"], state["samples"]
        self.optimizer.clock.load_state_dict(state["clock"])
        np.copyto(self.theta, state["theta"])
        self.optimizer.restore(state["optimizer"])
        self.scaler.load_state_dict(state["loss_scale"])
        self._privacy.update(state["privacy"])
        self._weighting.update(state["weighting"])
        self.downlink.restore(state)


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
        self.optimizer.clock.count(
            sum(arrival.head.batch_parts for arrival in arrivals) + empty_parts
        )
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
