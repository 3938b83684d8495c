"""The replies of one PS shard to its workers: the state of the down codec, which encodes them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.aggregation.aggregates import Mean
from thinwire.ops.downlink import replicas
from thinwire.ops.downlink.replicas import BackupWeights
from thinwire.ops.downlink.types import (
    ModelChange,
    ModelReply,
    ModelRequest,
    OwnEntries,
    RelayedRound,
    RelayedUpdate,
    ShardView,
)
from thinwire.ops.frozen import Freezer, Keep
from thinwire.ops.kernels import Kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.types import Kind, State
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core.policy_states import durable, num_bytes, take_back

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

#: Names of the down codec's counters: replies by kind, and stored copies of workers' weights.
_COUNTED = ("copies", "full", "delta", "sparse", "relay", "resyncs", "mismatches")


class Downlink:
    """The down codec's state, with the shard's copies of the weights that its workers hold.

    Attributes:
        state: State of the down (reply) codec.
        backups: Copies of workers' weights for a weighting that needs them.
        counts: Number of replies by kind, and of copies of workers' weights.
        seen: Read-only view of the shard's weights for the policies.
    """

    def __init__(
        self,
        method: Method,
        theta: Float32,
        kernels: Kernels,
        offsets: tuple[int, ...],
        freezer: Freezer,
    ) -> None:
        """Start without copies of workers' weights.

        Args:
            method: Training method, whose down codec encodes the replies.
            theta: Weights [n] float32 of the shard, which the shard's model updates in place.
            kernels: Implementation of the array operations.
            offsets: Positions in `theta` at which the slices of variables begin and end.
            freezer: Copy-on-write protection of the shard's arrays.
        """
        self._method, self._theta, self._kernels = method, theta, kernels
        self._offsets, self._freezer = offsets, freezer
        self.state = method.down_codec.init(len(theta))
        self.backups = BackupWeights()
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.seen = theta.view()
        self.seen.flags.writeable = False

    def record_update(
        self,
        touched: Int64 | None,
        version: int,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
    ) -> None:
        """Record a change of the shard's weights, which the next replies contain.

        Args:
            touched: Indices of the changed entries, in ascending order; None: any entry.
            version: Version of the shard's weights after the change.
            own: Changed entries that one worker can compute from its own push; None without any.
            relayed: Round of updates that changed the weights, in a form that workers can apply.
        """
        change = ModelChange(touched, version, own, relayed, self._freezer.before_change)
        self.state = self._method.down_codec.record_update(change, self.state)

    def sharing_key(self, request: ModelRequest) -> Hashable:
        """Return a key that is equal for requests whose replies may share the model's arrays. The
        shard may send replies with the same arrays to requests with equal keys.
        """
        return self._method.down_codec.sharing_key(request, self.state)

    def gather(self, request: ModelRequest, version: int) -> ModelReply:
        """Return the reply to a worker's request; later updates do not change the reply's
        arrays.
        """
        view = ShardView(
            self.seen,
            version,
            self._kernels,
            self._offsets,
            keep=self._kept,
            before_change=self._freezer.before_change,
        )
        reply = self._method.down_codec.gather(request, view, self.state)
        self.counts["copies"] = max(self.counts["copies"], len(self.state.get("replicas", ())))
        return reply

    def record_reply(self, worker: int, reply: ModelReply) -> None:
        """Record a reply with weights that the shard sends to a worker."""
        self.counts[reply.kind] += 1
        self.counts["resyncs"] += reply.is_resync
        if not self._method.weighting.needs_copies:
            return
        # If the down codec has no replica (a copy of the worker's weights), the reply makes the
        # worker's weights equal to theta, so theta is stored as the backup. With a replica no
        # backup is needed, because the replica holds the worker's weights.
        if self.copy_of(worker, reply.version) is None:
            self.backups.record(worker, reply.version, self._theta)
        else:
            self.backups.forget(worker)

    def verify(self, worker: int, base_version: int, checksum: int) -> None:
        """Compare a worker's checksum of its weights with the shard's replica (copy) of these
        weights.

        If a worker's checksum differs from the shard's, the shard drops its copy of the worker's
        weights, and the next reply sends all weights.
        """
        copy = self.copy_of(worker, base_version)
        if copy is None or replicas.checksum([copy]) == checksum:
            return
        self.counts["mismatches"] += 1
        self.counts["resyncs"] += 1
        self.state = self._method.down_codec.forget(worker, self.state)

    def forget(self, worker: int) -> None:
        """Drop the shard's copies of the weights of a worker that has left."""
        self.backups.forget(worker)
        self.state = self._method.down_codec.forget(worker, self.state)

    def copy_of(self, worker: int, base_version: int) -> Float32 | None:
        """Return the down codec's copy of a worker's weights of a version; None without one."""
        return self._method.down_codec.replica_of(worker, base_version, self.state)

    def copies_of(self, arrivals: Sequence[Arrival]) -> dict[int, Float32]:
        """Return worker id -> copy [n] of the worker's weights, if the weighting needs it; else
        {}.
        """
        if not self._method.weighting.needs_copies:
            return {}
        replicas_by_worker = {
            arrival.worker: self.copy_of(arrival.worker, arrival.base_version)
            for arrival in arrivals
        }
        return {worker: held for worker, held in replicas_by_worker.items() if held is not None}

    def summary(self) -> dict[str, int]:
        """Return the counters of the down codec (which encodes replies), and its state's size in
        bytes.

        ``copies`` is the largest number of dense copies of workers' weights that the down codec has
        held; ``bytes`` is the codec's size with so many copies. ``full``, ``delta``, ``sparse`` and
        ``relay`` count the shard's replies with the model by their encoding. ``mismatches`` is the
        number of wrong checksums that workers sent for their weights. ``resyncs`` is the number of
        whole models sent after a wrong checksum, or to a worker whose weights the shard knows.
        """
        num_replicas = len(self.state.get("replicas", ()))
        dropped_bytes = (self.counts["copies"] - num_replicas) * self._theta.nbytes
        return {"bytes": num_bytes(self.state) + dropped_bytes, **self.counts}

    def save(self, keep: Keep) -> State:
        """Return the parts of a checkpoint that hold the downlink's state."""
        return {
            "backups": self.backups.save(),
            "down_codec": durable(self.state, keep),
            "down_counts": dict(self.counts),
        }

    def restore(self, saved: State) -> None:
        """Restore the state that `save` returned."""
        take_back(self.state, saved["down_codec"])
        self.counts.update(saved["down_counts"])
        self.backups.restore(saved["backups"])

    def _kept(self, array: Float32) -> Any:
        """Return a copy-on-write array that the codec of replies stores instead of a weight
        copy.
        """
        # The freezer registers readers of theta itself, not of the read-only view that policies
        # receive.
        return self._freezer.freeze(self._theta if array is self.seen else array)


