"""Router without UDP: it sends every gradient block over gRPC."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.codecs.base import Codec
from thinwire.ops.policy import Policy
from thinwire.ops.routing.base import LostEntries, ReassemblyRules, RouteContext, Routed
from thinwire.ops.types import Block, ShardLayout, State


@dataclasses.dataclass(frozen=True)
class Reliable(Policy):
    """Router that sends every gradient block over gRPC, in order, exactly once."""

    uses_datagrams: ClassVar[bool] = False
    reassembly_rules: ClassVar[ReassemblyRules | None] = None
    channels: ClassVar[int] = 0
    max_late: ClassVar[int] = 0
    needs_datagrams_first: ClassVar[bool] = False
    marks_slots: ClassVar[bool] = False
    delivers_all: ClassVar[bool] = True
    joins_slots: ClassVar[bool] = True
    takes_device_arrays: ClassVar[bool] = False

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return an empty state, because a router that only uses gRPC needs no state."""
        return {}

    def begin(self, state: State, context: RouteContext) -> State:
        """Return the router's state unchanged, because it does not depend on the gradient."""
        return state

    def cut(
        self, shard: int, blocks: tuple[Block, ...], state: State, context: RouteContext
    ) -> tuple[Routed, State]:
        """Return a division that sends all gradient blocks over gRPC, and the unchanged state."""
        return Routed(blocks), state

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Return the state unchanged: every gradient block arrives over gRPC, or gRPC fails."""
        return state

    def check(self, codec: Codec) -> list[str]:
        """Return no warnings, because gRPC sends the values of every gradient codec unchanged."""
        return []
