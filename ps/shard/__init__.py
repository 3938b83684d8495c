"""The process of a PS shard: from its saved files to the end of the run.

The module `preparation` builds a shard's state machine from its initial model and its saved files.
`process` serves the shard (`ShardProcess`), and `introduction` presents it to shard 0 and to
clients. `next_phase` replaces the served model by the script's next model. `linger` decides how
long a shard serves after the run's end. `run_records` writes shard 0's files in the run directory.
"""
