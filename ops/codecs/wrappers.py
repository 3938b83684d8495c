"""Codec wrappers: apply the learning rate, clip gradients, warm up, or send small tensors whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.codecs.base import COMPRESSION_RATE, Codec, EncodeContext, check_finite
from thinwire.ops.codecs.dense import Dense
from thinwire.ops.codecs.error_feedback import CodecWrapper, wrappers_of
from thinwire.ops.codecs.packets import rescaled
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.options import choice, integer, number
from thinwire.ops.policy import setting
from thinwire.ops.types import (
    Block,
    ConfigurationError,
    Float32,
    Kind,
    ModelSpec,
    Packet,
    State,
)


@dataclasses.dataclass(frozen=True)
class Descend(CodecWrapper):
    """Codec wrapper that passes ``-learning rate * gradients`` (weight changes) to its inner codec.

    With the wrapper `Descend`, the residual of the inner codec (the values not sent yet) is a sum
    of weight changes, each at the learning rate of its training step. With the wrapper `Descend`, a
    new learning rate does not rescale the residual (the weight changes not sent yet).

    Attributes:
        inner: Gradient codec that encodes the changes of weights.

    Source: Dual-Way Gradient Sparsification, ICPP 2020 (its residual sums eta times gradients).
    """

    kind: ClassVar[Kind] = Kind.DELTA

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet for changes of weights: minus rate times gradients.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
        """
        ctx = _with_factor(ctx, len(tensors), -ctx.learning_rate)
        packet, state = super().encode(tensors, state, ctx)
        return Packet(packet.blocks, self.kind), state


@dataclasses.dataclass(frozen=True)
class RateAtSend(CodecWrapper):
    """Codec wrapper that multiplies the inner packet of gradients by minus the learning rate.

    With the wrapper `RateAtSend`, the inner codec's residual (the values not sent yet) is a sum of
    gradients, so a new learning rate applies to the residual too. RateAtSend applies the minus sign
    to the tensors and the learning rate to the packet's scales, so that no value is rounded twice.

    Attributes:
        inner: Gradient codec to which this wrapper passes the gradients.

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018.
    """

    kind: ClassVar[Kind] = Kind.DELTA

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the inner codec's state, and an empty list for the newest packet's scales."""
        return super().init(spec, kernels) | {"scales": []}

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet with its values times the learning rate.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
        """
        rate = ctx.learning_rate
        ctx = _with_factor(ctx, len(tensors), -1.0)
        packet, state = super().encode(tensors, state, ctx)
        blocks = tuple(rescaled(block, rate) for block in packet.blocks)
        scales = [block.values.scale for block in packet.blocks]
        return Packet(blocks, self.kind), state | {"scales": scales}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Let the inner codec take its packet back, without the learning rate as a factor."""
        # The residual sums gradients: with the learning rate in the packet's scales, the inner
        # codec would add changes of weights to the residual.
        blocks = tuple(
            dataclasses.replace(block, values=dataclasses.replace(block.values, scale=scale))
            for block, scale in zip(packet.blocks, state["scales"], strict=True)
        )
        return super().undelivered(Packet(blocks, self.inner.kind), state)


@dataclasses.dataclass(frozen=True)
class Clip(CodecWrapper):
    """Codec wrapper that clips gradients to an L2 norm before the inner codec accumulates them.

    Attributes:
        inner: Gradient codec that encodes the clipped gradient tensors.
        norm: Largest L2 norm that the clipped gradients can have, above 0.
        scope: "model": `norm` limits the norm over all tensors together. "tensor": `norm` limits
            the norm of each tensor.

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018, section 3.3: with N workers the
    limit of one worker is the usual limit divided by the square root of N.
    """

    norm: float = setting(
        number(
            "dgc_clip_norm",
            0.0,
            "With --codec=dgc: clip each gradient to this norm / sqrt(number of workers) before "
            "momentum; 0: off.",
            "L2 norm",
            low=0.0,
        ),
        1.0,
    )
    scope: str = setting(
        choice(
            "dgc_clip_scope",
            "model",
            "Norm that --dgc_clip_norm limits: model, the norm of the whole gradient; tensor, the "
            "norm of each tensor.",
            ("model", "tensor"),
        )
    )

    def __post_init__(self) -> None:
        """Raise an error if the clip norm is not finite and above 0, or `scope` is unknown."""
        super().__post_init__()
        if not self.norm:
            raise ConfigurationError(
                f"--dgc_clip_norm={self.norm}: expected a finite number above 0 (0 on the command "
                "line turns clipping off)."
            )

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet for the clipped gradient tensors.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
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
    """Return whether the codec clips tensors: whether one of its wrappers is a `Clip`."""
    return any(isinstance(wrapper, Clip) for wrapper in wrappers_of(codec))


@dataclasses.dataclass(frozen=True)
class WarmUp(CodecWrapper):
    """Codec wrapper that sends a fraction ``R ** ((e + 1) / (E + 1))`` of entries in epoch e < E.

    In a warm-up of E training epochs, a worker sends at least the fraction R of the gradient
    entries, the compression rate after the warm-up. With R = 0.001 and E = 4 the warm-up sends 25,
    6.3, 1.6 and 0.4 % of the entries in its epochs, then 0.1 %. The warm-up counts training epochs
    by the examples that all workers of the run have consumed.

    Attributes:
        inner: Gradient codec, such as TopK, that sends a fraction of the gradient entries.
        compression_rate: R, the fraction of gradient entries sent after the warm-up.
        epochs: E, the number of training epochs in which the fraction of sent entries falls to R,
            at least 1.

    Source: Lin, Han et al., "Deep Gradient Compression", ICLR 2018, section 3.3.
    """

    compression_rate: float = setting(COMPRESSION_RATE, shown=True)
    epochs: int = setting(
        integer(
            "warmup_epochs",
            None,
            "Number of first epochs in which sparsifying codecs send more entries.",
            "epochs",
            low=0,
            unset="4 for dgc, else 0",
        ),
        4,
    )

    def __post_init__(self) -> None:
        """Raise an error if the warm-up is below one epoch, or the compression rate not above 0."""
        super().__post_init__()
        if not self.epochs:
            raise ConfigurationError(
                f"--warmup_epochs={self.epochs}: expected 1 or more (0 on the command line turns "
                "the warm-up off)."
            )

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the inner codec's packet with the training epoch's fraction of entries.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
        """
        epoch = min(int(ctx.epoch), self.epochs)
        rate = self.compression_rate
        keep = max(rate, rate ** ((epoch + 1) / (self.epochs + 1)))
        # A `keep` from the caller takes precedence over the warm-up: a worker sets it to send the
        # whole residual at the end.
        if ctx.keep is None:
            ctx = dataclasses.replace(ctx, keep=keep)
        return super().encode(tensors, state, ctx)


