"""The downlink: a down codec selects the weights or updates that a shard sends in its replies.

Replies cost as much bandwidth as pushes, and a worker that already has most of the model does not
need the whole model. ``dense`` sends the whole shard. ``delta`` sends the changed entries, exactly.
``relay`` sends the coded updates of rounds if they take fewer bytes, with the same exact result.
``sparse`` sends the entries that differ most; the shard keeps a replica of each worker's weights to
know the differences. ``auto`` switches a worker from ``relay`` to ``sparse`` if replies are large.
The registry is `thinwire.ops.downlink.registry`; the interface is `base.DownCodec`.
"""

from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.downlink.exact import DownDelta, DownDense
from thinwire.ops.downlink.relay import DownRelay
from thinwire.ops.downlink.sparse import DownAuto, DownSparse
from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation, RelayedRound, ShardView

__all__ = [
    "DownAuto",
    "DownCodec",
    "DownDelta",
    "DownDense",
    "DownRelay",
    "DownSparse",
    "ModelReply",
    "ModelRequest",
    "Operation",
    "RelayedRound",
    "ShardView",
]
