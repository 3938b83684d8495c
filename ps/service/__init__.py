"""Network service of a PS shard: `ShardServer` (module server) runs the state machine in one
thread.

One `StreamReader` (module stream_reader) for each client's stream passes its messages to a dialogue
(package dialogues), which checks and queues them.
The module `connections` holds the open streams of clients and sends replies. The module `handshake`
checks the Hello message of each client. `ServedModel` (served_model) holds everything that another
model of the script replaces. `LeaderClient` (leader_client) connects a following shard
(id 1 and up) to shard 0. The package `ps.service` does not import its own modules, because they
load gRPC, and --help must work without gRPC.
"""
