"""Receiving side of the UDP datagram path: a shard's sockets, sessions, reassembly and counters.

With `--router=dgt` a worker's push arrives in two parts, one on the gRPC stream and one in UDP
datagrams. This package joins the two parts and passes complete pushes to the shard's writer thread,
so the core handles them like pushes without datagrams. The computation without I/O is in
`thinwire.ops.routing`. Public names: `port.DatagramPort` (a shard's sockets),
`receiver.DatagramReceiver` (reassembly without sockets, which the simulator uses),
`counters.DatagramCounts` and `counters.summary_block`. Import these names from their modules, so
that telemetry can read the counters without loading sockets and numpy.
"""
