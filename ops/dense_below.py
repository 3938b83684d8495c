"""A wrapper that sends small tensors whole, around any codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ops.base_codecs import Dense, feed
from ops.codec_checks import check_finite
from ops.feedback import Wrapper
from ops.types import Block, ConfigurationError, EncodeContext, ModelSpec, Packet, State

if TYPE_CHECKING:
    from ops.types import Float32


@dataclasses.dataclass(frozen=True)
class DenseBelow(Wrapper):
    """Send small tensors whole; biases and the like cost little and are hurt most by waiting.

    Around other wrappers it is the same as inside them, around what they are around: what these do
    to tensors they do to small ones, too.

    Attributes:
        inner: What gets the other tensors; it sends values as this does.
        entries: Tensors with fewer are small; at least 1.
    """

    entries: int = 1
    takes_factors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a limit that no tensor is below."""
        if self.entries < 1:
            raise ConfigurationError(
                f"--dense_below={self.entries}: expected 1 or more entries (0 on the command line "
                "makes no exception)."
            )

    def init(self, spec: ModelSpec, kernels: Any) -> State:
        """Return the state: the inner codec's, for the tensors that it gets."""
        if isinstance(self.inner, Wrapper):
            return self._inside().init(spec, kernels)
        large = [tensor for tensor in spec.tensors if tensor.size >= self.entries]
        return super().init(ModelSpec(tuple(large)), kernels)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return dense blocks and the inner codec's, in order of slots.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        ctx = dataclasses.replace(ctx, finite=True)
        if isinstance(self.inner, Wrapper):
            return self._inside().encode(tensors, state, ctx)
        small, large = self._slots(tensors)
        dense, _ = self._dense.encode(_pick(tensors, small), {}, ctx)
        packet, inner = self.inner.encode(_pick(tensors, large), state["inner"], ctx)
        return _joined(dense, small, packet, large), state | {"inner": inner}

    def feed(
        self, residuals: Sequence[Float32], tensors: Sequence[Float32], state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:  # fmt: skip
        """See `ops.base_codecs.feed`."""
        if isinstance(self.inner, Wrapper):
            return feed(self._inside(), residuals, tensors, state, ctx)
        small, large = self._slots(tensors)
        factors = ctx.factors or (1.0,) * len(tensors)
        packets, states = [], []
        for codec, slots, own in ((self._dense, small, {}), (self.inner, large, state["inner"])):
            context = dataclasses.replace(ctx, factors=tuple(factors[slot] for slot in slots))
            packet, own = feed(codec, _pick(residuals, slots), _pick(tensors, slots), own, context)
            packets.append(packet)
            states.append(own)
        return _joined(packets[0], small, packets[1], large), state | {"inner": states[1]}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Let the inner codec take back what did not arrive."""
        if isinstance(self.inner, Wrapper):
            return self._inside().undelivered(packet, state)
        return super().undelivered(packet, state)

    def _inside(self) -> Any:
        """Return the inner wrapper with this inside it."""
        inner = self.inner
        if isinstance(inner, DenseBelow):
            return DenseBelow(inner.inner, max(self.entries, inner.entries))
        return dataclasses.replace(inner, inner=DenseBelow(inner.inner, self.entries))

    @property
    def _dense(self) -> Dense:
        return Dense(self.inner.value_dtype)

    def _slots(self, tensors: Sequence[Float32]) -> tuple[list[int], list[int]]:
        """Return the numbers of the small tensors, and of the others."""
        small = [slot for slot, tensor in enumerate(tensors) if tensor.size < self.entries]
        return small, [slot for slot, tensor in enumerate(tensors) if tensor.size >= self.entries]


def _pick(tensors: Sequence[Float32], slots: Sequence[int]) -> list[Float32]:
    return [tensors[slot] for slot in slots]


def _joined(one: Packet, slots: Sequence[int], other: Packet, others: Sequence[int]) -> Packet:
    """Return one packet of two, whose blocks' slots are places in `slots` and `others`."""

    def moved(packet: Packet, to: Sequence[int]) -> list[Block]:
        return [dataclasses.replace(block, slot=to[block.slot]) for block in packet.blocks]

    blocks = sorted(moved(one, slots) + moved(other, others), key=lambda block: block.slot)
    return Packet(tuple(blocks), other.kind)
