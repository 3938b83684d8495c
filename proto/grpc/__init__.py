"""One persistent gRPC stream per (client, shard).

`serve` and `ServerStream` are the shard's side, `ClientStream` the client's. Both move frames:
`bytes` that are exactly one protobuf message each, made and read by `thinwire.proto.framing`.
`session` adds the handshake and the retries of a client, `health` the standard health service.
"""

from thinwire.proto.grpc.client import ClientStream, NoProgress, StreamLost, Unreachable
from thinwire.proto.grpc.common import check_bind, is_loopback, wire_bytes
from thinwire.proto.grpc.server import GrpcServer, PortInUse, ServerStream, serve

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
    "serve",
    "wire_bytes",
]
