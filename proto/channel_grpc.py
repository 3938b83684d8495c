"""One persistent gRPC stream per (client, shard): the public names.

`serve` and `ServerStream` are the shard's side, `ClientStream` the other. Both move frames, that
is `bytes` that are exactly one protobuf message each; `proto.convert` makes and reads them.
"""

from proto.grpc_client import ClientStream, NoProgress, StreamLost, Unreachable
from proto.grpc_common import check_bind, is_loopback, wire_bytes
from proto.grpc_server import PortInUse, Server, serve
from proto.server_stream import ServerStream

__all__ = [
    "ClientStream",
    "NoProgress",
    "PortInUse",
    "Server",
    "ServerStream",
    "StreamLost",
    "Unreachable",
    "check_bind",
    "is_loopback",
    "serve",
    "wire_bytes",
]
