"""Registry of downlink codecs.

The downlink codecs ``dense``, ``delta`` and ``relay`` are exact: after the worker has applied the
reply, its weights equal the shard server's weights bit for bit. The downlink codec ``sparse`` first
sends the largest differences between a worker's weights and the shard server's weights, and smaller
differences in later replies. The downlink codec ``auto`` works like ``relay`` for a worker until
the worker's replies are large, and then like ``sparse``.
"""

from __future__ import annotations

from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.downlink.exact import DownDelta, DownDense
from thinwire.ops.downlink.relay import DownRelay
from thinwire.ops.downlink.sparse import DownAuto, DownSparse

#: Value of the flag --down_codec -> class of the downlink codec.
DOWN_CODECS: dict[str, type[DownCodec]] = {
    "dense": DownDense,
    "delta": DownDelta,
    "relay": DownRelay,
    "sparse": DownSparse,
    "auto": DownAuto,
}
