"""Synchronization rules: when a shard applies workers' pushes, and which workers may proceed.

The module ``base`` has the interface `SyncRule`: a value with two pure functions. ``rounds`` does
the bookkeeping for all rules, and ``agreements`` gives all shards of a run equal rounds. ``rule``
has one rule that is BSP, ASP, SSP or GSP, depending on its groups and its bound. ``drawn`` has a
rule in which only some workers take part in a round. ``groups`` reads and writes groups of workers,
and proposes groups from measured speeds. A synchronization rule orders tokens of pushes and never
sees an update, so every shard, the Simulator and the tests use the same rules.
"""

from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, Ready, SyncRule
from thinwire.ops.sync.drawn import DrawnSync
from thinwire.ops.sync.groups import AutoGroups, Groups
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.sync.rule import SYNC_RULES, GroupSync, make_rule

__all__ = [
    "SYNC_RULES",
    "Advance",
    "ArrivalToken",
    "AutoGroups",
    "Draw",
    "DrawnSync",
    "GroupSync",
    "Groups",
    "Joiners",
    "Ready",
    "Rounds",
    "SyncRule",
    "make_rule",
]
