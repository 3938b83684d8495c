"""The wire: messages, framing, streams and datagrams between the nodes of a run.

`thinwire.proto` and `peers.proto` define the messages; `messages` converts and checks them,
`framing` cuts them into frames, `versions` compares protocol versions. `grpc` carries frames over
one stream per client and shard, `udp` datagrams, `security` authenticates, `emulation` models
links, and `metrics_server` serves Prometheus. `proto.grpc` and `proto.udp` re-export their public
names.
"""
