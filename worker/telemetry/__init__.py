"""A worker's reports: measured rounds, instruments for /metrics, TensorBoard scalars.

The training thread only adds numbers, so measuring hardly slows training; other threads make
documents of the numbers. `round_trace.MEASURES` has an implementation for each value of --measure.
`instruments.collect` returns the instruments for /metrics. `tensorboard.WorkerScalars` writes
scalars. This package re-exports nothing: a run imports `instruments` and `tensorboard` only if they
are switched on.
"""
