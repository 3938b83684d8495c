"""Bound on the L2 norm of a worker's update: the sensitivity of the sum of all updates."""

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

#: Rounding of scaled values to float32 may increase the values' norm. So the codec wrapper scales
#: values to this fraction of the bound, and the norm of the rounded values is still at most the
#: bound.
_ROUNDING = 1 - 2.0**-20


@dataclasses.dataclass(frozen=True)
class BoundedContribution(CodecWrapper):
    """Codec wrapper that bounds the L2 norm of each decoded packet, over all tensors.

    The wrapper `BoundedContribution` must be the outermost one, so that the norm bound holds for
    the packets that the worker sends. Packets of the wrapped codecs may exceed the norm bound,
    because these codecs round values up, and error feedback adds values that earlier rounds did not
    send. `BoundedContribution` drops the excess of an update over the norm bound. If error feedback
    stored the excess of updates over the norm bound, the residual (the values not sent yet) would
    grow from round to round.

    Attributes:
        inner: The gradient codec whose packets the wrapper bounds.
        norm: Largest L2 norm of a decoded packet; above 0.
    """

    norm: float = 1.0

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the wrapped codec's packet, scaled down if its decoded L2 norm exceeds `norm`.

        Raises:
            NonFiniteUpdate: A gradient tensor holds NaN or infinity.
        """
        packet, state = super().encode(tensors, state, ctx)
        norm = math.hypot(*(norm_of(decoded(block)[1]) for block in packet.blocks))
        if norm <= self.norm:
            return packet, state
        factor = self.norm / norm * _ROUNDING
        blocks = tuple(rescaled(block, factor) for block in packet.blocks)
        return dataclasses.replace(packet, blocks=blocks), state
