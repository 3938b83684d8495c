"""The interface of down codecs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.frozen import BeforeChange, unguarded
from thinwire.ops.types import Policy, State

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.downlink.types import ModelReply, ModelRequest, RelayedRound, ShardView
    from thinwire.ops.types import Float32, Int64


class DownCodec(Policy, Protocol):
    """Decides what a shard's reply holds.

    An implementation is a frozen dataclass of hyper-parameters. The state belongs to the caller and
    is changed in place where that saves a copy; only the returned state is valid afterwards.
    """

    @property
    def keeps_replicas(self) -> bool:
        """Whether replies depend on a replica of the worker's weights, kept on the shard."""

    @property
    def omits_own_entries(self) -> bool:
        """Whether a reply may leave out what the worker can add to its weights by itself."""

    @property
    def relays(self) -> bool:
        """Whether a reply may be the updates of a round as they were coded."""

    def init(self, size: int) -> State:
        """Return the state of a shard with `size` entries that has not replied to anybody."""

    def record_update(
        self,
        indices: Int64 | None,
        version: int,
        state: State,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
        before_change: BeforeChange = unguarded,
    ) -> State:
        """Record that an update changed the weights.

        Args:
            indices: The changed entries, ascending; None: all.
            version: Of the shard after the update.
            state: From `init`.
            own: Those of the entries that a worker can add by itself, if the update was its alone.
            relayed: The updates as they were coded, where their plain mean is all that changed the
                weights; None: it is not, or the down codec does not relay.
            before_change: Called before an array of the state changes.
        """

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return a key that is equal for requests that may share one reply's arrays."""

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return the reply; its arrays are copies."""

    def forget(self, worker: int, state: State) -> State:
        """Drop the state of a worker that has left, or whose weights are wrong."""

    def replica_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return the weights [n] of a worker at `base_version`; None: those that the shard had."""