@dataclasses.dataclass(frozen=True)
class DenseBelow(CodecWrapper):
    """Codec wrapper that sends small tensors whole: biases cost few bytes and suffer from delay.

    DenseBelow is directly around the codec, inside all other codec wrappers, so that the other
    wrappers also process the tensors that are sent whole.

    Attributes:
        inner: Codec for the large tensors; small tensors are sent in the inner codec's value dtype.
        entries: Least number of entries of a large tensor; at least 1.
    """

    entries: int = setting(
        integer(
            "dense_below",
            0,
            "Number of entries below which a codec sends all entries of a tensor; 0: sparsify all "
            "tensors.",
            "entries",
            low=0,
        ),
        1,
    )
    takes_factors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise an error if `entries` is below 1, because then no tensor could be small."""
        super().__post_init__()
        if not self.entries:
            raise ConfigurationError(
                f"--dense_below={self.entries}: expected 1 or more entries (0 on the command line "
                "sparsifies all tensors)."
            )

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the inner codec's initial state, which concerns the large tensors only."""
        large = [tensor for tensor in spec.tensors if tensor.size >= self.entries]
        return super().init(ModelSpec(tuple(large)), kernels)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return dense blocks of small tensors and the inner codec's blocks of large tensors.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        ctx = dataclasses.replace(ctx, finite=True)
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
        """Do an error-feedback step (see `Codec.feed`) for small tensors, then for large ones."""
        small, large = self._slots(tensors)
        factors = ctx.factors or (1.0,) * len(tensors)
        packets, states = [], []
        for codec, slots, codec_state in (
            (self._dense, small, {}),
            (self.inner, large, state["inner"]),
        ):
            context = dataclasses.replace(ctx, factors=tuple(factors[slot] for slot in slots))
            packet, codec_state = codec.feed(
                _pick(residuals, slots), _pick(tensors, slots), codec_state, context
            )
            packets.append(packet)
            states.append(codec_state)
        return _joined(packets[0], small, packets[1], large), state | {"inner": states[1]}

    @property
    def _dense(self) -> Dense:
        return Dense(self.inner.value_dtype)

    def _slots(self, tensors: Sequence[Float32]) -> tuple[list[int], list[int]]:
        """Return the indices of the small tensors, and the indices of the large tensors."""
        small = [slot for slot, tensor in enumerate(tensors) if tensor.size < self.entries]
        return small, [slot for slot, tensor in enumerate(tensors) if tensor.size >= self.entries]


def _with_factor(ctx: EncodeContext, count: int, factor: float) -> EncodeContext:
    """Return the encoding context with every gradient tensor's factor multiplied by `factor`."""
    factors = ctx.factors or (1.0,) * count
    return dataclasses.replace(ctx, factors=tuple(known * factor for known in factors))


def _pick(tensors: Sequence[Float32], slots: Sequence[int]) -> list[Float32]:
    return [tensors[slot] for slot in slots]


def _joined(one: Packet, slots: Sequence[int], other: Packet, others: Sequence[int]) -> Packet:
    """Merge two packets; renumber their blocks by the tensor numbers in `slots` and `others`."""

    def moved(packet: Packet, to: Sequence[int]) -> list[Block]:
        return [dataclasses.replace(block, slot=to[block.slot]) for block in packet.blocks]

    blocks = sorted(moved(one, slots) + moved(other, others), key=lambda block: block.slot)
    return Packet(tuple(blocks), other.kind)
