"""The Supervisor: follows a run from outside, evaluates the model and writes the run's records.

`role` is the process; it reads one `shard_stream` per shard, has `evaluator` fetch and score the
model, shows progress by `dashboard`, and records all by `recorder`, `metrics_log`, and
`metrics_hook`, which calls a function of the user's. `report` makes pages of finished runs.
Training does not depend on a Supervisor. The modules import numpy and TensorFlow, so nothing is
re-exported here.
"""
