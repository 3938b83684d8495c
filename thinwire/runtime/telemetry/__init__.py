"""Reports of a node about a run, as plain data.

The roles measure and count. These modules define the documents, so that the status of shard 0, a
summary and a report use the same names. `run_status`: status and summary.json. `evaluation`:
metrics of the central model by name. `instruments`: values that /metrics exports. `round_trace`:
records of single rounds. `predictions`: the Advisor's file and its comparison with a run.
`tensorboard`: event files. Nothing is re-exported, because `predictions` imports the methods, which
most users of the other modules do not need.
"""
