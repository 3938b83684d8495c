"""Exact down codecs, dense and delta: after the reply the worker's floats equal the shard's.

``dense`` is what AdaComp's published code does: it sends the whole model every time. ``delta`` is
the rule of docs/methods/adacomp.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation, ShardView
from thinwire.ops.frozen import BeforeChange, unguarded
from thinwire.ops.types import ConfigurationError, State, Update

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.downlink.types import RelayedRound
    from thinwire.ops.types import Float32, Int64


def full_reply(shard: ShardView) -> ModelReply:
    """Return a reply that holds a copy of the whole shard."""
    return ModelReply(Operation.FULL, Update(None, shard.keep(shard.theta)), shard.version, "full")


def check_fraction(name: str, value: float) -> None:
    """Raise ConfigurationError for a value that is not a fraction."""
    if not 0 <= value <= 1:  # refuses NaN too
        raise ConfigurationError(f"{name}={value}: expected a fraction from 0 to 1.")


class _WithoutReplicas:
    """A down codec whose replies depend on the requested base version, not on the worker."""

    keeps_replicas: ClassVar[bool] = False
    omits_own_entries: ClassVar[bool] = False
    relays: ClassVar[bool] = False

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return the base version: workers that have the same one share a reply."""
        del state
        return request.base_version

    def forget(self, worker: int, state: State) -> State:
        """Return the state unchanged: it holds nothing of a worker."""
        del worker
        return state

    def replica_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return None: no replicas are kept."""
        del worker, base_version, state
        return None


#: Positions of updates that `DownDelta` keeps, as a share of the entries: with more of them it is
#: as fast to look at all entries. And of how many updates.
_WINDOW, _MOST_UPDATES = 0.25, 64


def _keep_positions(state: State, indices: Int64, version: int, own: OwnEntries | None) -> None:
    """Append an update to the window, and drop the oldest ones beyond its size."""
    import numpy as np

    size, window = state["last_changed"].size, state["scratch"].setdefault("window", [])
    if window and window[-1]["version"] != version - 1:
        window.clear()
    dtype = np.int32 if size < 1 << 31 else np.int64
    rest = indices[:0]  # what the sender of the update cannot add itself: hardly ever anything
    if own is not None and len(own.indices) < len(indices):
        rest = np.setdiff1d(indices, own.indices, assume_unique=True)
    entry = {"version": version, "indices": indices.astype(dtype), "rest": rest.astype(dtype)}
    window.append(entry)
    num_kept = sum(len(each["indices"]) for each in window)
    while num_kept > _WINDOW * size or len(window) > _MOST_UPDATES:
        num_kept -= len(window.pop(0)["indices"])


def _changed_since(base: int, own: State | None, state: State) -> Int64:
    """Return what changed after version `base`, ascending, without what the worker adds itself."""
    import numpy as np

    window, last_changed = state["scratch"].get("window"), state["last_changed"]
    if not window or window[0]["version"] > base + 1:
        is_lacking = last_changed > base
        if own is not None:
            mine = own["indices"]
            is_lacking[mine[last_changed[mine] == own["version"]]] = False
        return np.flatnonzero(is_lacking)
    own_version = None if own is None else own["version"]
    newer = [each for each in window if each["version"] > base]
    sets = [each["rest" if each["version"] == own_version else "indices"] for each in newer]
    joined = np.concatenate(sets)
    joined.sort()  # not "stable": vectorised, which is faster than to merge what is sorted
    is_new = np.ones(joined.size, bool)
    np.not_equal(joined[1:], joined[:-1], out=is_new[1:])
    return joined[is_new].astype(np.int64)


@dataclasses.dataclass(frozen=True)
class DownDense(_WithoutReplicas):
    """Send the whole shard every time."""

    def init(self, size: int) -> State:
        """Return the empty state."""
        del size
        return {}

    def record_update(
        self,
        indices: Int64 | None,
        version: int,
        state: State,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
        before_change: BeforeChange = unguarded,
    ) -> State:
        """Return the state unchanged: replies do not depend on what changed."""
        del indices, version, own, relayed, before_change
        return state

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return a copy of the model."""
        del request, state
        return full_reply(shard)


@dataclasses.dataclass(frozen=True)
class DownDelta(_WithoutReplicas):
    """Send the new values of the entries that changed since the worker's version (SET).

    One int32 per entry holds the version of its last change and serves every worker. The positions
    of the newest updates are kept as well, up to `_WINDOW` of the entries: to merge a few of them
    takes a fraction of the time of looking at all entries. Where more than `dense_fraction` of the
    entries changed, the whole shard is smaller and is sent instead.

    A worker's own entries are left out where nobody else has changed them since its base: the
    worker adds what it sent (SET_REST). For that the positions of each worker's newest push are
    kept; checkpoints do not hold them, for a worker that rejoins receives the whole model.
    """

    dense_fraction: float = 0.6
    omits_own_entries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a `dense_fraction` that is not a fraction."""
        check_fraction("dense_fraction", self.dense_fraction)

    def init(self, size: int) -> State:
        """Return `last_changed` = 0 for every entry, and the newest dense change."""
        import numpy as np

        scratch: State = {"window": []}
        return {"last_changed": np.zeros(size, np.int32), "dense_version": 0, "scratch": scratch}

    def record_update(
        self,
        indices: Int64 | None,
        version: int,
        state: State,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
        before_change: BeforeChange = unguarded,
    ) -> State:
        """Record the version at each changed entry; see `base.DownCodec.record_update`."""
        del relayed
        if indices is None:
            state["dense_version"] = version
            return state
        before_change(state["last_changed"], indices)
        if own is not None:
            untouched = state["last_changed"][own.indices] <= own.base_version
            mine = own.indices if untouched.all() else own.indices[untouched]
            state["scratch"][str(own.worker)] = own.as_state(mine)
        state["last_changed"][indices] = version
        _keep_positions(state, indices, version, own)
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop a worker's own entries."""
        state["scratch"].pop(str(worker), None)
        return state

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return the base version; the request itself where own entries are left out."""
        return request.base_version if self._own_entries(request, state) is None else request

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return the changes that turn the model of `request.base_version` into the current one."""
        import numpy as np

        base = request.base_version
        if base is None or base < state["dense_version"]:
            return full_reply(shard)
        if base == shard.version:
            nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
            return ModelReply(Operation.NONE, nothing, shard.version, "delta")
        own = self._own_entries(request, state)
        changed = _changed_since(base, own, state)
        if len(changed) > self.dense_fraction * len(shard.theta):
            return full_reply(shard)
        operation = Operation.SET if own is None else Operation.SET_REST
        return ModelReply(operation, Update(changed, shard.theta[changed]), shard.version, "delta")

    def _own_entries(self, request: ModelRequest, state: State) -> State | None:
        """Return the entries of the request's own push that the worker can add by itself."""
        own: State | None = state["scratch"].get(str(request.worker))
        pushed = (request.step, request.base_version)
        if own is None or (own["step"], own["base_version"]) != pushed:
            return None
        return own if len(own["indices"]) else None
