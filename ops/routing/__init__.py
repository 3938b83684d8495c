"""The Router seam: which block travels on which class of service; and how packets are cut.

A router's state is plain arrays and numbers, owned by the caller. Once in an exchange `begin`
looks at the context, then `cut` parts the blocks of each shard.
"""

from ops.routing.dgt import Dgt
from ops.routing.reliable import Reliable
from ops.routing.sharding import MAX_SLICE_ENTRIES, place, positions, split

#: --router value -> policy.
REGISTRY: dict[str, type[Reliable] | type[Dgt]] = {"reliable": Reliable, "dgt": Dgt}

Router = Reliable | Dgt

__all__ = [
    "MAX_SLICE_ENTRIES",
    "REGISTRY",
    "Dgt",
    "Reliable",
    "Router",
    "place",
    "positions",
    "split",
]
