"""The network service of a shard: `ShardServer` (server) runs the core in one writer thread.

A `StreamReader` (stream_reader) for each stream checks and queues messages. `connections` holds the
streams and sends replies. `handshake` checks Hellos. `LeaderClient` (leader_client) connects a
following shard to shard 0. The package imports none of its modules: they need gRPC, and --help must
work without gRPC.
"""
