"""Registry of routers by value of the flag --router."""

from thinwire.ops.routing.base import Router
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.reliable import Reliable

#: Value of --router -> class of the router, which chooses gRPC or UDP for each gradient block.
ROUTERS: dict[str, type[Router]] = {"reliable": Reliable, "dgt": Dgt}
