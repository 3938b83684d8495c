"""The bulk path: a TCP connection that carries the frames of a client's gRPC stream.

gRPC makes up more than half of a shard's cost of a dense update: gRPC copies received bytes three
times and sent bytes once, and switches threads twenty times. The bulk path, a plain TCP connection,
avoids the cost of gRPC. A client announces in its Hello message that it supports bulk connections
(TCP connections that carry the stream's frames). The shard's Welcome message offers a TCP port, an
attempt number and a key for a bulk connection. The client opens the bulk connection while the gRPC
stream is already in use. On a bulk connection, client and shard prove to each other that they have
the key of the shard's offer. Client and shard then each send Switch as the last message on the gRPC
stream, and send all later messages in the same frames over the bulk connection. After the switch to
a bulk connection, the gRPC stream stays open for admission control and to detect a dead peer. When
a client's gRPC stream or its bulk connection ends, the other connection is closed, too. If the
client cannot open the bulk (TCP) connection, all messages are sent over gRPC.

On a bulk connection, a header of four bytes precedes every frame: the frame's length, and in the
highest bit a flag that marks a piece of a payload. The receiver reads a piece of a payload from the
socket directly into the payload's memory. In the package `bulk`, the module `connection` sends and
receives frames, `tls` encrypts a connection, `handshake` proves the identity of both ends,
`switching` decides when a stream moves from gRPC to its bulk connection, and `listener` owns the
shard's port.
"""

from thinwire.proto.bulk.connection import BulkConnection, wire_bytes
from thinwire.proto.bulk.handshake import connect
from thinwire.proto.bulk.listener import BulkListener

__all__ = ["BulkConnection", "BulkListener", "connect", "wire_bytes"]
