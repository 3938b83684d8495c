"""Codec wrappers that store unsent gradient values: error feedback and momentum correction.

A codec wrapper has a field `inner` with the wrapped codec or wrapper. The state of a codec wrapper
holds the state of the wrapped codec, and lists with one flat array per gradient tensor, for example
the residuals (values not sent yet).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from thinwire.ops.codecs.base import Codec, EncodeContext, check_finite
from thinwire.ops.codecs.packets import (
    FeedsInTurn,
    decoded,
    detached,
    encode_multiplied,
    without_factors,
)
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.options import decay_factor, fraction, switch
from thinwire.ops.policy import setting
from thinwire.ops.types import Float32, Kind, ModelSpec, Packet, State


@dataclasses.dataclass(frozen=True)
class CodecWrapper(FeedsInTurn):
    """Base class of wrappers: a gradient codec around another codec.

    Attributes:
        inner: The gradient codec or wrapper that this codec wrapper wraps.
    """

    inner: Codec
    takes_factors: ClassVar[bool] = True

    @property
    def kind(self) -> Kind:
        """The meaning of the values in the codec's packets: gradients or changes of weights."""
        return self.inner.kind

    @property
    def value_dtype(self) -> str:
        """Dtype of the packet's values on the wire, which the wrapped codec defines."""
        return self.inner.value_dtype

    @property
    def sends_fraction(self) -> bool:
        """Whether the wrapped codec obeys `ctx.keep`, the fraction of gradient entries to send."""
        return self.inner.sends_fraction

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the codec wrapper's state, which holds only the wrapped codec's state."""
        return {"inner": self.inner.init(spec, kernels)}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the wrapped codec's packet for gradients times `ctx.factors`, and a new state."""
        packet, inner = encode_multiplied(self.inner, tensors, state["inner"], ctx)
        return packet, state | {"inner": inner}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Let the wrapped codec take back a packet that the shard servers did not apply."""
        return state | {"inner": self.inner.undelivered(packet, state["inner"])}

    def residuals(self, state: State) -> list[Float32]:
        """Return the wrapped codec's residuals, one per tensor; [] without error feedback."""
        return residuals_of(self.inner, state["inner"])

    @property
    def keeps_momentum(self) -> bool:
        """Whether the codec's state carries momentum from one training step to the next."""
        return False

    def with_momentum(self, momentum: float) -> CodecWrapper:
        """Return the codec with `momentum` set in every wrapper that has the momentum None."""
        inner = with_momentum(self.inner, momentum)
        return self if inner is self.inner else dataclasses.replace(self, inner=inner)


def with_momentum(codec: Codec, momentum: float) -> Codec:
    """Return the codec with `momentum` set in every wrapper whose momentum is not set (None)."""
    return codec.with_momentum(momentum) if isinstance(codec, CodecWrapper) else codec


def wrappers_of(codec: Codec) -> Iterator[CodecWrapper]:
    """Yield the wrappers around a codec, the outermost wrapper first."""
    while isinstance(codec, CodecWrapper):
        yield codec
        codec = codec.inner


