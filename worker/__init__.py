"""The worker role: computes gradients on a part of the data, exchanges them with the PS.

The module `flags` reads the worker's settings. The module `role` implements the worker process with
data, model and checkpoints. The module `train_step` computes the gradients of the worker's model.
The class `trainer.WorkerSession` joins, exchanges, reports and leaves, without data or a model;
user scripts run on a WorkerSession too. The package `core` is the training engine, `client` talks
to the shards, `collective` sums updates among the workers, and `telemetry` reports metrics. The
module `standalone` trains without a network, as a baseline. The package `worker` re-exports
nothing, so that `--help` imports `worker.flags` without TensorFlow.
"""
