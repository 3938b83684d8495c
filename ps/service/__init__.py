"""A shard on the network: `ShardServer` (server) runs the core in one writer thread.

A `StreamReader` (stream_reader) for each stream checks and queues messages; `connections` holds the
streams and sends replies; `handshake` checks Hellos; `LeaderClient` (leader_client) connects a
following shard to shard 0. Modules are imported by name: they need gRPC, and --help does not.
"""
