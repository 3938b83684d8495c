"""The bulk path: a TCP connection next to a client's gRPC stream, which carries its frames.

gRPC makes up more than half of a shard's cost of a dense update: gRPC copies received bytes three
times and sent bytes once, and switches threads twenty times. The bulk path avoids this cost.
The client announces in its Hello that it supports bulk connections. The shard's Welcome offers a
port, a number and a key. The client dials the port while the gRPC stream is already in use. Client
and shard prove to each other that they have the key. Each end then sends Switch as its last message
on the gRPC stream, and sends all later messages in the same frames over the new connection.
The gRPC stream stays open for admission control and to detect a dead peer. When the stream or the
connection ends, the other one ends too. If the connection cannot be opened, all messages stay on
gRPC.

On a connection, a header of four bytes precedes every frame: the frame's length, and in the highest
bit a flag that marks a piece of a payload. The receiver reads a piece from the socket straight into
the payload's memory. `connection` implements the frames, `tls` encrypts a connection, `handshake`
exchanges the proofs, `switching` holds the state machines of client and shard, and `listener` owns
the shard's port.
"""

from thinwire.proto.bulk.connection import BulkConnection, wire_bytes
from thinwire.proto.bulk.handshake import connect
from thinwire.proto.bulk.listener import BulkListener

__all__ = ["BulkConnection", "BulkListener", "connect", "wire_bytes"]
