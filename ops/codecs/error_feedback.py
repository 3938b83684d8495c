"""Wrappers that remember what was not sent: error feedback, and momentum that survives it.

A wrapper holds another codec, or wrapper, as `inner`; its state holds its own arrays beside the
inner one's: lists with one flat array for each tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.codecs.base import Codec, EncodeContext, check_finite
from thinwire.ops.codecs.packets import (
    decoded,
    detached,
    encode_multiplied,
    feed_in_turn,
    without_factors,
)
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import ConfigurationError, Kind, ModelSpec, Packet, State

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


@dataclasses.dataclass(frozen=True)
class CodecWrapper:
    """A codec around another.

    Attributes:
        inner: The other.
    """

    inner: Codec
    takes_factors: ClassVar[bool] = True

    @property
    def kind(self) -> Kind:
        """What the values mean."""
        return self.inner.kind

    @property
    def value_dtype(self) -> str:
        """How values travel."""
        return self.inner.value_dtype

    @property
    def sends_fraction(self) -> bool:
        """Whether a fraction of the entries is sent."""
        return self.inner.sends_fraction

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the state: none of its own."""
        return {"inner": self.inner.init(spec, kernels)}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet of the tensors times `ctx.factors`, and the state."""
        packet, inner = encode_multiplied(self.inner, tensors, state["inner"], ctx)
        return packet, state | {"inner": inner}

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Do one error-feedback step, in passes over memory of their own."""
        return feed_in_turn(self, residuals, tensors, state, ctx)

    def undelivered(self, packet: Packet, state: State) -> State:
        """Let the inner codec take back what did not arrive."""
        return state | {"inner": self.inner.undelivered(packet, state["inner"])}

    def residuals(self, state: State) -> list[Float32]:
        """Return what error feedback keeps of each tensor; nothing if there is none."""
        return residuals_of(self.inner, state["inner"])

    @property
    def keeps_momentum(self) -> bool:
        """Whether the state holds a momentum of what was sent, beside what was not."""
        return False

    def with_momentum(self, momentum: float) -> CodecWrapper:
        """Return the codec with this momentum where one was left open."""
        inner = with_momentum(self.inner, momentum)
        return self if inner is self.inner else dataclasses.replace(self, inner=inner)


def with_momentum(codec: Codec, momentum: float) -> Codec:
    """Return the codec with this momentum where one was left open; else the codec itself."""
    return codec.with_momentum(momentum) if isinstance(codec, CodecWrapper) else codec


def wrappers_of(codec: Codec) -> Iterator[CodecWrapper]:
    """Yield a codec's wrappers, the outermost first."""
    while isinstance(codec, CodecWrapper):
        yield codec
        codec = codec.inner


def coding_of(codec: Codec) -> Codec:
    """Return what a codec's wrappers are around: the one that decides what is sent."""
    for wrapper in wrappers_of(codec):
        codec = wrapper.inner
    return codec


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(CodecWrapper):
    """Keep what the inner codec does not send, and add it to the next step's tensors.

    With residual a, tensors h and carry m, per entry:

        a <- a + h;   q = what the packet decodes to;   a <- (a - q) + m q

    q is 0 where nothing is sent, so that the rounding of values stays in the residual too. With
    m = 0 this is Gradient Dropping's residual. With m > 0 it is SAMomentum without a division:
    an entry that was silent for T steps is sent as m times what was sent last plus its T tensors,
    so momentum decays once per sending, not once per step.

    With a decay b it begins by ``a <- b a``: what was kept long ago counts less than what comes
    now, which it may contradict after many local steps.

    Attributes:
        inner: What selects or rounds.
        carry: m, the part of what was sent that stays, from 0 to below 1; None: left open for
            `with_momentum`, 0 until then.
        decay: b, from 0 to 1.
        ahead: The part of the residual that a worker adds to the shards' model where it begins its
            local steps, from 0 to 1.

    Source: Aji and Heafield, EMNLP 2017 (m = 0); Dual-Way Gradient Sparsification, ICPP 2020, whose
    u is what is sent, kept where sent and divided by m elsewhere; SparseLoCo (arXiv 2508.15706),
    whose error feedback decays; "CSER", NeurIPS 2020, whose workers' models hold all of their error
    (ahead = 1).
    """

    carry: float | None = 0.0
    decay: float = 1.0
    ahead: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a momentum that does not decay."""
        if self.carry is not None and not 0 <= self.carry < 1:
            raise ConfigurationError(f"--dgs_momentum={self.carry}: expected 0 <= momentum < 1.")
        if not 0 <= self.decay <= 1:
            raise ConfigurationError(f"--error_decay={self.decay}: expected 0 to 1.")
        if not 0 <= self.ahead <= 1:
            raise ConfigurationError(f"--error_ahead={self.ahead}: expected 0 to 1.")

    @property
    def keeps_momentum(self) -> bool:
        """Whether a part of what was sent stays in the residual."""
        return bool(self.carry)

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return a residual of zeros."""
        return super().init(spec, kernels) | {"residual": _zeros(spec, kernels)}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet of the residual.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity; the residual is as it was.
        """
        check_finite(tensors, ctx)
        residuals = state["residual"]
        if self.decay != 1:
            for residual in residuals:
                residual *= residual.dtype.type(self.decay)
        if not ctx.finite:
            ctx = dataclasses.replace(ctx, finite=True)
        packet, inner = self.inner.feed(residuals, tensors, state["inner"], ctx)
        if self.carry:
            _give_back(residuals, packet, self.carry)
        return packet, state | {"inner": inner}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Add to the residual what of the packet has left it."""
        _give_back(state["residual"], packet, 1 - (self.carry or 0.0))
        return super().undelivered(packet, state)

    def residuals(self, state: State) -> list[Float32]:
        """Return the residual."""
        residuals: list[Float32] = state["residual"]
        return residuals

    def with_momentum(self, momentum: float) -> CodecWrapper:
        """Return the codec with this momentum, if it was left open."""
        filled = self if self.carry is not None else dataclasses.replace(self, carry=momentum)
        return CodecWrapper.with_momentum(filled, momentum)


