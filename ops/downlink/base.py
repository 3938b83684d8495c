"""Interface of downlink codecs, which select the content of a shard server's replies to workers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, Protocol

from thinwire.ops.downlink.types import ModelChange, ModelReply, ModelRequest, ShardView
from thinwire.ops.policy import Policy
from thinwire.ops.types import Float32, State


class DownCodec(Policy, Protocol):
    """Selects the weights or updates that a shard server sends in its replies to workers.

    A downlink codec is a frozen dataclass of hyper-parameters. The calling shard server stores the
    state of a downlink codec. A method of a downlink codec may change its argument `state` in place
    to save a copy; the caller must use only the returned state.

    Attributes:
        keeps_replicas: Whether replies depend on a replica (copy) of the worker's weights on the
            shard server.
        omits_own_entries: Whether a shard server's reply may omit weights that the worker can
            compute from its own push.
        relays: Whether a shard server's reply may hold the workers' coded updates instead of new
            weights.
    """

    keeps_replicas: ClassVar[bool] = False
    omits_own_entries: ClassVar[bool] = False
    relays: ClassVar[bool] = False

    def init(self, size: int) -> State:
        """Return the downlink codec's initial state for a shard server with `size` weights."""

    def record_update(self, change: ModelChange, state: State) -> State:
        """Record that an update changed the shard server's weights."""
        return state

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return a key of a worker's request; replies to requests with equal keys share arrays.

        By default the sharing key of a request is the version of the worker's weights, because the
        shard server's reply does not depend on the worker.
        """
        return request.base_version

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return the reply to a worker's request; the arrays in the reply are copies."""

    def forget(self, worker: int, state: State) -> State:
        """Drop the codec's state of a worker that has left the run or has wrong weights."""
        return state

    def replica_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return a worker's weights [n]; None if they are the shard's weights at `base_version`."""
        return None
