"""The Supervisor role: follows a run, evaluates the central model and writes the run's records.

`role` is the Supervisor process. It reads one stream (`shard_stream`) per shard and shows progress
with `dashboard`. `evaluator` fetches and scores the model. `recorder`, `metrics_log` and
`metrics_hook` write the records; `metrics_hook` passes each record to a user function. `report`
makes pages of finished runs. Training does not depend on a Supervisor. The modules import numpy and
TensorFlow, so the package re-exports nothing.
"""
