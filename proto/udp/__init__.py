"""Unreliable UDP datagrams from a worker to a shard.

The module `sender` is the worker's end of the datagram path: its function `connect` returns a
`UdpSender`, which sends batches of signed datagrams. The module `receiver` is the shard's end of
the datagram path (`UdpReceiver`), which delivers buffers of received datagrams; the network may
lose some datagrams. `thinwire.ops.routing` defines the format, order and meaning of a datagram. The
module `sockets` sets UDP socket options and the class of service. The module `packet_filter` makes
the Linux kernel drop datagrams of unknown senders before they fill a receive buffer.
"""
