"""The wire protocol: messages, framing, streams and datagrams between the nodes of a run.

The files `thinwire.proto` and `peers.proto` define the protobuf messages between the nodes of a
run. The module `messages` converts and checks messages, `framing` cuts messages into frames, and
`versions` compares protocol versions. The package `grpc` sends frames over one gRPC stream for each
pair of client and shard. The package `bulk` sends frames over a TCP connection in addition to a
client's gRPC stream. The package `udp` sends datagrams, `security` authenticates nodes, `emulation`
models links, and `metrics_server` serves Prometheus. The package `proto.grpc` exports the public
names of its modules.
"""
