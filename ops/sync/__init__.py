"""Synchronization rules: when a shard applies workers' updates, and which workers may proceed.

The module ``base`` defines SyncRule, the interface of synchronization rules, and SyncPolicy, the
settings of a rule. The module ``rule`` has one synchronization rule that acts as BSP, ASP, SSP or
GSP, depending on its worker groups and its staleness bound. The module ``drawn`` has a
synchronization rule in which only some workers, drawn at random, participate in a round. The module
``groups`` reads and writes groups of workers, and proposes groups from measured worker speeds. A
synchronization rule orders (worker, step) tokens of pushes and never sees gradient values, so every
shard server, the Simulator and the tests use the same rules.
"""

from thinwire.ops.sync.base import Advance, ArrivalToken, Draw, Joiners, SyncPolicy, SyncRule
from thinwire.ops.sync.drawn import DrawnSync
from thinwire.ops.sync.groups import AutoGroups, Groups
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
    "SyncPolicy",
    "SyncRule",
    "make_rule",
]
