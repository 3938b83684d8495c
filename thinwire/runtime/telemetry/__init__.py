"""What a node reports about a run, as plain data.

The roles measure and count; these modules define the documents, so that a status that shard 0
sends, a summary and a report agree on every name. `run_status`: status and summary.json.
`evaluation`: metrics of the central model by name. `instruments`: what /metrics exports.
`round_trace`: records of single rounds. `predictions`: the Advisor's file and its comparison with a
run. `tensorboard`: event files. Nothing is re-exported: `predictions` needs the methods, which most
users of the others do not.
"""
