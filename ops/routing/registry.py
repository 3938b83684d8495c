"""The Router seam: which block travels on which class of service; and how packets are cut.

A router's state is plain arrays and numbers, owned by the caller. Once in an exchange `begin`
looks at the context, then `cut` parts the blocks of each shard.
"""

from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.reliable import Reliable

#: --router value -> policy.
ROUTERS: dict[str, type[Reliable] | type[Dgt]] = {"reliable": Reliable, "dgt": Dgt}

Router = Reliable | Dgt

__all__ = [
    "ROUTERS",
    "Dgt",
    "Reliable",
    "Router",
]
