"""One persistent gRPC stream per client and shard.

`GrpcServer` and `ServerStream` implement the shard's end of a gRPC stream, and `ClientStream`
implements the client's end. A gRPC stream between client and shard carries frames, `bytes` objects
with exactly one protobuf message. The module `thinwire.proto.framing` builds and parses frames.
The module `session` adds the client's handshake and retries to a gRPC stream. The module `health`
serves the standard gRPC health service, grpc.health.v1.
"""

from thinwire.proto.grpc.client import ClientStream, NoProgress, StreamLost, Unreachable
from thinwire.proto.grpc.common import check_bind, is_loopback, wire_bytes
from thinwire.proto.grpc.server import GrpcServer, PortInUse, ServerStream

__all__ = [
    "ClientStream",
    "GrpcServer",
    "NoProgress",
    "PortInUse",
    "ServerStream",
    "StreamLost",
    "Unreachable",
    "check_bind",
    "is_loopback",
    "wire_bytes",
]