def coding_of(codec: Codec) -> Codec:
    """Return the innermost codec, without wrappers: the codec that selects the entries to send."""
    for wrapper in wrappers_of(codec):
        codec = wrapper.inner
    return codec


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(CodecWrapper):
    """Codec wrapper that adds the values that the inner codec does not send to the next gradients.

    Error feedback computes ``a <- a + h``, sends a packet of entries of a, and computes
    ``a <- (a - q) + m q``, with residual a (the values not sent yet), gradients h, decoded packet q
    (0 where nothing is sent) and carry m. The residual (the values not sent yet) also keeps the
    rounding errors of sent values. With the carry m = 0, error feedback has the same residual as
    Gradient Dropping (Aji and Heafield). With a carry m > 0 error feedback is SAMomentum without a
    division: an entry that is sent after T steps is m times the value sent last plus the T
    gradients since then, so momentum decays once per sent value, not once per step.

    With a decay b, each error-feedback step begins with ``a <- b a`` for the residual a (the values
    not sent yet). With a decay, old residuals (values not sent yet) count less than new gradients,
    because after many local steps the old values can contradict the new gradients.

    Attributes:
        inner: Gradient codec that selects or rounds the values of gradients plus residual.
        carry: m, the fraction of a sent value that stays in the residual (the values not sent yet),
            from 0 to below 1. None counts as 0 until `with_momentum` sets the fraction.
        decay: b, the factor on the old residual (the values not sent yet) in each training step,
            from 0 to 1; 1: no decay.
        ahead: Fraction of the residual (the values not sent yet) that a worker adds to the pulled
            weights when it begins its local steps, from 0 to 1.

    Source: Aji and Heafield, EMNLP 2017 (m = 0). Dual-Way Gradient Sparsification, ICPP 2020
    (m > 0); the paper's u is the value to send, which is kept where sent and divided by m
    elsewhere. SparseLoCo, arXiv 2508.15706 (decay of the residual). "CSER", NeurIPS 2020 (the
    workers' models contain the whole residual: ahead = 1).
    """

    carry: float | None = setting(
        decay_factor(
            "dgs_momentum",
            "Momentum that each worker applies to its gradients with --codec=dgs.",
            unset="0.7; with --local_optimizer=script the momentum of the script's SGD",
        ),
        0.0,
    )
    decay: float = setting(
        fraction(
            "error_decay",
            1.0,
            "Factor on the residual (unsent part) of --error_feedback, applied in each step.",
            "factor",
        )
    )
    ahead: float = setting(
        fraction(
            "error_ahead",
            0.0,
            "Fraction of the residual (the unsent part of earlier updates) that a worker applies "
            "to the shards' model before its local steps.",
            "factor",
        )
    )

    @property
    def keeps_momentum(self) -> bool:
        """Whether a fraction of each sent gradient value stays in the residual as momentum."""
        return bool(self.carry)

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the initial state: residuals of zeros, and the wrapped codec's state."""
        return super().init(spec, kernels) | {"residual": _zeros(spec, kernels)}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the wrapped codec's packet for residual (unsent values) plus gradients.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity. The residual (the
                unsent values) is unchanged.
        """
        # Check the gradients before the decay: the decay and the inner codec change the residual in
        # place, and a step that raises must leave the residual unchanged.
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
        """Add the values of a packet that the shard servers did not apply to the residual."""
        # `encode` took only the fraction 1 - carry of each sent value out of the residual.
        _give_back(state["residual"], packet, 1 - (self.carry or 0.0))
        return super().undelivered(packet, state)

    def residuals(self, state: State) -> list[Float32]:
        """Return the residuals (unsent gradient values), one [n] float32 array per tensor."""
        residuals: list[Float32] = state["residual"]
        return residuals

    def with_momentum(self, momentum: float) -> CodecWrapper:
        """Return the wrapper with `momentum` as its fraction `carry`, if `carry` is None."""
        filled = self if self.carry is not None else dataclasses.replace(self, carry=momentum)
        return CodecWrapper.with_momentum(filled, momentum)


def residuals_of(codec: Codec, state: State) -> list[Float32]:
    """Return the codec's residuals, one [n] float32 per tensor; empty without error feedback."""
    return codec.residuals(state) if isinstance(codec, CodecWrapper) else []


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(CodecWrapper):
    """Codec wrapper that encodes a velocity, not the gradient, so that unsent values gain momentum.

    With velocity u, gradients h and momentum m, momentum correction computes ``u <- m u + h`` and
    passes u to the inner codec. With Nesterov momentum, velocity u and gradients h it computes
    ``u <- m (u + h)`` and passes the new u plus h to the inner codec.

    After each packet, momentum factor masking sets the velocity to 0 where the packet has entries,
    so that a stale direction does not keep moving weights whose values were just sent.

    Attributes:
        inner: Codec that remembers the gradient values that it does not send, usually an
            ErrorFeedback.
        momentum: m, the factor on the old velocity in each training step, from 0 to below 1. None
            counts as 0 until `with_momentum` sets the momentum.
        nesterov: Whether to encode the new velocity plus the gradient (Nesterov momentum) instead
            of the new velocity.
        masking: Whether to set the velocity of sent entries to 0 (momentum factor masking).

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018, sections 3.2 and 3.3. The
    Nesterov form comes from the authors' program.
    """

    momentum: float | None = setting(
        decay_factor(
            "dgc_momentum",
            "Momentum that each worker applies to its gradients with --codec=dgc.",
            unset="0.9; with --local_optimizer=script the momentum of the script's SGD",
        ),
        0.9,
    )
    nesterov: bool = setting(
        switch("dgc_nesterov", "Use Nesterov's form of momentum in --codec=dgc.")
    )
    masking: bool = setting(
        switch(
            "dgc_masking",
            "With --codec=dgc: set the velocity of the entries that are sent to zero.",
            default=True,
        )
    )

    @property
    def keeps_momentum(self) -> bool:
        """Whether the velocity carries momentum from one training step to the next."""
        return bool(self.momentum)

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the initial state: velocities of zero, and the wrapped codec's state."""
        return super().init(spec, kernels) | {"velocity": _zeros(spec, kernels)}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the wrapped codec's packet for the velocity (the gradients with momentum).

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity. The velocity (the
                gradients with momentum) is unchanged.
        """
        check_finite(tensors, ctx)
        velocity: list[Float32] = state["velocity"]
        passed_on, momentum = velocity, self.momentum or 0.0
        factors = ctx.factors or (1.0,) * len(tensors)
        if self.nesterov:
            passed_on = []
            for u, tensor, factor in zip(velocity, tensors, factors, strict=True):
                step = tensor * tensor.dtype.type(factor)
                u += step
                # the variable `step` is now h + m (u + h), with gradient h and old velocity u
                ctx.kernels.accumulate(step, u, momentum, 1.0)
                u *= u.dtype.type(momentum)
                passed_on.append(step)
        else:
            for u, tensor, factor in zip(velocity, tensors, factors, strict=True):
                ctx.kernels.accumulate(u, tensor, factor, momentum)
        packet, inner = self.inner.encode(passed_on, state["inner"], without_factors(ctx))
        # The packet's values may be views of the velocity, which masking and the next step change.
        packet = detached(packet, velocity)
        if self.masking:
            for block in packet.blocks:
                where, _ = decoded(block)
                velocity[block.slot][where] = 0
        return packet, state | {"inner": inner}

    def with_momentum(self, momentum: float) -> CodecWrapper:
        """Return the wrapper with its momentum coefficient, if None, set to `momentum`."""
        is_unset = self.momentum is None
        filled = dataclasses.replace(self, momentum=momentum) if is_unset else self
        return CodecWrapper.with_momentum(filled, momentum)


def _zeros(spec: ModelSpec, kernels: Kernels) -> list[Float32]:
    """Return one array of zeros per tensor, on the device if the kernels store arrays on it."""
    return kernels.zeros([tensor.size for tensor in spec.tensors])


def _give_back(residuals: Sequence[Float32], packet: Packet, share: float) -> None:
    """Add the packet's decoded values, times the factor `share`, to the residuals."""
    for block in packet.blocks:
        where, values = decoded(block)
        residuals[block.slot][where] += values.dtype.type(share) * values
