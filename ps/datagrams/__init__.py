"""A shard's end of the datagram path: sockets, sessions of workers, reassembly, counters.

Pushes of `--router=dgt` arrive in two parts, one on the gRPC stream and one in UDP datagrams. This
package joins them and hands whole pushes to the writer thread, so that the core sees no difference.
The computation itself is sans-IO, in `thinwire.ops.routing`. Public names: `port.DatagramPort` (a
shard's sockets), `receiver.DatagramReceiver` (the same without sockets, as the simulator uses it),
`counters.DatagramCounts` and `counters.summary_block`. They are imported from their modules:
telemetry reads the counters without loading sockets and numpy.
"""
