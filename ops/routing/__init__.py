"""A router chooses for each gradient block whether it is sent over gRPC or in a UDP datagram.

A gradient block is a range of consecutive entries of a gradient tensor. Most blocks of a gradient
have small values and contribute little to the update. On a slow link the router DGT sends
unimportant gradient blocks in UDP datagrams, which may be lost, so that important gradient blocks
arrive sooner. The module `base` defines the Router interface, `dgt` and `reliable` implement
routers, and `registry` maps names to routers. A worker's `packetizer` writes gradient values into
UDP datagrams (`datagram_format`), and a shard server's `parser` and `reassembler` restore the
gradient from the datagrams. The package `thinwire.ops.routing` does no input or output: UDP sockets
are in `thinwire.proto.udp`, datagram sessions in `thinwire.ps.datagrams`. Importing the package
`thinwire.ops.routing` does not import numpy.
"""
