"""The conversation of one worker with the shards of the parameter server.

`Exchange` pushes to all shards and waits for their replies, `Heartbeat` renews the leases
meanwhile; `ShardClient` is one shard with its thread and socket, and `ShardProtocol` decides what
is sent, sent again and given up there, for the real client and for the Simulator. `PacingClient`
queries the state server, `PushEncoder` and `DatagramChannel` make messages and datagrams of pushes.
"""

from thinwire.worker.client.datagrams import DatagramChannel, WorkerTransport
from thinwire.worker.client.exchange import Exchange, Heartbeat
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.client.pacing_client import PacingClient
from thinwire.worker.client.protocol import ShardProtocol
from thinwire.worker.client.shard_client import PushRefused, ShardClient, ShardGone

__all__ = [
    "DatagramChannel",
    "Exchange",
    "Heartbeat",
    "PacingClient",
    "PushEncoder",
    "PushRefused",
    "ShardClient",
    "ShardGone",
    "ShardProtocol",
    "WorkerTransport",
]
