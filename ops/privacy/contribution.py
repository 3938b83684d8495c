"""A bound on what one worker sends of a round: the sensitivity of the round's sum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.aggregation.outliers import norm_of
from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.error_feedback import CodecWrapper
from thinwire.ops.codecs.packets import decoded, rescaled
from thinwire.ops.types import Packet, State

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Values scaled to a norm are rounded to float32, and stay this far below it before.
_ROUNDING = 1 - 2.0**-20


@dataclasses.dataclass(frozen=True)
class BoundedContribution(CodecWrapper):
    """Send packets that decode to at most an L2 norm, over all tensors together.

    It is the outermost wrapper, so that the bound holds for what leaves, whatever is inside: values
    that were rounded up, and error feedback, which sends what earlier rounds have kept back. What
    is above the bound is dropped. If error feedback kept it, it would grow from round to round.

    Attributes:
        inner: What codes.
        norm: The bound, above 0.
    """

    norm: float = 1.0

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet, scaled down if it decodes to more than the norm.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        packet, state = super().encode(tensors, state, ctx)
        norm = math.hypot(*(norm_of(decoded(block)[1]) for block in packet.blocks))
        if norm <= self.norm:
            return packet, state
        factor = self.norm / norm * _ROUNDING
        blocks = tuple(rescaled(block, factor) for block in packet.blocks)
        return dataclasses.replace(packet, blocks=blocks), state
