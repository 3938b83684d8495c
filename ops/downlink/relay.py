"""The down codec that relays a round's updates as they were coded.

Where the server adds a plain mean, every worker can do so itself: it decodes the round's updates,
sums them in order of worker id and adds the mean, by the functions that the shard does it by. Then
its floats equal the shard's, bit for bit, for the bytes of coded updates instead of float32 values.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.downlink.exact import DownDelta
from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation, RelayedRound, ShardView
from thinwire.ops.frozen import BeforeChange, unguarded
from thinwire.ops.types import State

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.types import Int64


@dataclasses.dataclass(frozen=True)
class DownRelay(DownDelta):
    """Be ``delta``, but relay the last round where that is fewer bytes.

    It is relayed to workers whose base is the version before it, and only if it was a plain mean
    of updates as they came, times one factor. Not where one worker's update was released alone:
    ``delta`` then leaves out what the worker adds itself.
    """

    relays: ClassVar[bool] = True

    def record_update(
        self,
        indices: Int64 | None,
        version: int,
        state: State,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
        before_change: BeforeChange = unguarded,
    ) -> State:
        """Record the changed entries, and the round if it is to be relayed."""
        from thinwire.ops.downlink.replicas import block_bytes, reply_bytes

        state = super().record_update(indices, version, state, own, before_change=before_change)
        state["scratch"].pop("round", None)
        if relayed is None or len(relayed.updates) < 2:
            return state
        size = state["last_changed"].size
        set_bytes = reply_bytes(size if indices is None else indices.size, size)
        if sum(block_bytes(block) for blocks in relayed.updates for block in blocks) < set_bytes:
            state["scratch"]["round"] = {"version": version, "relayed": relayed}
        return state

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return the last round, if that is all that a worker lacks; else what has changed."""
        last = state["scratch"].get("round")
        if last is None or (last["version"], request.base_version) != (
            shard.version,
            shard.version - 1,
        ):
            return super().gather(request, shard, state)
        return ModelReply(Operation.RELAY, last["relayed"], shard.version, "relay")
