"""What a worker reports: measured rounds, instruments for /metrics, TensorBoard scalars.

The training thread only adds numbers, so that measuring costs it nothing; other threads make
documents of them. `MEASURES` (round_trace) has an implementation for each value of --measure,
`instruments.collect` returns what /metrics exports, `WorkerScalars` (tensorboard) writes scalars.
Nothing is re-exported: `instruments` and `tensorboard` are needed only where they are switched on.
"""
