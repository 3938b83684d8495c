"""The downlink: what a shard's reply holds, so that a worker gets nearer to the shard's model.

Replies cost as much bandwidth as pushes, and a worker that already has most of the model need not
receive all of it. A down codec decides what it lacks: ``dense`` sends everything; ``delta`` what
has changed, exactly; ``relay`` a round's coded updates, exactly, where these are fewer bytes;
``sparse`` the entries that differ most, and keeps a replica of each worker's
weights to know the rest; ``auto`` switches from ``delta`` to ``sparse`` where that pays.
Rows of the registry: `thinwire.ops.downlink.registry`; the interface: `base.DownCodec`.
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
