"""The Worker role: it computes gradients on its share of the data and exchanges them with the PS.

In the order of use: `flags` reads the worker's settings, `role` is the process with data, model and
checkpoints, `train_step` computes gradients, `trainer.WorkerSession` is one worker's part in a run
without data and model (user scripts are built on it too). The packages below it: `core`, the
engine; `client`, the conversation with the shards; `collective`, sums among the workers;
`telemetry`, what is reported. `standalone` trains alone, as a baseline.
Nothing is re-exported: `--help` reads `worker.flags`, which must not import TensorFlow.
"""
