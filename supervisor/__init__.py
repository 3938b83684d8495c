"""The Supervisor role: follows a run, evaluates the central model and writes the run's records.

The module `role` is the Supervisor process. The Supervisor process reads one stream
(`shard_stream`) from each shard and shows progress with `dashboard`. The module `evaluator` fetches
the model from the shards and computes its metrics. The modules `recorder` and `metrics_log` write
the records of a run, and `metrics_hook` passes each record to a user function. The package `report`
makes HTML pages about finished training runs. Training continues without a Supervisor. The modules
of the package `supervisor` import numpy and TensorFlow, so the package re-exports nothing.
"""
