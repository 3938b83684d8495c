"""A shard's reports: the run's status, instruments for /metrics, TensorBoard scalars.

Only the writer thread may read the core, and monitoring must never block that thread or end a run;
these modules ensure both rules. `StatusReporter` (status) makes the run's status documents from the
core's counters and the other nodes' reports, `ShardInstruments` (instruments) exports the shard's
figures, and `PsScalars` (tensorboard) writes the figures as scalars. The modules need numpy and
gRPC.
"""
