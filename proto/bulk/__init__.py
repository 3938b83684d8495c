"""The bulk path: a TCP connection beside a client's gRPC stream, which takes over its frames.

gRPC costs more than half of what a dense update costs a shard: three copies of what arrives, one of
what is sent, and twenty changes of threads. So a Hello offers to do without,
and the Welcome offers a port, a number and a key. The client dials while the stream already works,
both prove that they have the key, and each end sends on its gRPC stream a last message, Switch;
everything after it comes over the new connection, in the same frames. The stream stays for what
gRPC does better: who is let in, and whether the other end is alive; when one of the two ends, so
does the other. Where the connection cannot be had, everything stays on gRPC.

A connection carries frames behind four bytes each: a length, and in its highest bit whether the
frame is a piece of a payload, which is then read from the socket to its place. `connection` has
that, `tls` the same through TLS, `handshake` both ends' proofs, `switching` the states of both
ends, `listener` the shard's port.
"""

from thinwire.proto.bulk.connection import BulkConnection, wire_bytes
from thinwire.proto.bulk.handshake import connect
from thinwire.proto.bulk.listener import BulkListener

__all__ = ["BulkConnection", "BulkListener", "connect", "wire_bytes"]
