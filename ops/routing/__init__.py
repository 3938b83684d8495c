"""Routers choose how each block is sent: reliably on the stream, or in prioritized datagrams.

Most of a gradient contributes little. On a thin link DGT sends that part in UDP datagrams, which
may be lost, so that the important blocks arrive sooner. `base` has the interface, `dgt` and
`reliable` the policies, `registry` their names. A worker's `packetizer` makes datagrams
(`datagram_format`); a shard's `parser` and `reassembler` join them to pushes again. The package
does no input or output: sockets are in `thinwire.proto.udp`, sessions in `thinwire.ps.datagrams`.
Importing this package loads no numpy.
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
