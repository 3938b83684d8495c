"""Wrappers around any codec: sign and rate, clipping, how much is sent, small tensors whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.codecs.base import Codec, EncodeContext, check_finite, check_rate
from thinwire.ops.codecs.dense import Dense
from thinwire.ops.codecs.error_feedback import CodecWrapper
from thinwire.ops.codecs.packets import rescaled
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import (
    Block,
    ConfigurationError,
    Kind,
    ModelSpec,
    Packet,
    State,
)

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: --dgc_clip_scope values.
CLIP_SCOPES = ("model", "tensor")


@dataclasses.dataclass(frozen=True)
class Descend(CodecWrapper):
    """Make changes of weights: hand on ``-learning rate * tensors``.

    What the inner codec remembers holds the rates of the steps it comes from: a change of the
    rate leaves it as it is.

    Attributes:
        inner: What sends the changes.

    Source: Dual-Way Gradient Sparsification, ICPP 2020, whose residuals are of eta times gradients.
    """

    kind: ClassVar[Kind] = Kind.DELTA

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet of the changes.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        ctx = _with_factor(ctx, len(tensors), -ctx.learning_rate)
        packet, state = super().encode(tensors, state, ctx)
        return Packet(packet.blocks, self.kind), state


@dataclasses.dataclass(frozen=True)
class RateAtSend(CodecWrapper):
    """Make changes of weights: multiply what is sent by minus the learning rate of now.

    What the inner codec remembers is of gradients: a change of the rate is one of the backlog
    too. The sign goes in with the tensors, the rate into the packet's scales, so that nothing is
    rounded twice.

    Attributes:
        inner: What sends the gradients.

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018.
    """

    kind: ClassVar[Kind] = Kind.DELTA

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the state: the scales of the packet under way."""
        return super().init(spec, kernels) | {"scales": []}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet, times the learning rate.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        rate = ctx.learning_rate
        ctx = _with_factor(ctx, len(tensors), -1.0)
        packet, state = super().encode(tensors, state, ctx)
        blocks = tuple(rescaled(block, rate) for block in packet.blocks)
        scales = [block.values.scale for block in packet.blocks]
        return Packet(blocks, self.kind), state | {"scales": scales}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Let the inner codec take back its own packet, without the rate."""
        blocks = tuple(
            dataclasses.replace(block, values=dataclasses.replace(block.values, scale=scale))
            for block, scale in zip(packet.blocks, state["scales"], strict=True)
        )
        return super().undelivered(Packet(blocks, self.inner.kind), state)


@dataclasses.dataclass(frozen=True)
class Clip(CodecWrapper):
    """Clip the tensors to an L2 norm before anything accumulates them.

    Attributes:
        inner: What gets the clipped tensors.
        norm: Largest L2 norm, above 0.
        scope: model: of all tensors together; tensor: of each.

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018, section 3.3: with N workers the
    norm is the usual one over the square root of N.
    """

    norm: float = 1.0
    scope: str = "model"

    def __post_init__(self) -> None:
        """Refuse a norm that clips everything, and an unknown scope."""
        if not 0 < self.norm < math.inf:
            raise ConfigurationError(
                f"--dgc_clip_norm={self.norm}: expected a finite number above 0 (0 on the command "
                "line is no clipping)."
            )
        if self.scope not in CLIP_SCOPES:
            raise ConfigurationError(
                f"--dgc_clip_scope={self.scope!r}: expected one of {', '.join(CLIP_SCOPES)}."
            )

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet of the clipped tensors.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        factors = ctx.factors or (1.0,) * len(tensors)
        norms = [
            abs(factor) * ctx.kernels.norm(tensor)
            for factor, tensor in zip(factors, tensors, strict=True)
        ]
        if self.scope == "model":
            norms = [math.hypot(*norms)] * len(norms)
        factors = tuple(
            factor * min(1.0, self.norm / norm) if norm else factor
            for factor, norm in zip(factors, norms, strict=True)
        )
        ctx = dataclasses.replace(ctx, factors=factors, finite=True)
        return super().encode(tensors, state, ctx)


def has_clipping(codec: Codec) -> bool:
    """Return whether a wrapper of the codec clips what it gets."""
    while isinstance(codec, CodecWrapper):
        if isinstance(codec, Clip):
            return True
        codec = codec.inner
    return False


@dataclasses.dataclass(frozen=True)
class WarmUp(CodecWrapper):
    """Send more in the first epochs: ``R_e = max(R, R ** ((e + 1) / (E + 1)))`` in epoch e < E.

    With R = 0.001 and E = 4 these are 25, 6.3, 1.6 and 0.4 %, then 0.1 %. An epoch is the run's,
    by the examples that all workers have consumed.

    Attributes:
        inner: A codec that sends a fraction.
        compression_rate: R.
        epochs: E, at least 1.

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018, section 3.3.
    """

    compression_rate: float = 0.01
    epochs: int = 4

    def __post_init__(self) -> None:
        """Refuse no epochs, and a rate that keeps nothing."""
        check_rate(self.compression_rate)
        if self.epochs < 1:
            raise ConfigurationError(
                f"--warmup_epochs={self.epochs}: expected 1 or more (0 on the command line is no "
                "warm-up)."
            )

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet of this epoch's fraction.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        epoch = min(int(ctx.epoch), self.epochs)
        rate = self.compression_rate
        keep = max(rate, rate ** ((epoch + 1) / (self.epochs + 1)))
        if ctx.keep is None:  # else there will be no later epochs
            ctx = dataclasses.replace(ctx, keep=keep)
        return super().encode(tensors, state, ctx)


@dataclasses.dataclass(frozen=True)
class DenseBelow(CodecWrapper):
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

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the state: the inner codec's, for the tensors that it gets."""
        if isinstance(self.inner, CodecWrapper):
            return self._inside(self.inner).init(spec, kernels)
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
        if isinstance(self.inner, CodecWrapper):
            return self._inside(self.inner).encode(tensors, state, ctx)
        small, large = self._slots(tensors)
        dense, _ = self._dense.encode(_pick(tensors, small), {}, ctx)
        packet, inner = self.inner.encode(_pick(tensors, large), state["inner"], ctx)
        return _joined(dense, small, packet, large), state | {"inner": inner}

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Do one error-feedback step, of the small tensors and of the others."""
        if isinstance(self.inner, CodecWrapper):
            return self._inside(self.inner).feed(residuals, tensors, state, ctx)
        small, large = self._slots(tensors)
        factors = ctx.factors or (1.0,) * len(tensors)
        packets, states = [], []
        for codec, slots, own in ((self._dense, small, {}), (self.inner, large, state["inner"])):
            context = dataclasses.replace(ctx, factors=tuple(factors[slot] for slot in slots))
            packet, own = codec.feed(_pick(residuals, slots), _pick(tensors, slots), own, context)
            packets.append(packet)
            states.append(own)
        return _joined(packets[0], small, packets[1], large), state | {"inner": states[1]}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Let the inner codec take back what did not arrive."""
        if isinstance(self.inner, CodecWrapper):
            return self._inside(self.inner).undelivered(packet, state)
        return super().undelivered(packet, state)

    def residuals(self, state: State) -> list[Float32]:
        """Return what error feedback keeps of each tensor."""
        if isinstance(self.inner, CodecWrapper):
            return self._inside(self.inner).residuals(state)
        return super().residuals(state)

    def _inside(self, inner: CodecWrapper) -> CodecWrapper:
        """Return the inner wrapper with this inside it."""
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


def _with_factor(ctx: EncodeContext, count: int, factor: float) -> EncodeContext:
    """Return the context with one more factor of every tensor."""
    factors = ctx.factors or (1.0,) * count
    return dataclasses.replace(ctx, factors=tuple(each * factor for each in factors))


def _pick(tensors: Sequence[Float32], slots: Sequence[int]) -> list[Float32]:
    return [tensors[slot] for slot in slots]


def _joined(one: Packet, slots: Sequence[int], other: Packet, others: Sequence[int]) -> Packet:
    """Return one packet of two, whose blocks' slots are places in `slots` and `others`."""

    def moved(packet: Packet, to: Sequence[int]) -> list[Block]:
        return [dataclasses.replace(block, slot=to[block.slot]) for block in packet.blocks]

    blocks = sorted(moved(one, slots) + moved(other, others), key=lambda block: block.slot)
    return Packet(tuple(blocks), other.kind)
