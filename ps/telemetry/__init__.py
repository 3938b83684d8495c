"""A shard's monitoring: the run's status document, the metrics port and TensorBoard scalars.

Only the writer thread may read the shard's state machine, and monitoring must never block the
writer thread or end a run. `StatusReporter` (status) makes the run's status documents from the
state machine's counters and the reports of other nodes, `ShardInstruments` (instruments) exports
the shard's figures for /metrics, and `PsScalars` (tensorboard) writes the figures as TensorBoard
scalars. The modules of the package `ps.telemetry` need numpy and gRPC.
"""
