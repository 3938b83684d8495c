"""Reports of a node about a training run, as plain data.

The roles measure and count. These modules define the documents with the figures, so that the status
of PS shard 0, a summary and a report use the same names. `run_status` defines the status and
summary.json, `evaluation` the metrics of the central model by name, `instruments` the values that
/metrics exports, and `round_trace` the time records of single rounds. `predictions` compares the
Advisor's file with a run; `tensorboard` writes event files. This package re-exports nothing,
because `predictions` imports all methods, which few importers of these modules need.
"""
