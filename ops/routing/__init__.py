"""Routers decide how each block travels: reliably on the stream, or in datagrams by priority.

On a thin link most of a gradient matters little; DGT sends that part in UDP datagrams that may be
lost, so that the rest arrives sooner. `base` holds the contract, `dgt` and `reliable` the policies,
`registry` their names. A worker's `packetizer` makes datagrams (`datagram_format`), a shard's
`parser` and `reassembler` make pushes of them again. All of it is sans-IO: sockets are in
`thinwire.proto.udp`, sessions in `thinwire.ps.datagrams`. Importing this package loads no numpy.
"""

from thinwire.ops.routing.base import LostEntries, Manifest, RouteContext, Routed, Router, Transport
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.routing.reliable import Reliable

__all__ = [
    "ROUTERS",
    "Dgt",
    "LostEntries",
    "Manifest",
    "Reliable",
    "RouteContext",
    "Routed",
    "Router",
    "Transport",
]
