"""The downlink: a down codec selects the weights or updates that a shard sends in its replies.

Replies cost as much bandwidth as pushes, and a worker that already has most of the model does not
need the whole model. ``dense`` sends all weights of the shard. ``delta`` sends the new values of
the weights that changed, exactly. ``relay`` sends the workers' coded updates if they take fewer
bytes than new values, with the same exact result. ``sparse`` sends the weights that differ most;
the shard keeps a replica (a copy of each worker's weights) to know the differences. ``auto``
switches a worker from ``relay`` to ``sparse`` if the worker's replies are large. The registry of
down codecs is `thinwire.ops.downlink.registry`; the interface is `base.DownCodec`.
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
