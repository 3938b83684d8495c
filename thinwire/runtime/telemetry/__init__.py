"""Reports of nodes about a training run, as plain data.

The modules of `telemetry` define documents with the figures that the roles measure, so that the
status of PS shard 0, a summary and a report use the same names. The module `run_status` defines the
status and summary.json, `evaluation` the metrics of the PS's model by name, `instruments` the
values that /metrics exports, and `round_trace` the time records of single training rounds. The
module `predictions` compares the Advisor's file with a run, and `tensorboard` writes event files.
The package `telemetry` re-exports no names, because its module `predictions` imports all training
methods, which few importers need.
"""
