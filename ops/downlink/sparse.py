"""Down codecs that leave the smaller part of what a worker lacks for later: sparse, auto.

To know what that is the shard keeps a copy of what each worker has; see
`thinwire.ops.downlink.replicas`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.codecs.base import check_rate, check_value_dtype
from thinwire.ops.downlink.exact import DownDelta, check_fraction, whole
from thinwire.ops.downlink.types import ModelReply, ModelRequest, ShardView
from thinwire.ops.types import ConfigurationError, State

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.types import Float32, Int64


@dataclasses.dataclass(frozen=True)
class DownSparse:
    """Send, of each slice, the entries in which the worker is farthest from the shard.

    The shard keeps a dense copy of what each worker has, which moves on by what was really sent;
    what was left out stays in the difference and comes later. A worker of which no copy is kept,
    or that holds something else than its copy, is sent the whole model.

    Attributes:
        compression_rate: Of the way up; stands for `down_ratio` where that is None.
        down_ratio: The fraction of each slice's entries that is sent, above 0; 1 and more is all.
        down_value_dtype: How values travel, one of thinwire.ops.types.VALUE_DTYPES.
        resync_every: Every so many replies to a worker one is the whole model; 0: none is.
        max_staleness: A worker whose base is more updates old is sent the whole model; 0: none is.

    Source: the server of DGS with secondary compression, Yan et al. (ICPP 2020);
    docs/methods/down.md.
    Differences: float32 values overwrite instead of being added, so that no rounding adds up.
    """

    compression_rate: float = 0.01
    down_ratio: float | None = None
    down_value_dtype: str = "float32"
    resync_every: int = 0
    max_staleness: int = 0
    per_worker: ClassVar[bool] = True
    leaves_own_out: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse ratios that send nothing, unknown value dtypes, and negative intervals."""
        check_rate(self.compression_rate)
        if self.down_ratio is not None:
            check_rate(self.down_ratio, "down_ratio")
        check_value_dtype(self.down_value_dtype, "down_value_dtype")
        if self.resync_every < 0:
            raise ConfigurationError(
                f"--resync_every={self.resync_every}: expected a number of replies from 1 on, or "
                "0 for no resynchronisation."
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
        """Return the state before anybody has asked; see `thinwire.ops.downlink.replicas`."""
        import numpy as np

        del size
        scratch = {"difference": np.empty(0, np.float32), "last": {}}
        return {"held": {}, "scratch": scratch}

    def note(
        self, indices: Int64 | None, version: int, state: State, own: OwnEntries | None = None
    ) -> State:
        """Hear that applying `version` changed these entries (None: all): the copies tell."""
        del indices, version, own
        return state

    def share_of(self, asked: ModelRequest, state: State) -> Hashable:
        """Return the question: no two are answered alike."""
        del state
        return asked

    def forget(self, worker: int, state: State) -> State:
        """Drop the copy of a worker that has left, or whose model is not what it should be."""
        state["held"].pop(str(worker), None)
        state["scratch"]["last"].pop(str(worker), None)
        return state

    def copy_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return what a worker has that was handed `base_version` last: [n] float32."""
        held = state["held"].get(str(worker))
        return held["weights"] if held is not None and held["version"] == base_version else None

    def gather(self, asked: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return what brings a worker nearer to the shard; a retry gets its answer once more."""
        from thinwire.ops.downlink import replicas

        worker, base = asked.worker, asked.base_version
        held = state["held"].get(str(worker))
        if held is None:
            return replicas.send_all(worker, shard, state)
        if base is None or not asked.step:
            return replicas.send_copy(worker, state)
        if (given := replicas.repeat(asked, state)) is not None:
            return given
        if base != held["version"]:
            return replicas.send_all(worker, shard, state)
        is_due = self.resync_every and held["replies"] + 1 >= self.resync_every
        if is_due or (self.max_staleness and shard.version - base > self.max_staleness):
            return replicas.send_all(worker, shard, state, is_resync=True)
        ratio = self._ratio_for(asked, shard)
        return replicas.send_largest(asked, shard, ratio, self.down_value_dtype, state)

    def _ratio_for(self, asked: ModelRequest, shard: ShardView) -> float:
        """Return the fraction of entries that this reply may have."""
        del asked, shard
        return self.ratio


@dataclasses.dataclass(frozen=True)
class DownAuto(DownSparse):
    """`delta` to each worker until a reply to it is large, from then on `sparse`.

    Large is what changes more than `switch_fraction` of the shard's entries, takes more bytes than
    the sparse reply would, and more than `push_factor` times those of its push. That reply is still
    exact; only after it a copy is kept. So replies stay exact where they cost about what pushes do,
    as in DGC's warm-up; and without `down_ratio` none is made smaller than its push.

    Attributes:
        switch_fraction: Of the entries.
        push_factor: Of the bytes of the push that a reply answers; 0: that one does not matter.

    Source: DGS's secondary compression "on demand"; docs/methods/down.md.
    """

    switch_fraction: float = 0.1
    push_factor: float = 8.0
    leaves_own_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        check_fraction("switch_fraction", self.switch_fraction)
        if not self.push_factor >= 0:  # refuses NaN too
            raise ConfigurationError(f"push_factor={self.push_factor}: expected 0 or more.")

    def init(self, size: int) -> State:
        """Return the states of both, and who has held nothing but exact models since when."""
        return super().init(size) | {"delta": DownDelta().init(size), "exact_since": {}}

    def note(
        self, indices: Int64 | None, version: int, state: State, own: OwnEntries | None = None
    ) -> State:
        """Hear that applying `version` changed these entries (None: all)."""
        if own is not None and str(own.worker) in state["held"]:
            own = None
        state["delta"] = DownDelta().note(indices, version, state["delta"], own)
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop what is known of a worker."""
        state["exact_since"].pop(str(worker), None)
        state["delta"] = DownDelta().forget(worker, state["delta"])
        return super().forget(worker, state)

    def gather(self, asked: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return what changed since the worker's version, or what brings it nearer."""
        if str(asked.worker) in state["held"]:
            return super().gather(asked, shard, state)
        since = state["exact_since"].get(str(asked.worker))
        # A model that was once handed out in part is of no version: only the whole one helps.
        if since is None or asked.base_version is None or asked.base_version < since:
            state["exact_since"][str(asked.worker)] = shard.version
            return whole(shard)
        handed = DownDelta().gather(asked, shard, state["delta"])
        if self._is_large(handed, asked, shard):
            from thinwire.ops.downlink import replicas

            del state["exact_since"][str(asked.worker)]
            state["delta"] = DownDelta().forget(asked.worker, state["delta"])
            replicas.keep(asked.worker, shard, state)
        return handed

    def _ratio_for(self, asked: ModelRequest, shard: ShardView) -> float:
        """Return about as much as has come up, or more, where nothing else was said."""
        if self.down_ratio is not None:
            return self.down_ratio
        return max(self.ratio, asked.push_bytes / shard.theta.nbytes)

    def _is_large(self, handed: ModelReply, asked: ModelRequest, shard: ShardView) -> bool:
        """Whether a reply of `delta` outgrows the push, and what `sparse` would send."""
        from thinwire.ops.downlink import replicas

        count, size = len(handed.update.values), len(shard.theta)  # type: ignore[union-attr]
        if count <= self.switch_fraction * size:
            return False
        ratio = self._ratio_for(asked, shard)
        sparse = replicas.sparse_bytes(shard, ratio, self.down_value_dtype)
        least = max(sparse, self.push_factor * asked.push_bytes)
        return replicas.reply_bytes(count, size) > least
