"""The worker role: compute gradients on a share of the data and exchange them with the PS.

Modules in order of use: `flags` reads the worker's settings. `role` is the worker process with
data, model and checkpoints. `train_step` computes gradients. `trainer.WorkerSession` joins,
exchanges, reports and leaves, without data or a model; user scripts run on a WorkerSession too.
Packages of the worker: `core` is the training engine, `client` talks to the shards, `collective`
    sums updates
among the workers, `telemetry` reports metrics. `standalone` trains without a network, as a
baseline.
This package re-exports nothing: `--help` imports `worker.flags` without importing TensorFlow.
"""
