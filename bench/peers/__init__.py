"""Comparison of Thinwire with other systems (peers) that train the same model on the same links.

`plan` lists the runs and reads their records, `contenders` defines the processes of each system,
`running` starts these processes in network namespaces (`lab`), and `report` and `picture` produce
the tables and the picture. ``python -m bench.peers`` runs all of this; README.md in this folder
explains it.
"""
