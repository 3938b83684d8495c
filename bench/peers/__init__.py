"""The same training by other systems, each with its best of three learning rates.

`plan` lists the runs and their records, `contenders` the commands of each system, `running` starts
their processes in network namespaces (`lab`), `report` and `picture` make the tables and
the picture. ``python -m bench.peers`` does all that; README.md beside this file explains it.
"""
