"""The parameter server (PS): one process for each shard (part) of the model.

The package ``core`` implements a parameter server shard as a state machine without I/O. The package
``service`` serves the shard over the network, ``persistence`` saves the shard's state on disk,
``datagrams`` receives the blocks that the method DGT sends over UDP, ``wire`` encodes and decodes
messages, and ``telemetry`` reports counters. The module ``role`` builds a parameter server process
from the packages of a shard; the module ``flags`` defines the process's options.
"""
