"""One persistent gRPC stream per (client, shard): the public names.

`serve` and `ServerStream` are the shard's side, `ClientStream` the other. Both move frames, that
is `bytes` that are exactly one protobuf message each; `thinwire.proto.messages` makes and reads
them.
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