def lone_push(method: Method, arrivals: Sequence[Arrival]) -> Arrival | None:
    """Return a round's only push if its worker can add the pushed update to its weights itself.

    The reply to a worker that adds its own update may omit the entries of that update. If
    `lone_push` returns None, the reply to the worker omits no entry of the weights' change.
    """
    can_add = method.down_codec.omits_own_entries and method.router.delivers_all
    adds = method.kind is Kind.DELTA and method.server.traits.keeps_sparse
    if not can_add or not adds:
        return None
    alone = len(arrivals) == 1 and arrivals[0].update.indices is not None
    return arrivals[0] if alone and arrivals[0].change is None else None


def relayed_round(
    method: Method,
    kernels: Kernels,
    arrivals: Sequence[Arrival],
    kept: Sequence[Arrival],
    rate: float,
) -> RelayedRound | None:
    """Return a round's updates in a form that workers can apply; None if no such form
    exists.
    """
    # Workers get the same bits as the shard only if the shard subtracts one factor times the
    # plain mean of the updates as received, with numpy kernels, which workers also have.
    can = method.down_codec.relays and method.router.delivers_all
    if not (can and kernels.name == "numpy" and isinstance(method.aggregate, Mean)):
        return None
    received = {arrival.worker: arrival.update for arrival in arrivals}
    updates = []
    for arrival in kept:
        weighed = received[arrival.worker] is not arrival.update
        if weighed or arrival.blocks is None or arrival.change is not None:
            return None
        updates.append(RelayedUpdate(arrival.worker, arrival.head.step, arrival.blocks))
    factor = method.server.traits.factor(method.kind, rate)
    return None if factor is None else RelayedRound(tuple(updates), float(np.float32(factor)))
