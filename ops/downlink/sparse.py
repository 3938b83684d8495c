"""Down codecs that send the larger part of what a worker lacks and leave the rest for later.

To know what each worker lacks the shard keeps a replica of its weights; see
`thinwire.ops.downlink.replicas`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.codecs.base import check_rate, check_value_dtype
from thinwire.ops.downlink.exact import check_fraction, full_reply
from thinwire.ops.downlink.relay import DownRelay
from thinwire.ops.downlink.types import ModelReply, ModelRequest, RelayedRounds, ShardView
from thinwire.ops.frozen import BeforeChange, unguarded
from thinwire.ops.types import VALUE_DTYPES, ConfigurationError, State

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.downlink.types import RelayedRound
    from thinwire.ops.types import Float32, Int64


@dataclasses.dataclass(frozen=True)
class DownSparse:
    """Send those entries of each slice in which the worker differs most from the shard.

    The shard keeps a replica of each worker's weights, updated by what was really sent; what a
    reply left out stays in the difference and is sent later. A worker without a replica, or whose
    weights are not those of its replica, receives the whole model.

    Attributes:
        compression_rate: Of the uplink; the default of `down_ratio`.
        down_ratio: The fraction of each slice's entries that is sent, above 0; 1 and more is all.
        down_value_dtype: How values travel, one of thinwire.ops.types.VALUE_DTYPES.
        resync_every: After every so many iterations of worker 1 all workers receive, with their
            next reply, the model as it was at that moment; 0: never.
        max_staleness: A worker whose base is more updates old receives the whole model; 0: no
            limit.

    Source: the server of DGS with secondary compression, Yan et al. (ICPP 2020);
    docs/methods/compression.md. The resynchronisation is its program's, which the paper does not
    mention. Differences: float32 values overwrite instead of being added, so that no rounding adds
    up.
    """

    compression_rate: float = 0.01
    down_ratio: float | None = None
    down_value_dtype: str = "float32"
    resync_every: int = 0
    max_staleness: int = 0
    keeps_replicas: ClassVar[bool] = True
    relays: ClassVar[bool] = False
    omits_own_entries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse ratios that send nothing, unknown value dtypes, and negative intervals."""
        check_rate(self.compression_rate)
        if self.down_ratio is not None:
            check_rate(self.down_ratio, "down_ratio")
        check_value_dtype(self.down_value_dtype, "down_value_dtype", VALUE_DTYPES)
        if self.resync_every < 0:
            raise ConfigurationError(
                f"--resync_every={self.resync_every}: expected a number of iterations from 1 on, "
                "or 0 for no resynchronisation."
            )
        if self.max_staleness < 0:
            raise ConfigurationError(
                f"--max_staleness={self.max_staleness}: expected a number of updates from 1 on, or "
                "0 for no limit."
            )

    @property
    def ratio(self) -> float:
        """The fraction of entries that is sent."""
        return self.compression_rate if self.down_ratio is None else self.down_ratio

    def init(self, size: int) -> State:
        """Return the state without replicas; see `thinwire.ops.downlink.replicas`."""
        import numpy as np

        del size
        scratch = {"difference": np.empty(0, np.float32), "last": {}}
        resync = {"iterations": 0, "step": 0, "pending": [], "snapshot": np.empty(0, np.float32)}
        return {"replicas": {}, "resync": resync, "scratch": scratch}

    def record_update(
        self,
        indices: Int64 | None,
        version: int,
        state: State,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
        before_change: BeforeChange = unguarded,
    ) -> State:
        """Return the state unchanged: the replicas show what each worker lacks."""
        del indices, version, own, relayed, before_change
        return state

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return the request: no two of them share a reply."""
        del state
        return request

    def forget(self, worker: int, state: State) -> State:
        """Drop the replica of a worker that has left, or whose weights differ from it."""
        from thinwire.ops.downlink import replicas

        replicas.drop(worker, state)
        return state

    def replica_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return the weights [n] of a worker that received `base_version` last."""
        replica = state["replicas"].get(str(worker))
        is_current = replica is not None and replica["version"] == base_version
        return replica["weights"] if is_current else None

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return what brings a worker nearer to the shard; a retry receives the same reply."""
        from thinwire.ops.downlink import replicas

        worker, base = request.worker, request.base_version
        self._count_iteration(request, shard, state)
        replica = state["replicas"].get(str(worker))
        if replica is None:
            return replicas.send_all(worker, shard, state)
        if base is None or not request.step:
            return replicas.send_replica(worker, shard, state)
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

    def _count_iteration(self, request: ModelRequest, shard: ShardView, state: State) -> None:
        """Count worker 1's iterations, if they matter, and take the snapshot when it is due."""
        from thinwire.ops.downlink import replicas

        if self.resync_every:
            replicas.count_iteration(request, self.resync_every, shard, state)

    def _ratio_for(self, request: ModelRequest, shard: ShardView) -> float:
        """Return the fraction of entries that this reply may have."""
        del request, shard
        return self.ratio


