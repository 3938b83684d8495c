"""Client with which a worker exchanges messages with the shards of the parameter server.

The class `Exchange` pushes to all shards and waits for the replies of all shards. The class
`Heartbeat` renews the worker's leases during training. The class `ShardClient` holds the stream to
one shard. The class `ShardProtocol` decides which requests a worker sends, repeats or gives up; the
real client and the simulator use it. The class `PacingClient` queries the state server, which paces
the workers' local steps. The classes `PushEncoder` and `DatagramChannel` encode pushes as messages
and datagrams.
"""
