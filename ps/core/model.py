"""The weights of one shard, and the policies that change them and make replies of them.

Where workers sum and step among themselves, the shard holds a copy of their weights.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import secrets
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.aggregation.aggregates import Mean
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink import own_entries, replicas
from thinwire.ops.downlink.replicas import BackupWeights
from thinwire.ops.downlink.types import (
    ModelReply,
    ModelRequest,
    Operation,
    RelayedRound,
    RelayedUpdate,
    ShardView,
)
from thinwire.ops.frozen import Freezer, Keep, copied
from thinwire.ops.kernels import Kernels
from thinwire.ops.kernels.numpy_ops import union
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.optimizers.server import OptimizerUpdate
from thinwire.ops.optimizers.slots import OptimizerState, Slot
from thinwire.ops.types import Kind, ModelSpec, State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext
from thinwire.ps.core.batch_clock import BatchClock
from thinwire.ps.core.loss_scale import LossScaler
from thinwire.ps.core.members import CoreConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32, Int64

#: Part of a policy's state that is only working memory.
_SCRATCH = "scratch"
#: Counters of replies, and of copies of the weights that workers have.
_COUNTED = ("copies", "full", "delta", "sparse", "relay", "resyncs", "mismatches")


class ShardModel:
    """theta, its version, and the state of Weighting, ServerUpdate and the down codec.

    Attributes:
        theta: [n] float32 weights of this shard.
        version: T, updates applied so far.
        samples: Examples consumed by them.
        clock: Counts the script's own batches.
        freezer: Of the arrays; off until there are threads that read them.
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
        """Start at version 0.

        Args:
            method: The composition.
            theta: [n] float32, owned and updated in place.
            kernels: The array work.
            budget: Of the run.
            schedule: Of the learning rate.
            spec: What it holds, slice by slice; not given: one slice.
            loss_scale: Of a script; not given: losses are not scaled.
            clock: Counts the script's own batches; not given: those of a single worker.
        """
        self.method, self.theta, self.kernels = method, theta, kernels
        self._offsets = spec.offsets if spec else (0, len(theta))
        self.budget, self.schedule = budget, schedule
        self.version = 0
        self.samples = 0
        self.clock = clock or BatchClock(1, method.server.num_optimizers)
        self._weighting = method.weighting.init(len(theta))
        self._down = method.down_codec.init(len(theta))
        self._server = method.server.init(theta, spec)
        self._scaler = LossScaler(loss_scale)
        self.draw_noise_with(secrets.token_bytes(32))
        self._backups = BackupWeights()
        self.freezer = Freezer()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._seen = theta.view()  # for policies, which only read it
        self._seen.flags.writeable = False

    def draw_noise_with(self, secret: bytes) -> None:
        """Draw the noise of releases with this secret; only a simulation knows it beforehand."""
        self._privacy = self.method.privacy.init(secret)

    def go_on_from(self, version: int, samples: int) -> None:
        """Begin a phase of a script, after so many updates and examples of those before."""
        self.version, self.samples = version, samples
        self._weighting = self.method.weighting.init(len(self.theta), version)

    def continue_from(self, saved: State, same_optimizer: bool) -> list[str]:
        """Take over weights and counts of a shard that had other settings.

        The optimizer's state goes on where it has the form of the present optimizer's, and its
        rate is the present one. What is kept for each worker is made when they pull.

        Args:
            saved: What `state_dict` returned.
            same_optimizer: Whether the optimizers are of the classes that they were of.

        Returns:
            What begins again, in words.
        """
        begin_again = []
        np.copyto(self.theta, saved["theta"])
        self.go_on_from(saved["version"], saved["samples"])
        fresh = self.method.server.save(self._server)
        if same_optimizer and have_one_form(fresh, saved["optimizer"]):
            before = without_set_rate(saved["optimizer"])
            self._server = self.method.server.restore(before, self.theta, self._server)
            self.clock.load_state_dict(saved.get("clock", self.clock.state_dict()))
        else:
            self.method.server.set_weights(self.theta, self._server)
            begin_again.append("the optimizer's state")
        if have_one_form(self._scaler.state_dict(), saved["loss_scale"]):
            self._scaler.load_state_dict(saved["loss_scale"])
        self._privacy.update(saved.get("privacy", {}))
        self._counts.update(saved["down_counts"])
        return begin_again

    @property
    def kind(self) -> Kind:
        """The meaning of updates on the wire."""
        return self.method.kind

    @property
    def lags(self) -> bool:
        """Whether workers hold newer weights than this shard."""
        return False

    def in_step(self, base_version: int) -> bool:
        """Return whether a worker at this version may push now; others are to pull again."""
        del base_version
        return True

    @property
    def learning_rate(self) -> float:
        """The rate of the next update, of the run's own schedule or of a script's optimizer.

        Where workers take local steps it is theirs alone. Of several optimizers it is the first
        one's. It is 0 where a script's schedule has no finite rate: nothing steps with that, and
        replies and documents hold finite numbers alone.
        """
        rate = self._rate_of(0)
        return rate if math.isfinite(rate) else 0.0

    def has_rate(self, arrivals: Sequence[Arrival]) -> bool:
        """Return whether there is a finite rate for a release: of its script, or of the schedule.

        Args:
            arrivals: All for the same optimizer.
        """
        is_set = any(each.learning_rate is not None for each in arrivals)
        return is_set or math.isfinite(self._step_rate(arrivals[0].optimizer))

    @property
    def _fraction(self) -> float:
        """The consumed share of the budget."""
        return self.budget.fraction(self.version, self.samples)

    def _rate_of(self, optimizer: int) -> float:
        scheduled, batches = self.schedule.rate(self._fraction), self.clock.batches(optimizer)
        return self.method.server.rate(scheduled, batches, self._server, optimizer)

    def _step_rate(self, optimizer: int) -> float:
        return self.method.step_rate(self._rate_of(optimizer), self._fraction)

    @property
    def schedule_counts(self) -> tuple[int, ...]:
        """The count that the schedule of each optimizer of a script is read at."""
        server, clock, state = self.method.server, self.clock, self._server
        numbers = range(clock.num_schedules)
        return tuple(server.schedule_count(clock.batches(n), state, n) for n in numbers)

    def count(self, samples: int, repeats: bool = False) -> None:
        """Count the examples of an update that was applied.

        Args:
            samples: How many.
            repeats: Whether an earlier update has counted them for the run.
        """
        self.samples += 0 if repeats else samples

    @property
    def loss_scale(self) -> float:
        """The factor of the loss from now on; 0: none."""
        return self._scaler.scale

    def apply(
        self,
        arrivals: Sequence[Arrival],
        oldest_base: int,
        share: float = 1.0,
        empty_parts: int = 0,
    ) -> list[Arrival]:
        """Weigh, merge and apply one release; version + 1 unless nothing was kept.

        With a release with an overflow no optimizer steps. It is a version nevertheless, but as
        with Keras alone no schedule counts its batch.

        Args:
            arrivals: In order of worker id, all for the same optimizer.
            oldest_base: Smallest base version a live worker may still push from.
            share: These workers' part of all workers: of what their scripts change themselves.
            empty_parts: Parts of batches that workers of the release had no example of.

        Returns:
            The arrivals that the weighting kept.
        """
        rates = [each.learning_rate for each in arrivals if each.learning_rate is not None]
        number = arrivals[0].optimizer
        if rates:
            self._server = self.method.server.set_rate(rates[0], self._server, number)
        if self._scaler.skips(arrivals):
            self.version += 1
            changed = self._take_changes(arrivals, share)
            self._down = self.method.down_codec.record_update(
                changed, self.version, self._down, before_change=self.freezer.before_change
            )
            return list(arrivals)
        copies, held = self._backups.copies, self._copies_of(arrivals)
        context = ReleaseContext(self.version, oldest_base, self.kernels, self._seen, copies, held)
        for array in _arrays(self._weighting):
            self.freezer.before_change(array)
        kept, self._weighting = self.method.weighting.weigh(arrivals, context, self._weighting)
        if not kept:
            return kept
        updates = [arrival.update for arrival in kept]
        mean = self.method.aggregate.merge(updates, len(self.theta))
        merged = self.method.privacy.release(
            mean, len(updates), len(self.theta), self.version, self._privacy
        )
        changed = self._take_changes(kept, share)
        lone = self._lone(arrivals)
        relayed = self._relayed(arrivals, kept, number) if merged is mean else None
        before = own_entries.values_at(lone, self.theta)
        self._before_step(merged, number)
        touched, self._server = self.method.server.apply(
            self.theta,
            merged,
            self.method.kind,
            self._step_rate(number),
            self.kernels,
            self._server,
            number,
        )
        self.version += 1
        self.clock.count(sum(each.batch_parts for each in kept) + empty_parts, number)
        own = own_entries.find(lone, before, self._seen, self.version)
        if own is not None and lone is not None and len(own.indices) < len(lone.update.values):
            relayed = None  # adding it has other bits here already
        if changed is None or len(changed):
            touched = None if touched is None or changed is None else union([touched, changed])
        self._down = self.method.down_codec.record_update(
            *(touched, self.version, self._down, own, relayed),
            before_change=self.freezer.before_change,
        )
        return kept

    def _before_step(self, merged: Update, optimizer: int) -> None:
        """Let those who still read the weights, or the optimizer's slots, have them as they are."""
        server = self.method.server
        self.freezer.before_change(self.theta, merged.indices if server.keeps_sparse else None)
        for array in server.changing(self._server, optimizer):
            self.freezer.before_change(array)

    def _take_changes(self, arrivals: Sequence[Arrival], share: float) -> Int64 | None:
        """Add what scripts have changed of their weights themselves, before an optimizer steps.

        All scripts of a run do the same, so theirs is one change: the aggregate of those that had
        a mini-batch counts as much as these workers' group is of all. What all have changed is
        added once, be it in one round or in one release for each.

        Returns:
            The entries that have changed, ascending; None: perhaps all.
        """
        nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
        if all(arrival.change is None for arrival in arrivals):
            return nothing.indices
        stepped = [each for each in arrivals if each.samples or each.change is not None]
        changes = [each.change or nothing for each in stepped]
        merged = self.method.aggregate.merge(changes, len(self.theta))
        self.freezer.before_change(self.theta, merged.indices)
        self.kernels.apply(self.theta, merged.indices, merged.values, -share)
        self.method.server.set_weights(self.theta, self._server)
        return merged.indices

    def _lone(self, arrivals: Sequence[Arrival]) -> Arrival | None:
        """Return the arrival whose worker could add its own entries: its reply may omit them."""
        method = self.method
        can_add = method.down_codec.omits_own_entries and method.router.delivers_all
        if not can_add or not method.server.adds(method.kind):
            return None
        alone = len(arrivals) == 1 and arrivals[0].update.indices is not None
        return arrivals[0] if alone and arrivals[0].change is None else None

    def _relayed(
        self, arrivals: Sequence[Arrival], kept: Sequence[Arrival], optimizer: int
    ) -> RelayedRound | None:
        """Return a release as workers can repeat it, bit for bit; None: they cannot.

        They can where the plain mean of the updates as they came, times one factor, is all that
        changes the weights, by numpy's kernels, which workers have too.
        """
        method = self.method
        can = method.down_codec.relays and method.router.delivers_all
        if not (can and self.kernels.name == "numpy" and isinstance(method.aggregate, Mean)):
            return None
        came = {each.worker: each.update for each in arrivals}
        updates = []
        for each in kept:
            weighed = came[each.worker] is not each.update
            if weighed or each.blocks is None or each.change is not None:
                return None
            updates.append(RelayedUpdate(each.worker, each.step, each.blocks))
        factor = method.server.factor(method.kind, self._step_rate(optimizer))
        return None if factor is None else RelayedRound(tuple(updates), float(np.float32(factor)))

    def take(self, update: Update) -> None:
        """Overwrite the weights [n]; the version stays.

        Raises:
            ValueError: Here only updates change the weights.
        """
        raise ValueError(f"{len(update.values)} values without a round")

    def sharing_key(self, request: ModelRequest) -> Hashable:
        """Return a key; requests with the same one may be answered with the same arrays."""
        return self.method.down_codec.sharing_key(request, self._down)

    def gather(self, request: ModelRequest) -> ModelReply:
        """Return the reply to a request; the arrays are copies."""
        freezer = self.freezer
        view = ShardView(
            *(self._seen, self.version, self.kernels, self._offsets),
            keep=self._kept,
            before_change=freezer.before_change,
        )
        reply = self.method.down_codec.gather(request, view, self._down)
        self._counts["copies"] = max(self._counts["copies"], len(self._down.get("replicas", ())))
        return reply

    def record_reply(self, worker: int, reply: ModelReply) -> None:
        """Record that a worker is being sent this reply."""
        self._counts[reply.kind] += 1
        self._counts["resyncs"] += reply.is_resync
        if not self.method.weighting.needs_copies:
            return
        if self._copy_of(worker, reply.version) is None:  # then it holds the current weights
            self._backups.record(worker, reply.version, self.theta)
        else:
            self._backups.forget(worker)

    def verify(self, worker: int, base_version: int, checksum: int) -> None:
        """Compare a worker's checksum with its copy; if they differ, its next reply holds all."""
        copy = self._copy_of(worker, base_version)
        if copy is None or replicas.checksum([copy]) == checksum:
            return
        self._counts["mismatches"] += 1
        self._counts["resyncs"] += 1
        self._down = self.method.down_codec.forget(worker, self._down)

    def forget(self, worker: int) -> None:
        """Drop the copies of a worker that has left."""
        self._backups.forget(worker)
        self._down = self.method.down_codec.forget(worker, self._down)

    def _copy_of(self, worker: int, base_version: int) -> Float32 | None:
        return self.method.down_codec.replica_of(worker, base_version, self._down)

    def _copies_of(self, arrivals: Sequence[Arrival]) -> dict[int, Float32]:
        """Return the weights of workers that were not sent all, where the weighting needs them."""
        if not self.method.weighting.needs_copies:
            return {}
        found = {each.worker: self._copy_of(each.worker, each.base_version) for each in arrivals}
        return {worker: held for worker, held in found.items() if held is not None}

    def memory(self) -> dict[str, int]:
        """Return the memory that the weighting costs: dense copies, and bytes with all state."""
        num_bytes = self._backups.num_bytes + _num_bytes(self._weighting)
        return {"copies": len(self._backups.copies), "bytes": num_bytes}

    def down_summary(self) -> dict[str, int]:
        """Return the down codec's counters, and the bytes of its state.

        ``copies``: dense ones of workers' weights, the most there were at a time; their bytes
        count. ``full``, ``delta``, ``sparse``, ``relay``: replies by kind. ``resyncs``: whole
        models that were sent although the worker's was known, or because its checksum was wrong
        (``mismatches``).
        """
        now = len(self._down.get("replicas", ()))
        gone = (self._counts["copies"] - now) * self.theta.nbytes
        return {"bytes": _num_bytes(self._down) + gone, **self._counts}

    def slots(self) -> list[OptimizerState]:
        """Return copies of each optimizer's state; none where no script has compiled one."""
        states = enumerate(self.method.server.slots(self._server))
        return [OptimizerState(slots, self._rate_of(number)) for number, slots in states]

    def scale_slots(self) -> list[Slot]:
        """Return what a script's LossScaleOptimizer would hold beside the scale."""
        return self._scaler.slots()

    def whole(self) -> Update:
        """Return all weights of now."""
        return Update(None, self.freezer.freeze(self.theta))

    def _kept(self, array: Float32) -> Any:
        """Return what stands for a copy of weights."""
        return self.freezer.freeze(self.theta if array is self._seen else array)

    def state_dict(self, soft: bool) -> State:
        """Return weights and policies' states, whose arrays are copies; or the soft state.

        Soft are last replies, and entries that workers add by themselves; these arrays never
        change.
        """
        return _of_workers(self._down) if soft else self._durable_state(copied)

    def snapshot(self) -> State:
        """Return what `state_dict` does, to be read by another thread; large arrays are frozen."""
        return self._durable_state(self.freezer.freeze)

    def _durable_state(self, keep: Keep) -> State:
        return {
            "version": self.version,
            "samples": self.samples,
            "clock": self.clock.state_dict(),
            "theta": keep(self.theta),
            "optimizer": self.method.server.save(self._server, keep),
            "loss_scale": self._scaler.state_dict(),
            "privacy": copy.deepcopy(self._privacy),
            "weighting": _durable(self._weighting, keep),
            "backups": self._backups.save(),
            "down_codec": _durable(self._down, keep),
            "down_counts": dict(self._counts),
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        if soft:
            _take_back(self._down, state)
            return
        self.version, self.samples = state["version"], state["samples"]
        # A run of flags may go on from an earlier version, which had no such count.
        self.clock.load_state_dict(state.get("clock", self.clock.state_dict()))
        np.copyto(self.theta, state["theta"])
        saved = state["optimizer"]
        self._server = self.method.server.restore(saved, self.theta, self._server)
        self._scaler.load_state_dict(state["loss_scale"])
        self._privacy.update(state.get("privacy", {}))
        self._weighting.update(state["weighting"])
        _take_back(self._down, state["down_codec"])
        self._counts.update(state["down_counts"])
        self._backups.restore(state["backups"])


def have_one_form(one: Any, other: Any) -> bool:
    """Return whether two states have the same names, and arrays of the same shapes, at any depth.

    >>> have_one_form({"steps": 3, "slots": {}}, {"steps": 0, "slots": {}})
    True
    >>> have_one_form({"velocity": np.zeros(2)}, {})
    False
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            have_one_form(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(have_one_form, one, other))
    shapes = [getattr(each, "shape", None) for each in (one, other)]
    return shapes[0] == shapes[1] and not isinstance(one, dict) and not isinstance(other, dict)


def without_set_rate(state: Any) -> Any:
    """Return an optimizer's saved state without rates that a script has set while it trained."""
    if not isinstance(state, dict):
        return state
    return {
        key: None if key == "set_rate" else without_set_rate(value) for key, value in state.items()
    }


def _durable(state: Any, keep: Keep) -> Any:
    """Return what is kept of a state, without working memory at any depth."""
    if isinstance(state, dict):
        return {key: _durable(value, keep) for key, value in state.items() if key != _SCRATCH}
    if isinstance(state, (list, tuple)):
        return type(state)(_durable(value, keep) for value in state)
    return keep(state) if isinstance(state, np.ndarray) else copy.deepcopy(state)


def _of_workers(state: State) -> State:
    """Return working memory that decides what workers are answered, in place; no plain buffers."""
    found: State = {}
    for key, value in state.items():
        if key == _SCRATCH:
            found[key] = {name: item for name, item in value.items() if isinstance(item, dict)}
        elif isinstance(value, dict) and (inner := _of_workers(value)):
            found[key] = inner
    return found


def _take_back(state: State, saved: State) -> None:
    """Put a saved state into one that has just been made, beside its working memory."""
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(state.get(key), dict):
            _take_back(state[key], value)
        else:
            state[key] = value


def _num_bytes(state: Any) -> int:
    """Return the bytes of all arrays in a policy's state."""
    return sum(array.nbytes for array in _arrays(state))


def _arrays(state: Any) -> Iterator[NDArray[Any]]:
    """Yield all arrays in a policy's state."""
    if isinstance(state, np.ndarray):
        yield state
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    for part in parts:
        yield from _arrays(part)


class CollectiveShardModel(ShardModel):
    """A round is one version; its weights come with one of its pushes, or not at all.

    Workers hold newer weights than the shard whenever a round has come without them. So a worker
    that pulls is sent the weights that are here, and requests newer ones from the other workers.
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
        """Start at version 0; see ShardModel."""
        idle = dataclasses.replace(method, server=OptimizerUpdate())  # the workers' steps, not ours
        super().__init__(idle, theta, kernels, budget, schedule, spec, loss_scale, clock)
        self._copied_version = 0

    def go_on_from(self, version: int, samples: int) -> None:
        """Begin a phase; the weights are up to date."""
        super().go_on_from(version, samples)
        self._copied_version = version

    @property
    def kind(self) -> Kind:
        """Whole weights, or none."""
        return Kind.VALUES

    @property
    def lags(self) -> bool:
        """Whether the weights are of an earlier version."""
        return self._copied_version < self.version

    def in_step(self, base_version: int) -> bool:
        """Only a worker that took part in the last round may report the next one."""
        return base_version == self.version

    def has_rate(self, arrivals: Sequence[Arrival]) -> bool:
        """Return True: the workers step."""
        del arrivals
        return True

    def apply(
        self,
        arrivals: Sequence[Arrival],
        oldest_base: int,
        share: float = 1.0,
        empty_parts: int = 0,
    ) -> list[Arrival]:
        """Count one round, and take the weights that came with it."""
        del oldest_base, share
        self.version += 1
        self.clock.count(sum(each.batch_parts for each in arrivals) + empty_parts)
        for arrival in arrivals:
            self.take(arrival.update)
        return list(arrivals)

    def take(self, update: Update) -> None:
        """Take whole weights as those of the present version; a sparse update holds none."""
        if update.indices is None:
            self.freezer.before_change(self.theta)
            np.copyto(self.theta, update.values)
            self._copied_version = self.version

    def gather(self, request: ModelRequest) -> ModelReply:
        """Send weights only to a worker that has none."""
        if request.base_version is None:
            return ModelReply(Operation.FULL, self.whole(), self.version, "full")
        nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
        return ModelReply(Operation.NONE, nothing, self.version, "delta")

    def state_dict(self, soft: bool) -> State:
        """Return what ShardModel does; soft is which version the weights are of."""
        return {"copied_version": self._copied_version} if soft else super().state_dict(soft)

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave; without the soft state the weights are up to date."""
        if soft:
            self._copied_version = state["copied_version"]
            return
        super().load_state_dict(state, soft)
        self._copied_version = self.version


def model_for(method: Method, theta: Float32, kernels: Kernels, config: CoreConfig) -> ShardModel:
    """Return the model of a shard that steps itself, or of one whose workers do."""
    made = ShardModel if method.collective == THROUGH_PS else CollectiveShardModel
    return made(
        method,
        theta,
        kernels,
        config.budget,
        config.schedule,
        config.spec,
        config.loss_scale,
        BatchClock(config.nb_workers, method.server.num_optimizers, config.first_batches),
    )
