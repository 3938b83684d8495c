"""The parameter server (PS): one process for each shard (part) of the model.

The package ``core`` implements a parameter server shard as a state machine without I/O. The package
``service`` serves the shard over the network, ``persistence`` saves the shard's state on disk,
``datagrams`` receives the blocks that the method DGT sends over UDP, ``wire`` encodes and decodes
messages, and ``telemetry`` reports counters. The package ``shard`` builds, serves and ends the
process of a shard. The module ``role`` finds or receives the shard's model; the module ``flags``
defines the process's options.
"""
