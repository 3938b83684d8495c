"""When is an update released, and which workers may begin their next iteration?

``base`` holds the contract (SyncRule, and SyncPolicy for its settings), ``rule`` the one rule that
is BSP, ASP, SSP and GSP by its two parameters, ``drawn`` the one by which only some workers take
part in a round, ``groups`` how groups of workers are read, written and proposed from measured
speeds. A rule orders tokens and never sees an update, so every shard,
the Simulator and the tests use the same one.
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
