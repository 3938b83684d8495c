"""A shard's end of the datagram path: sockets, workers' sessions, reassembly, counters.

With `--router=dgt` a push arrives in two parts, one on the gRPC stream and one in UDP datagrams.
This package joins the two parts and hands whole pushes to the writer thread, so that the core sees
no difference. The sans-IO computation is in `thinwire.ops.routing`. Public names:
`port.DatagramPort` (a shard's sockets), `receiver.DatagramReceiver` (reassembly without sockets,
which the simulator uses), `counters.DatagramCounts` and `counters.summary_block`. Import these
names from their modules: telemetry reads the counters without loading sockets and numpy.
"""
