"""Down codecs after whose reply a worker's floats equal the shard's, bit for bit: dense, delta.

AdaComp's published code sends the whole model every time; docs/methods/adacomp.md, has the rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation, ShardView
from thinwire.ops.types import ConfigurationError, State, Update

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.types import Float32, Int64


def whole(shard: ShardView) -> ModelReply:
    """Return a copy of all of the shard."""
    return ModelReply(Operation.FULL, Update(None, shard.theta.copy()), shard.version, "full")


def check_fraction(name: str, value: float) -> None:
    """Raise ConfigurationError for what is no fraction."""
    if not 0 <= value <= 1:  # refuses NaN too
        raise ConfigurationError(f"{name}={value}: expected a fraction from 0 to 1.")


class _Shared:
    """A down codec that knows no worker: what it answers depends on the version asked from."""

    per_worker: ClassVar[bool] = False
    leaves_own_out: ClassVar[bool] = False

    def share_of(self, asked: ModelRequest, state: State) -> Hashable:
        """Return what two questions have in common that may be given the same arrays."""
        del state
        return asked.base_version

    def forget(self, worker: int, state: State) -> State:
        """Return the state as it is: there is nothing of a worker's own in it."""
        del worker
        return state

    def copy_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return nothing: no copies are kept."""
        del worker, base_version, state
        return None


@dataclasses.dataclass(frozen=True)
class DownDense(_Shared):
    """Send the whole shard every time."""

    def init(self, size: int) -> State:
        """Return the empty state."""
        del size
        return {}

    def note(
        self, indices: Int64 | None, version: int, state: State, own: OwnEntries | None = None
    ) -> State:
        """Hear that applying `version` changed these entries (None: all)."""
        del indices, version, own
        return state

    def gather(self, asked: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return a copy of the model."""
        del asked, state
        return whole(shard)


@dataclasses.dataclass(frozen=True)
class DownDelta(_Shared):
    """Send the new values of the entries that changed since the worker's version (SET).

    One int32 per entry remembers when it last changed and serves every worker. Where more than
    `dense_fraction` of the entries changed, the whole shard is smaller and is sent instead.

    A worker's own entries are left out where nobody else has changed them since its base: it adds
    to them what it sent (SET_REST). For that the positions of each worker's newest push are kept;
    not in checkpoints, for whoever comes back is sent the whole model.
    """

    dense_fraction: float = 0.6
    leaves_own_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what is no fraction."""
        check_fraction("dense_fraction", self.dense_fraction)

    def init(self, size: int) -> State:
        """Return `last_changed` = 0 for every entry, and the newest dense change."""
        import numpy as np

        return {"last_changed": np.zeros(size, np.int32), "dense_version": 0, "scratch": {}}

    def note(
        self, indices: Int64 | None, version: int, state: State, own: OwnEntries | None = None
    ) -> State:
        """Hear that applying `version` changed these entries (None: all).

        Args:
            indices: The entries.
            version: After the change.
            state: From `init`.
            own: Those of them that a worker can add by itself, if the change was its alone.
        """
        if indices is None:
            state["dense_version"] = version
            return state
        if own is not None:
            untouched = state["last_changed"][own.indices] <= own.base_version
            state["scratch"][str(own.worker)] = own.plain(own.indices[untouched])
        state["last_changed"][indices] = version
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop a worker's own entries."""
        state["scratch"].pop(str(worker), None)
        return state

    def share_of(self, asked: ModelRequest, state: State) -> Hashable:
        """Return the question itself where what is left out is this worker's own."""
        return asked.base_version if self._own_of(asked, state) is None else asked

    def _own_of(self, asked: ModelRequest, state: State) -> State | None:
        """Return what the worker can add by itself of the push that it asks after."""
        own: State | None = state["scratch"].get(str(asked.worker))
        if own is None or (own["step"], own["base_version"]) != (asked.step, asked.base_version):
            return None
        return own if len(own["indices"]) else None

    def gather(self, asked: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return what turns the model of `asked.base_version` into the current one."""
        import numpy as np

        base = asked.base_version
        if base is None or base < state["dense_version"]:
            return whole(shard)
        if base == shard.version:
            nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
            return ModelReply(Operation.NONE, nothing, shard.version, "delta")
        last_changed, own = state["last_changed"], self._own_of(asked, state)
        is_lacking = last_changed > base
        if own is not None:
            mine = own["indices"]
            is_lacking[mine[last_changed[mine] == own["version"]]] = False
        changed = np.flatnonzero(is_lacking)
        if len(changed) > self.dense_fraction * len(shard.theta):
            return whole(shard)
        operation = Operation.SET if own is None else Operation.SET_REST
        return ModelReply(operation, Update(changed, shard.theta[changed]), shard.version, "delta")