@dataclasses.dataclass(frozen=True)
class DownAuto(DownSparse):
    """Be `relay` for each worker until its replies are large one after another, then `sparse`.

    A reply is large if it changes more than `switch_fraction` of the shard's entries, takes more
    bytes than the sparse reply would, and more than `push_factor` times those of its push. The
    last of `patience` large ones in a row is still exact; a replica is kept from then on. A single
    one only shows that the worker was busy elsewhere, compiling or evaluating. So replies stay
    exact where they cost about as much as pushes, as in DGC's warm-up; and without `down_ratio` no
    reply is made smaller than its push.

    Attributes:
        switch_fraction: Of the entries.
        push_factor: Of the bytes of the push that a reply answers; 0: the push does not matter.
        patience: Large replies in a row after which a worker gets sparse ones.

    Source: DGS's secondary compression "on demand"; docs/methods/compression.md.
    """

    switch_fraction: float = 0.1
    push_factor: float = 8.0
    patience: int = 16
    omits_own_entries: ClassVar[bool] = True
    relays: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        check_fraction("switch_fraction", self.switch_fraction)
        if not self.push_factor >= 0:  # refuses NaN too
            raise ConfigurationError(f"push_factor={self.push_factor}: expected 0 or more.")
        if self.patience < 1:
            raise ConfigurationError(f"patience={self.patience}: expected 1 or more replies.")

    def init(self, size: int) -> State:
        """Return the states of both, since when each worker is exact, and its large replies."""
        own: State = {"exact_since": {}, "large_replies": {}}
        return super().init(size) | {"delta": DownRelay().init(size)} | own

    def record_update(
        self,
        indices: Int64 | None,
        version: int,
        state: State,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
        before_change: BeforeChange = unguarded,
    ) -> State:
        """Record the changed entries for the workers without a replica.

        A round of the only workers there are is relayed to nobody.
        """
        if own is not None and str(own.worker) in state["replicas"]:
            own = None
        if relayed is not None:
            pushers = {str(update.worker) for update in relayed.updates}
            if len(pushers) == 1 and state["exact_since"].keys() <= pushers:
                relayed = None
        state["delta"] = DownRelay().record_update(
            indices, version, state["delta"], own, relayed, before_change
        )
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop all state of a worker."""
        state["exact_since"].pop(str(worker), None)
        state["large_replies"].pop(str(worker), None)
        state["delta"] = DownRelay().forget(worker, state["delta"])
        return super().forget(worker, state)

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return what changed since the worker's version; with a replica, what brings it nearer."""
        self._count_iteration(request, shard, state)  # exact replies count too
        if str(request.worker) in state["replicas"]:
            return super().gather(request, shard, state)
        since = state["exact_since"].get(str(request.worker))
        # A model that was once sent in part is of no version: only the whole one helps.
        if since is None or request.base_version is None or request.base_version < since:
            state["exact_since"][str(request.worker)] = shard.version
            return full_reply(shard)
        reply = DownRelay().gather(request, shard, state["delta"])
        if self._has_grown(request.worker, self._is_large(reply, request, shard), state):
            from thinwire.ops.downlink import replicas

            del state["exact_since"][str(request.worker)]
            state["delta"] = DownRelay().forget(request.worker, state["delta"])
            replicas.keep(request.worker, shard, state)
        return reply

    def _has_grown(self, worker: int, is_large: bool, state: State) -> bool:
        """Count a worker's large replies in a row; return whether they are enough to switch."""
        counts = state["large_replies"]
        before = counts.pop(str(worker), 0)
        count = before + 1 if is_large else 0
        if 0 < count < self.patience:
            counts[str(worker)] = count
        return count >= self.patience

    def _ratio_for(self, request: ModelRequest, shard: ShardView) -> float:
        """Return `down_ratio`; if it is not set, the size of the push or more."""
        if self.down_ratio is not None:
            return self.down_ratio
        return max(self.ratio, request.push_bytes / shard.theta.nbytes)

    def _is_large(self, reply: ModelReply, request: ModelRequest, shard: ShardView) -> bool:
        """Whether an exact reply outgrows the push, and what `sparse` would send."""
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
