"""What a shard reports: the run's status, instruments for /metrics, TensorBoard scalars.

Only the writer thread may read the core, and monitoring must never keep it waiting or end a run;
these modules are where that is arranged. `StatusReporter` (status) makes the documents of the run
out of the core's counters and the other nodes' reports, `ShardInstruments` (instruments) exports
the shard's own figures, `PsScalars` (tensorboard) writes them. The modules need numpy and gRPC.
"""
