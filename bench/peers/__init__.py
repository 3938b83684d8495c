"""The same training by other systems, each with its best of three learning rates.

`plan` lists the runs and their records, `contenders` the commands of each system, `running` starts
their processes in network namespaces (`lab`), `report` and `picture` make tables and the picture of
what was found. ``python -m bench.peers`` does all that; README.md beside this file tells how.
"""
