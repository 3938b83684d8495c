"""Routers choose how a gradient block is sent: on the reliable stream, or in a datagram.

A block is a range of a tensor's entries. Most blocks of a gradient contribute little. On a thin
link the router DGT sends these blocks in UDP datagrams, which may be lost, so that the important
blocks arrive sooner. The module `base` has the interface, `dgt` and `reliable` have the routers,
`registry` their names. A worker's `packetizer` makes datagrams (`datagram_format`); a shard's
`parser` and `reassembler` restore the push from datagrams. The package does no input or output:
sockets are in `thinwire.proto.udp`, sessions in `thinwire.ps.datagrams`. Importing this package
loads no numpy.
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
