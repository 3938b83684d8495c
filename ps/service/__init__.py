"""Network service of a shard: `ShardServer` (module server) runs the core in one writer thread.

A `StreamReader` (stream_reader) for each client's stream checks and queues messages. `connections`
holds the open streams and sends replies. `handshake` checks the Hello message of each client.
`LeaderClient` (leader_client) connects a following shard (id 1 and up) to shard 0. This package
imports none of its modules: they need gRPC, and --help must work without gRPC.
"""
