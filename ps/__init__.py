"""The parameter server (PS): one process for each shard (part) of the model.

``core`` implements a shard as a state machine without I/O. ``service`` serves the shard over the
network, ``persistence`` saves the shard's state on disk, ``datagrams`` receives the blocks that the
method DGT sends over UDP, ``wire`` encodes and decodes messages, and ``telemetry`` reports
counters. ``role`` builds a PS process from these packages; ``flags`` defines its options.
"""