def residuals_of(codec: Codec, state: State) -> list[Float32]:
    """Return what a codec's error feedback keeps of each tensor; nothing if it has none."""
    return codec.residuals(state) if isinstance(codec, CodecWrapper) else []


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(CodecWrapper):
    """Hand on a velocity instead of the gradient, so that what is kept back has momentum too.

    With velocity u, gradients h and momentum m:

        u <- m u + h          and u is handed on;
        u <- m (u + h)        and u + h is handed on (Nesterov).

    Momentum factor masking then sets u to 0 where the inner codec's packet has entries: what is
    under way shall not be pushed further by a stale direction.

    Attributes:
        inner: What remembers what it does not send, as a rule an ErrorFeedback.
        momentum: m, from 0 to below 1; None: left open for `with_momentum`, 0 until then.
        nesterov: Look ahead.
        masking: Momentum factor masking.

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018, sections 3.2 and 3.3; the
    Nesterov form is that of its authors' program.
    """

    momentum: float | None = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        """Refuse a momentum that does not decay."""
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigurationError(f"--dgc_momentum={self.momentum}: expected 0 <= momentum < 1.")

    @property
    def keeps_momentum(self) -> bool:
        """Whether there is a velocity."""
        return bool(self.momentum)

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return a velocity of zeros."""
        return super().init(spec, kernels) | {"velocity": _zeros(spec, kernels)}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet of the velocity.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity; the velocity is as it was.
        """
        check_finite(tensors, ctx)
        velocity: list[Float32] = state["velocity"]
        handed_on, momentum = velocity, self.momentum or 0.0
        factors = ctx.factors or (1.0,) * len(tensors)
        if self.nesterov:
            handed_on = []
            for each, tensor, factor in zip(velocity, tensors, factors, strict=True):
                step = tensor * tensor.dtype.type(factor)
                each += step
                ctx.kernels.accumulate(step, each, momentum)  # h + m (u + h)
                each *= each.dtype.type(momentum)
                handed_on.append(step)
        else:
            for each, tensor, factor in zip(velocity, tensors, factors, strict=True):
                ctx.kernels.accumulate(each, tensor, factor, momentum)
        packet, inner = self.inner.encode(handed_on, state["inner"], without_factors(ctx))
        packet = detached(packet, velocity)
        if self.masking:
            for block in packet.blocks:
                where, _ = decoded(block)
                velocity[block.slot][where] = 0
        return packet, state | {"inner": inner}

    def with_momentum(self, momentum: float) -> CodecWrapper:
        """Return the codec with this momentum, if it was left open."""
        left_open = self.momentum is None
        filled = dataclasses.replace(self, momentum=momentum) if left_open else self
        return CodecWrapper.with_momentum(filled, momentum)


def _zeros(spec: ModelSpec, kernels: Kernels) -> list[Float32]:
    """Return an array of zeros for each tensor, where the kernels want it."""
    return kernels.zeros([tensor.size for tensor in spec.tensors])


def _give_back(residuals: Sequence[Float32], packet: Packet, share: float) -> None:
    """Add to the residuals a share of what the packet decodes to."""
    for block in packet.blocks:
        where, values = decoded(block)
        residuals[block.slot][where] += values.dtype.type(share) * values
