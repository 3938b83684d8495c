"""A worker's reports: measured rounds, instruments for /metrics, TensorBoard scalars.

The training thread only adds numbers, so that measuring hardly slows training; other threads turn
the numbers into JSON documents. The dictionary `round_trace.MEASURES` has an implementation for
each value of the flag --measure. The function `instruments.collect` returns the instruments for the
/metrics page. `tensorboard.WorkerScalars` writes scalars. The package `worker.telemetry` re-exports
nothing, so that importing one of its modules loads no other one.
"""
