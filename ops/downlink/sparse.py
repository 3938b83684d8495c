"""Downlink codecs that first send the weights that differ most between worker and shard server.

The shard server stores a replica of each worker's weights to know the differences between its
weights and the worker's weights (`thinwire.ops.downlink.replicas`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

from thinwire.ops.codecs.base import COMPRESSION_RATE
from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.downlink.exact import check_fraction, full_reply
from thinwire.ops.downlink.relay import DownRelay
from thinwire.ops.downlink.types import (
    ModelChange,
    ModelReply,
    ModelRequest,
    RelayedRounds,
    ShardView,
)
from thinwire.ops.options import above_zero, choice, integer, number
from thinwire.ops.policy import setting
from thinwire.ops.types import VALUE_DTYPES, ConfigurationError, Float32, State


@dataclasses.dataclass(frozen=True)
class DownSparse(DownCodec):
    """Downlink codec that sends the weights that differ most between worker and shard server.

    The shard server stores a replica (copy) of each worker's weights and updates the replica with
    the decoded values of each reply. Differences of weights that a reply omits remain between the
    shard server's weights and the replica, and later replies send them. A worker without a replica,
    or with weights that differ from its replica, receives the whole model.

    Attributes:
        compression_rate: Fraction of gradient entries that workers push, which is the default of
            `down_ratio`.
        down_ratio: Fraction of each variable slice's weights to send in a reply, above 0; 1 or more
            sends all weights that differ. None: `compression_rate`.
        down_value_dtype: Dtype of the values in replies, for example float32 or int8 (VALUE_DTYPES
            in thinwire.ops.types).
        resync_every: Number of worker 1's iterations between two snapshots of the model, which each
            worker receives with its next reply; 0: no snapshots.
        max_staleness: Largest age of a worker's weights, in updates of the shard server; a worker
            with older weights receives the whole model; 0: no limit.

    Source: the server of DGS with secondary compression, Yan et al. (ICPP 2020);
    docs/methods/compression.md. The resynchronization comes from the DGS program; the paper does
    not mention resynchronization. Differences: float32 values overwrite the worker's weights
    instead of being added, so that rounding errors do not accumulate.
    """

    compression_rate: float = setting(COMPRESSION_RATE, shown=True)
    down_ratio: float | None = setting(
        number(
            "down_ratio",
            None,
            "Fraction of the model's entries that --down_codec=sparse and --down_codec=auto KEEP.",
            "fraction",
            rule=above_zero("1 or more is all"),
            unset="--compression_rate",
        )
    )
    down_value_dtype: str = setting(
        choice(
            "down_value_dtype",
            "float32",
            "Data type of the values in a reply of the PS with --down_codec=sparse or auto.",
            VALUE_DTYPES,
        )
    )
    resync_every: int = setting(
        integer(
            "resync_every",
            0,
            "Number of steps of worker 1 after which all workers with sparse replies "
            "(--down_codec) receive a snapshot of the whole model; 0: no snapshots.",
            "steps",
            low=0,
        )
    )
    max_staleness: int = setting(
        integer(
            "max_staleness",
            0,
            "Largest number of updates by which a worker's model may be outdated with sparse "
            "replies (--down_codec); a worker with an older model receives the whole model; 0: no "
            "limit.",
            "updates",
            low=0,
        )
    )
    keeps_replicas: ClassVar[bool] = True

    @property
    def ratio(self) -> float:
        """The fraction of each variable slice's weights that a sparse reply sends."""
        return self.compression_rate if self.down_ratio is None else self.down_ratio

    def init(self, size: int) -> State:
        """Return the initial state, without replicas (copies of workers' weights)."""
        import numpy as np

        scratch = {"difference": np.empty(0, np.float32), "last": {}}
        resync = {"iterations": 0, "step": 0, "pending": [], "snapshot": np.empty(0, np.float32)}
        return {"replicas": {}, "resync": resync, "scratch": scratch}

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return the request itself as the key: no two requests share a sparse reply."""
        return request

    def forget(self, worker: int, state: State) -> State:
        """Drop the replica of a worker that has left, or whose weights differ from its replica."""
        from thinwire.ops.downlink import replicas

        replicas.drop(worker, state)
        return state

    def replica_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return a worker's replica [n]; None if the replica's version is not `base_version`."""
        replica = state["replicas"].get(str(worker))
        is_current = replica is not None and replica["version"] == base_version
        return replica["weights"] if is_current else None

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return a reply with the largest differences of weights, or the last reply for a retry."""
        from thinwire.ops.downlink import replicas

        worker, base = request.worker, request.base_version
        replicas.count_iteration(request, self.resync_every, shard, state)
        replica = state["replicas"].get(str(worker))
        if replica is None:
            return replicas.send_all(worker, shard, state)
        if base is None or not request.step:
            return replicas.send_replica(worker, shard, state)
        # Look for a repeated reply before the version check: the first reply has advanced the
        # replica's version, so a retry would fail the check and receive the whole model.
        if (repeated := replicas.repeated_reply(request, state)) is not None:
            return repeated
        if base != replica["version"]:
            return replicas.send_all(worker, shard, state)
        if str(worker) in state["resync"]["pending"]:
            return replicas.send_snapshot(worker, shard, state)
        if self.max_staleness and shard.version - base > self.max_staleness:
            return replicas.send_all(worker, shard, state, is_resync=True)
        ratio = self._ratio_for(request, shard)
        return replicas.send_largest(request, shard, ratio, self.down_value_dtype, state)

    def _ratio_for(self, request: ModelRequest, shard: ShardView) -> float:
        """Return the fraction of each variable slice's weights to send in a sparse reply."""
        return self.ratio


