"""Exact downlink codecs `dense` and `delta`: a reply makes worker and shard weights equal.

The downlink codec ``dense`` sends the whole model in every reply, as AdaComp's published code does.
The downlink codec ``delta`` sends the weights that changed since the version of the worker's
weights, by the rule in docs/methods/adacomp.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.downlink.types import (
    ModelChange,
    ModelReply,
    ModelRequest,
    Operation,
    OwnEntries,
    ShardView,
)
from thinwire.ops.types import ConfigurationError, Int64, State, Update


def full_reply(shard: ShardView) -> ModelReply:
    """Return a reply with a copy of all weights of the shard server."""
    return ModelReply(Operation.FULL, Update(None, shard.keep(shard.theta)), shard.version, "full")


def check_fraction(name: str, value: float) -> None:
    """Raise ConfigurationError if the value of the setting `name` is not from 0 to 1."""
    if not 0 <= value <= 1:  # rejects NaN too, as comparisons with NaN are False
        raise ConfigurationError(f"{name}={value}: expected a fraction from 0 to 1.")


#: Limits of the window of newest updates in `DownDelta`: the first is the number of positions of
#: all updates, as a fraction of the shard's weights (with more positions, scanning all weights is
#: as fast); the second is the number of updates.
_WINDOW, _MOST_UPDATES = 0.25, 64


def _keep_positions(state: State, indices: Int64, version: int, own: OwnEntries | None) -> None:
    """Append an update's positions to the window of newest updates, and drop the oldest updates."""
    import numpy as np

    size, window = state["last_changed"].size, state["scratch"].setdefault("window", [])
    # The window of updates must hold consecutive versions: `_changed_since` merges all updates
    # after a base version, and a missing version would hide the weights that its update changed.
    if window and window[-1]["version"] != version - 1:
        window.clear()
    dtype = np.int32 if size < 1 << 31 else np.int64
    # entries that the update's sender cannot compute from its own push; almost always empty
    not_own = indices[:0]
    if own is not None and len(own.indices) < len(indices):
        not_own = np.setdiff1d(indices, own.indices, assume_unique=True)
    entry = {"version": version, "indices": indices.astype(dtype), "rest": not_own.astype(dtype)}
    window.append(entry)
    num_kept = sum(len(update["indices"]) for update in window)
    while num_kept > _WINDOW * size or len(window) > _MOST_UPDATES:
        num_kept -= len(window.pop(0)["indices"])


def _changed_since(base: int, own: State | None, state: State) -> Int64:
    """Return positions of weights changed after version `base`, without the worker's `own` ones."""
    import numpy as np

    window, last_changed = state["scratch"].get("window"), state["last_changed"]
    if not window or window[0]["version"] > base + 1:
        is_lacking = last_changed > base
        if own is not None:
            # Omit an entry of the worker's own push only if no later update changed the weight.
            own_indices = own["indices"]
            is_lacking[own_indices[last_changed[own_indices] == own["version"]]] = False
        return np.flatnonzero(is_lacking)
    own_version = None if own is None else own["version"]
    newer = [update for update in window if update["version"] > base]
    sets = [update["rest" if update["version"] == own_version else "indices"] for update in newer]
    joined = np.concatenate(sets)
    # not kind="stable", because numpy's vectorized sort is faster than a merge of sorted ranges
    joined.sort()
    is_new = np.ones(joined.size, bool)
    np.not_equal(joined[1:], joined[:-1], out=is_new[1:])
    return joined[is_new].astype(np.int64)


@dataclasses.dataclass(frozen=True)
class DownDense(DownCodec):
    """Downlink codec that sends all weights of the shard server in every reply."""

    def init(self, size: int) -> State:
        """Return an empty state, because the downlink codec `dense` needs no state."""
        return {}

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return a reply with all weights of the shard server."""
        return full_reply(shard)


@dataclasses.dataclass(frozen=True)
class DownDelta(DownCodec):
    """Downlink codec that sends the weights that changed since the worker's version of the weights.

    The state of the downlink codec holds one int32 per weight: the version at which the weight
    changed last. The state of the downlink codec also holds the positions in the newest updates
    (together up to the fraction `_WINDOW` of all weights), because merging the positions in a few
    updates is faster than scanning all weights. If more than the fraction `dense_fraction` of the
    weights changed, the reply has all weights of the shard server, which then take fewer bytes than
    positions and values.

    A reply omits weights that only the receiving worker's own push has changed, because the worker
    itself adds the values that it pushed (operation SET_REST). The state of the downlink codec
    stores the positions of each worker's newest push, so that a reply can omit them. Checkpoints of
    a shard server do not contain the positions of each worker's newest push, because a worker that
    rejoins receives the whole model.

    Attributes:
        dense_fraction: Fraction of changed weights, 0 to 1, above which a reply has all weights of
            the shard server.
    """

    dense_fraction: float = 0.6
    omits_own_entries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise an error if `dense_fraction` is outside 0 to 1."""
        super().__post_init__()
        check_fraction("dense_fraction", self.dense_fraction)

    def init(self, size: int) -> State:
        """Return the downlink codec's state before the first update: no weight has changed."""
        import numpy as np

        scratch: State = {"window": []}
        return {"last_changed": np.zeros(size, np.int32), "dense_version": 0, "scratch": scratch}

    def record_update(self, change: ModelChange, state: State) -> State:
        """Record the weights' version after an update as the version of each changed weight."""
        indices, version, own = change.indices, change.version, change.own
        if indices is None:
            state["dense_version"] = version
            return state
        change.before_change(state["last_changed"], indices)
        if own is not None:
            # The worker adds its pushed values to the weights of its base version. The sum equals
            # the shard's weights only where no other update changed the entry between the base
            # version and this push. `last_changed` must be read now, because this push overwrites
            # it below.
            untouched = state["last_changed"][own.indices] <= own.base_version
            indices_to_omit = own.indices if untouched.all() else own.indices[untouched]
            state["scratch"][str(own.worker)] = {**vars(own), "indices": indices_to_omit}
        state["last_changed"][indices] = version
        _keep_positions(state, indices, version, own)
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop the stored positions of the newest push of a worker that has left the run."""
        state["scratch"].pop(str(worker), None)
        return state

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return the version of the worker's weights, or the request if a reply omits its push."""
        return request.base_version if self._own_entries(request, state) is None else request

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return a reply that turns weights of version `base_version` into the newest weights."""
        import numpy as np

        base = request.base_version
        if base is None or base < state["dense_version"]:
            return full_reply(shard)
        if base == shard.version:
            nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
            return ModelReply(Operation.NONE, nothing, shard.version, "delta")
        own_entries = self._own_entries(request, state)
        changed = _changed_since(base, own_entries, state)
        if len(changed) > self.dense_fraction * len(shard.theta):
            return full_reply(shard)
        operation = Operation.SET if own_entries is None else Operation.SET_REST
        return ModelReply(operation, Update(changed, shard.theta[changed]), shard.version, "delta")

    def _own_entries(self, request: ModelRequest, state: State) -> State | None:
        """Return the weights that the worker computes from its own push, or None."""
        entries: State | None = state["scratch"].get(str(request.worker))
        push = (request.step, request.base_version)
        if entries is None or (entries["step"], entries["base_version"]) != push:
            return None
        return entries if len(entries["indices"]) else None
