"""The wire: messages, framing, streams and datagrams between the nodes of a run.

`thinwire.proto` and `peers.proto` define the messages. `messages` converts and checks messages,
`framing` cuts messages into frames, and `versions` compares protocol versions. `grpc` carries
frames over one stream per client and shard. `bulk` carries frames over a TCP connection next to
that stream. `udp` carries datagrams, `security` authenticates nodes, `emulation` models links, and
`metrics_server` serves Prometheus. `proto.grpc` and `proto.udp` re-export their public names.
"""
