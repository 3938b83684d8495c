"""Synchronization rules: when a shard applies workers' pushes, and which workers may proceed.

The module ``base`` has `SyncRule`, the interface of a synchronization rule: a value with two pure
functions. The module ``rounds`` records workers and waiting pushes for all synchronization rules.
The module ``agreements`` makes all shards of a run form equal rounds. The module ``rule`` has one
synchronization rule, which is BSP, ASP, SSP or GSP, depending on its worker groups and its
staleness bound. The module ``drawn`` has a synchronization rule in which only some workers, drawn
at random, train in each round. The module ``groups`` reads and writes worker groups, and proposes
worker groups from measured speeds. A synchronization rule reads tokens of pushes and never the
values of an update, so every shard, the Simulator and the tests use the same rules.
"""