@dataclasses.dataclass(frozen=True)
class DownAuto(DownSparse):
    """Downlink codec: `DownRelay` for a worker until its replies stay large, then `DownSparse`.

    A reply counts as large if it changes more than the fraction `switch_fraction` of the shard's
    weights, takes more bytes than a sparse reply, and takes more than `push_factor` times the bytes
    of the worker's push. After `patience` large replies in a row, the worker receives sparse
    replies, and the shard server stores a replica (copy) of its weights. A single large reply of
    the shard server can have another cause: the worker was busy, for example compiling or
    evaluating. A worker's replies stay exact while they cost about as many bytes as its pushes, for
    example in the warm-up of DGC (Deep Gradient Compression). If `down_ratio` is None, a sparse
    reply has at least as many bytes as the push that it answers.

    Attributes:
        switch_fraction: Fraction of the shard server's weights. A reply with fewer entries does not
            count as large.
        push_factor: Multiple of the bytes of a worker's push. A reply with fewer bytes does not
            count as large. 0: the size of the push does not matter.
        patience: Number of large replies in a row after which a worker gets sparse replies.

    Source: DGS's secondary compression "on demand"; docs/methods/compression.md.
    """

    switch_fraction: float = 0.1
    push_factor: float = 8.0
    patience: int = 16
    omits_own_entries: ClassVar[bool] = True
    relays: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise an error if `switch_fraction`, `push_factor` or `patience` is out of its range."""
        super().__post_init__()
        check_fraction("switch_fraction", self.switch_fraction)
        if not self.push_factor >= 0:  # rejects NaN too, as comparisons with NaN are False
            raise ConfigurationError(f"push_factor={self.push_factor}: expected a factor >= 0.")
        if self.patience < 1:
            raise ConfigurationError(f"patience={self.patience}: expected 1 or more large replies.")

    def init(self, size: int) -> State:
        """Return the initial states of DownSparse and DownRelay, and empty tables of workers."""
        workers: State = {"exact_since": {}, "large_replies": {}}
        return super().init(size) | {"delta": DownRelay().init(size)} | workers

    def record_update(self, change: ModelChange, state: State) -> State:
        """Record the changed weights for exact replies, which go to workers without a replica.

        The shard server does not store an update for relaying if its sender is the only worker that
        receives exact replies.
        """
        if change.own is not None and str(change.own.worker) in state["replicas"]:
            change = dataclasses.replace(change, own=None)
        if change.relayed is not None:
            pushers = {str(update.worker) for update in change.relayed.updates}
            if len(pushers) == 1 and state["exact_since"].keys() <= pushers:
                change = dataclasses.replace(change, relayed=None)
        state["delta"] = DownRelay().record_update(change, state["delta"])
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop the replica and the counts of large replies of a worker that has left."""
        state["exact_since"].pop(str(worker), None)
        state["large_replies"].pop(str(worker), None)
        state["delta"] = DownRelay().forget(worker, state["delta"])
        return super().forget(worker, state)

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return a sparse reply to a worker with a replica, an exact reply to any other worker."""
        from thinwire.ops.downlink import replicas

        # iterations of worker 1 with exact replies also count toward the next snapshot
        replicas.count_iteration(request, self.resync_every, shard, state)
        if str(request.worker) in state["replicas"]:
            return super().gather(request, shard, state)
        since = state["exact_since"].get(str(request.worker))
        # After a sparse reply the worker's weights equal no version of the shard server's weights,
        # so a delta reply from its base version would be wrong. Therefore all weights are sent;
        # exact replies start at their version.
        if since is None or request.base_version is None or request.base_version < since:
            state["exact_since"][str(request.worker)] = shard.version
            return full_reply(shard)
        reply = DownRelay().gather(request, shard, state["delta"])
        if self._has_grown(request.worker, self._is_large(reply, request, shard), state):
            del state["exact_since"][str(request.worker)]
            state["delta"] = DownRelay().forget(request.worker, state["delta"])
            replicas.keep(request.worker, shard, state, shard.theta)
        return reply

    def _has_grown(self, worker: int, is_large: bool, state: State) -> bool:
        """Count a worker's large replies in a row; return True if they are `patience` or more."""
        counts = state["large_replies"]
        before = counts.pop(str(worker), 0)
        count = before + 1 if is_large else 0
        if 0 < count < self.patience:
            counts[str(worker)] = count
        return count >= self.patience

    def _ratio_for(self, request: ModelRequest, shard: ShardView) -> float:
        """Return `down_ratio`; if None, a fraction with at least as many bytes as the push."""
        if self.down_ratio is not None:
            return self.down_ratio
        return max(self.ratio, request.push_bytes / shard.theta.nbytes)

    def _is_large(self, reply: ModelReply, request: ModelRequest, shard: ShardView) -> bool:
        """Return whether an exact reply is large compared to the push and to a sparse reply."""
        from thinwire.ops.downlink import replicas, sizes

        update, size = reply.update, len(shard.theta)
        if isinstance(update, RelayedRounds):
            count, num_bytes = update.num_entries, update.num_bytes
        else:
            count = len(update.values)  # type: ignore[union-attr]
            num_bytes = sizes.reply_bytes(count, size)
        if count <= self.switch_fraction * size:
            return False
        ratio = self._ratio_for(request, shard)
        sparse = replicas.sparse_bytes(shard, ratio, self.down_value_dtype)
        least = max(sparse, self.push_factor * request.push_bytes)
        return num_bytes > least
