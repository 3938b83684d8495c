"""Router without UDP: it sends every gradient block over gRPC."""

from __future__ import annotations

import dataclasses

from thinwire.ops.routing.base import RouteContext, Routed, Router
from thinwire.ops.types import Block, State


@dataclasses.dataclass(frozen=True)
class Reliable(Router):
    """Router that sends every gradient block over gRPC, in order, exactly once."""

    @property
    def joins_slots(self) -> bool:
        """True: a gradient block may span several variable slices."""
        return True

    def cut(
        self, shard: int, blocks: tuple[Block, ...], state: State, context: RouteContext
    ) -> tuple[Routed, State]:
        """Return a division that sends all gradient blocks over gRPC, and the unchanged state."""
        return Routed(blocks), state
