"""The routers by their value of --router."""

from thinwire.ops.routing.base import Router
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.reliable import Reliable

#: --router value -> policy.
ROUTERS: dict[str, type[Router]] = {"reliable": Reliable, "dgt": Dgt}
