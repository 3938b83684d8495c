"""The Router seam: which block travels on which class of service; and how packets are cut.

A router's state is plain arrays and numbers, owned by the caller. Once in an exchange `begin`
looks at the context, then `cut` parts the blocks of each shard.
"""

from ops.routing.reliable import Reliable
from ops.routing.sharding import MAX_SLICE_ENTRIES, place, positions, split

#: --router value -> policy.
REGISTRY: dict[str, type] = {"reliable": Reliable}

__all__ = ["MAX_SLICE_ENTRIES", "REGISTRY", "Reliable", "place", "positions", "split"]
