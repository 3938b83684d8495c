"""How a PS shard receives pushes over UDP: its sockets, sessions, reassembly and counters.

With `--router=dgt` (differential gradient transmission) a worker's push arrives in two parts, one
on the gRPC stream and one in UDP datagrams. The package `ps.datagrams` joins the stream part and
the datagram part of a push and passes complete pushes to the shard's writer thread, so the state
machine handles them like pushes without datagrams. The computation of datagram reassembly, without
I/O, is in `thinwire.ops.routing`. The public names of `ps.datagrams` are `port.DatagramPort` (a
shard's sockets), `receiver.DatagramReceiver` (reassembly without sockets, which the simulator
uses), `counters.DatagramCounts` and `counters.summary_block`. Import public names of `ps.datagrams`
from their modules, so that telemetry can read the datagram counters without loading sockets and
numpy.
"""
